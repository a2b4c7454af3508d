"""The ``tritonfp8`` command: ``train``, ``advise``, ``doctor``, ``recipes``, ``verify`` and ``warmup``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonfp8 import recipes
from tritonfp8.cli.advise import advise
from tritonfp8.cli.console import console_of, fail
from tritonfp8.cli.train import train
from tritonfp8.cli.verify import verify
from tritonfp8.cli.warmup import warmup
from tritonfp8.workflow import doctor
from tritonfp8_command import root

app = root()
app.command()(train)
app.command()(advise)


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
    table = Table("recipe", *recipes.GEMMS, "scales", "8 bits", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "Of each GEMM, the left operand over the right one. 8 bits: share of the FLOPs of a layer."
    for each in map(recipes.get, recipes.names()):
        gemms = [getattr(each, gemm) for gemm in recipes.GEMMS]
        # The scales of operands in a column of their own: 100 columns hold the table.
        operands = [[str(spec).split(" ", 2) for spec in (gemm.lhs, gemm.rhs) if gemm.quantized] for gemm in gemms]
        cells = ["\n".join(f"{kind} {block}" for kind, block, _ in found) or "input's dtype" for found in operands]
        scales = dict.fromkeys(scale.strip("()") for found in operands for *_, scale in found)
        share = f"{100 * each.quantized_share:.1f}".removesuffix(".0")
        table.add_row(each.name, *cells, "\n".join(scales) or "-", f"{share} %", end_section=True)
    console_of().print(table)
    console_of().print("'tritonfp8 recipes NAME' prints the equations, the specs and the source of a recipe.")


app.command()(verify)
app.command()(warmup)
