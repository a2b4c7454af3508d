"""Faults of one line that the tests must notice: ``python tests/support/faults/mutants.py [--only N]...``.

Each fault is put into a copy of the tree, in which the test files that it names then run. A fault that no test notices
means that something is no longer tested. Run it before and after tests are merged, shortened or moved.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import advice_mutants
import codes_mutants
import exact_mutants
import expert_mutants
import generator_mutants
import graph_mutants
import loading_mutants
import model_mutants
import rollout_mutants
import stored_mutants

ROOT = Path(__file__).resolve().parents[3]
COMPILED = "tests/compile_only"
OTHERS = (
    expert_mutants, graph_mutants, loading_mutants, model_mutants, stored_mutants, codes_mutants,
    advice_mutants, rollout_mutants, generator_mutants, exact_mutants,
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        file: the file that is changed, from the root.
        old: a text that occurs in it once.
        new: what stands there instead.
        wrong: what goes wrong.
        tests: arguments of pytest: files, or folders of them, in which a test must fail; after ``-k`` which tests,
            where the whole file takes minutes.
    """

    file: str
    old: str
    new: str
    wrong: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "kernels/numerics.py",
        "exponent = tl.where(bits == 0, 127, exponent)",
        "exponent = tl.where(bits == 0, 126, exponent)",
        "a block of zeros gets a scale of 1/2",
        ("tests/kernels/test_quantize.py", "-k", "given_amax"),
    ),
    Mutant(
        "kernels/numerics.py",
        "((bits & MANTISSA_MASK) > QMAX_MANTISSA)",
        "((bits & MANTISSA_MASK) >= QMAX_MANTISSA)",
        "an e8m0 scale is twice too large where amax is qmax times a power of two",
        ("tests/kernels/test_quantize.py",),
    ),
    Mutant(
        "kernels/cast/quantize.py",
        "highest = tl.maximum(highest, magnitudes(values))",
        "highest = magnitudes(values)",
        "of the partial maxima of a row only those of the last step are reduced",
        ("tests/kernels/test_quantize.py", "-k", "in_parts or joins"),
    ),
    Mutant(
        "kernels/cast/shards.py",
        "(row_0 + first_row) // ROWS",
        "first_row // ROWS",
        "a shard that starts inside its tensor reads the amaxes of other rows",
        ("tests/distributed/fsdp/test_grouped.py",),
    ),
    Mutant(
        "kernels/gemm/block_scaled.py",
        "b_scales += first // SCALE_K * stride_b_scale_k",
        "b_scales += 0 * stride_b_scale_k",
        "with a split K every part reads the scales of the first",
        ("tests/kernels/test_matmul.py", "-k", "every_configuration"),
    ),
    Mutant(
        "kernels/gemm/block_scaled.py",
        "acc += scale_product(product, b_scale, a_scale, B_ROWS, A_ROWS)",
        "acc += scale_product(product, a_scale, b_scale, A_ROWS, B_ROWS)",
        "swapped operands are scaled as if they were not",
        ("tests/kernels/test_matmul.py", "-k", "every_configuration"),
    ),
    Mutant(
        "kernels/gemm/tiles.py",
        "_store_columns(right, target, row, col + HALF,",
        "_store_columns(right, target, row, col,",
        "a tile that is stored in halves stores the second one over the first",
        ("tests/kernels/test_matmul.py", "-k", "every_configuration"),
    ),
    Mutant(
        "kernels/gemm/tiles.py",
        "return tl.dot(lhs, rhs.T, acc, max_num_imprecise_acc=PROMOTE_EVERY)",
        "return tl.dot(lhs, rhs.T, max_num_imprecise_acc=PROMOTE_EVERY)",
        "only the last step of K counts where operands are not swapped",
        ("tests/kernels/test_matmul.py", "-k", "every_configuration"),
    ),
    Mutant(
        "kernels/gemm/hopper_dense.py",
        "    if EARLY < STAGES:\n",
        "    if EARLY > STAGES:\n",
        "TMA does not see the barriers of later stages",
        (COMPILED, "-k", "every_config"),
    ),
    Mutant(
        "tritonfp8/launch/gemms/operands.py",
        " and aligned and step * scale.shape[1] <= MAX_TMA_COORDINATE",
        " and aligned",
        "the Hopper kernel is given scales that TMA's coordinates do not reach",
        ("tests/kernels/test_strides.py",),
    ),
    Mutant(
        "tritonfp8/tuning/matmul_space.py",
        "NATIVE_MX_ROWS = 128",
        "NATIVE_MX_ROWS = 64",
        "tiles that Triton multiplies in bf16 are chosen as native MX",
        (COMPILED, "-k", "native"),
    ),
    Mutant(
        "tritonfp8/reference/casts.py",
        ".clamp(max=MAX_ENCODE)",
        "",
        "the factor of a subnormal amax is infinite",
        ("tests/reference",),
    ),
    Mutant(
        "tritonfp8/launch/casts/partial_maxima.py",
        "fit = m * n // (WORKSPACE_SHARE * max(1, lines))",
        "fit = m * n",
        "the amax of a narrow tensor takes more memory than the tensor",
        ("tests/kernels/test_quantize.py", "-k", "narrow"),
    ),
    Mutant(
        "tritonfp8/tuning/chooser.py",
        "return (0, of_m, at.m) if of_m <= MAX_M_OCTAVES else None",
        "return (0, of_m, at.m)",
        "what was tuned for one token serves a million",
        ("tests/tuning/test_choose.py",),
    ),
    Mutant(
        "tritonfp8/distributed/tensor_parallel/placements.py",
        'adds_bias=all(mode.sharded != "K" or at == 0',
        'adds_bias=all(mode.sharded != "K" or at >= 0',
        "every rank of a row-parallel layer adds the bias",
        ("tests/distributed/tensor_parallel", "-k", "even_shards"),
    ),
    Mutant(
        "tritonfp8/distributed/tensor_parallel/placements.py",
        "summed_later = (_COLWISE,) if counted else (_COLWISE, _GATHERS)",
        "summed_later = (_COLWISE,)",
        "siblings scatter their gradients one by one",
        ("tests/distributed/tensor_parallel", "-k", "siblings"),
    ),
    Mutant(
        "tritonfp8/distributed/tensor_parallel/token_gather.py",
        "if gather.outer == 1:",
        "if gather.outer >= 1:",
        "gathered tokens of a batch come in another order",
        ("tests/distributed/tensor_parallel", "-k", "interleave"),
    ),
    Mutant(
        "tritonfp8/distributed/fsdp/byte_layout.py",
        "counts = tuple((0, self.shard(rank)[1]) for rank in range(self.shards))",
        "counts = tuple((0, self.shard_rows) for rank in range(self.shards))",
        "the padding of uneven shards is taken for rows of the weight",
        ("tests/distributed/fsdp/test_fsdp.py", "-k", "losses_with"),
    ),
    Mutant(
        "tritonfp8/distributed/fsdp/byte_layout.py",
        "read_before = min(max(done - first, 0), count)",
        "read_before = 0",
        "the scale of a block on two ranks is gathered twice",
        ("tests/distributed/fsdp/test_byte_layout.py",),
    ),
    Mutant(
        "tritonfp8/distributed/dtensor_rules.py",
        '"max": Partial("max")',
        '"max": Replicate()',
        "each rank takes the amax of its shard for that of the tensor",
        ("tests/distributed/test_dtensor_rules.py",),
    ),
    Mutant(
        "tritonfp8/conversion/sharing.py",
        "groups.setdefault(child.in_features, [])",
        "groups.setdefault(id(child), [])",
        "no two layers share their quantized input",
        ("tests/layers/linear/test_input_cache.py",),
    ),
    Mutant(
        "tritonfp8/conversion/selection/roles.py",
        "return WITH_HEAD.search(type(parent).__name__) is not None or out_features in rows",
        "return True",
        "an ordinary layer named output stays in high precision",
        ("tests/conversion/test_roles.py",),
    ),
    Mutant(
        "tritonfp8/ops/flops.py",
        "whole_linear(input, weight) * (needs_input + needs_weight)",
        "whole_linear(input, weight)",
        "the backward of an exported layer counts as one GEMM",
        ("tests/ops/test_flops.py",),
    ),
    Mutant(
        "tritonfp8/recipes/named.py",
        'tensor = QuantSpec("e4m3", scale_rounding="pow2")',
        'tensor = QuantSpec("e4m3")',
        "a recipe has other scales than it states",
        ("tests/test_recipes.py",),
    ),
    Mutant(
        "tritonfp8/layers/recompute.py",
        "len(_swaps) if outer is None else outer._first_swap",
        "len(_swaps)",
        "a region inside a recomputed one follows the recipe of backward",
        ("tests/layers/test_recompute.py",),
    ),
    Mutant(
        "tritonfp8/layers/linear/input_cache.py",
        "            or found.state != state\n",
        "",
        "a layer reads the cast of values that were overwritten since",
        ("tests/layers/linear/test_input_cache.py",),
    ),
    Mutant(
        "tritonfp8/layers/linear/function.py",
        "x.neg().neg()",
        "x",
        "a compiled layer saves its quantized input though backward has the original",
        ("tests/layers/linear/test_compile_saved.py",),
    ),
    Mutant(
        "tritonfp8/reference/optimizer.py",
        "rows = torch.arange(place[0], place[0] + n, device=device)",
        "rows = torch.arange(n, device=device)",
        "the random bits of a weight depend on how it is sharded",
        ("tests/kernels/optim/test_adamw.py",),
    ),
    Mutant(
        "tritonfp8/reference/optimizer.py",
        "by[use, at % RANDOM_GROUP]",
        "by[0, at % RANDOM_GROUP]",
        "a code and the moments of its weight are rounded by the same random bits",
        ("tests/reference/test_optimizer.py",),
    ),
    Mutant(
        "kernels/optim/adamw.py",
        "largest = _larger(largest, tl.reduce(",
        "largest = _larger(tl.zeros_like(largest), tl.reduce(",
        "a block of several tiles gets the scale of the last one",
        ("tests/kernels/optim/test_adamw.py",),
    ),
    Mutant(
        "tritonfp8/tuning/chooser.py",
        "        m = INVARIANT_M\n",
        "",
        "the bits of a batch-invariant row depend on the number of rows",
        ("tests/kernels/test_batch_invariant.py",),
    ),
    Mutant(
        "tritonfp8/ops/call_site.py",
        "if dropped != generation[0] or device != current_device():",
        "if device != current_device():",
        "a place in a compiled graph keeps a plan of configurations that were replaced",
        ("tests/ops/test_call_site.py", "-k", "looked_up_again"),
    ),
    Mutant(
        "kernels/health/figures.py",
        "wanted = (count + 1) // 2",
        "wanted = count // 2 + 1",
        "the median of an even number of columns is the upper one",
        ("tests/kernels/test_figures.py", "-k", "lower_one"),
    ),
    Mutant(
        "tritonfp8/tuning/matmul_space.py",
        "return not native_mx and m > MAX_M_OF_CODES",
        "return not native_mx and m >= MAX_M_OF_CODES",
        "an MX GEMM of 64 rows writes its operands in bf16",
        ("tests/kernels/test_widen.py",),
    ),
    Mutant(
        "tritonfp8/compat/inductor_private.py",
        "found.append(by_name.get(name, repr(argument.default_value)))",
        "found.append(repr(argument.default_value))",
        "an argument that follows the defaults of a call is replaced by its default",
        ("tests/ops/test_direct.py", "-k", "in_the_middle_is"),
    ),
    Mutant(
        "tritonfp8/layers/stored/base.py",
        "if spec == self.spec and (spec.block[0] == spec.block[1] or not transposed):",
        "if spec == self.spec:",
        "grad_input reads the scales of rows of a stored weight as scales of columns",
        ("tests/layers/stored", "-k", "plain_model"),
    ),
    Mutant(
        "tritonfp8/export/choice.py",
        "or _why_ragged(module, row)",
        "or None",
        "transformers reads layers of ragged blocks as other weights",
        ("tests/export",),
    ),
    Mutant(
        "tritonfp8/export/matching.py",
        "    check_names(set(unused) - {*ignored, *of_activations}, ",
        "    check_names(set(), ",
        "tensors of a checkpoint that the model does not have are dropped",
        ("tests/export",),
    ),
    Mutant(
        "tritonfp8/export/report.py",
        "return LoadedLayer(loaded_as, SAME_VALUES)",
        "return LoadedLayer(loaded_as, SAME_CODES)",
        "codes that change are called kept",
        ("tests/export",),
    ),
    *(Mutant(*fault) for faults in OTHERS for fault in faults.FAULTS),
)


