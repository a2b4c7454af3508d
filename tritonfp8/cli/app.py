"""The ``tritonfp8`` command: ``train``, ``doctor``, ``recipes``, ``verify`` and ``warmup``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from tritonfp8 import recipes
from tritonfp8.cli.console import console_of, fail
from tritonfp8.cli.train import train
from tritonfp8.cli.verify import verify
from tritonfp8.cli.warmup import warmup
from tritonfp8.workflow import doctor
from tritonfp8_command import root

app = root()
app.command()(train)


@app.command("doctor")
def examine() -> None:
    """Show GPU, versions, abilities and how each recipe runs here; test every kernel. Exit code 1 if a test fails."""
    if not doctor.diagnose(console_of()):
        raise typer.Exit(1)


@app.command("recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Describe this recipe: its equations, specs and source.")] = None,
) -> None:
    """List the recipes, or describe one."""
    if name is not None:
        try:
            typer.echo(recipes.describe(name))
        except ValueError as error:
            fail(error)
        return
    table = Table("recipe", *recipes.GEMMS, "FLOPs in 8 bits", show_lines=True)
    for each in map(recipes.get, recipes.names()):
        gemms = [getattr(each, gemm) for gemm in recipes.GEMMS]
        cells = [f"{gemm.lhs}\nx {gemm.rhs}" if gemm.quantized else "input's dtype" for gemm in gemms]
        table.add_row(each.name, *cells, f"{100 * each.quantized_share:.1f}".removesuffix(".0") + " %")
    console_of().print(table)


app.command()(verify)
app.command()(warmup)