def copy_tree(to):
    """Copy what git tracks, or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def is_caught(mutant, tree):
    """Whether a test fails in ``tree``, a copy, with the fault.

    Raises:
        ValueError: the old text does not occur once.
        RuntimeError: pytest ended in another way than with passed or failed tests.
    """
    path = tree / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.old!r} must occur once in {mutant.file}; it does {source.count(mutant.old)} times")
    path.write_text(source.replace(mutant.old, mutant.new))
    compiled = mutant.tests[0].startswith(COMPILED)
    environment = {**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": "0" if compiled else "1"}
    # Random examples are the same each time.
    environment["CI"] = "1"
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(source)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def verdict(tree, number, mutant):
    """One line about a fault; each thread has a copy of its own under ``tree``."""
    copy = tree / threading.current_thread().name
    if not copy.exists():
        copy_tree(copy)
    start = time.monotonic()
    try:
        caught = is_caught(mutant, copy)
        said = "caught" if caught else "MISSED"
    except (RuntimeError, ValueError) as error:
        caught, said = False, f"FAILED ({error})"
    print(f"{number:3} {said} {time.monotonic() - start:4.0f} s  {mutant.file}: {mutant.wrong}", flush=True)
    return caught


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, action="append", metavar="N", help="the number of a fault, from 1 on")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tried at once")
    options = parser.parse_args()
    numbered = [each for each in enumerate(MUTANTS, 1) if not options.only or each[0] in options.only]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        caught = list(pool.map(lambda each: verdict(Path(folder), *each), numbered))
    print(f"{sum(caught)} of {len(caught)} faults caught")
    sys.exit(not all(caught))


if __name__ == "__main__":
    main()
