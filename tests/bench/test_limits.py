"""Measurements of limits: that each part is what its name says, and that nothing of a measurement stays behind."""

import cProfile
import json
import pstats

import pytest
import torch
import typer
from typer.testing import CliRunner

import tritonfp8
from bench import first_step, models, shapes
from bench.limits import host, multicast, power, step
from bench.suites import test_launch
from docs.measured import limits
from tritonfp8.compat import torch_private, triton_private
from tritonfp8.launch import executor
from tritonfp8.ops import direct

pytestmark = pytest.mark.one_in(3)


def rows_of(program, path):
    """Rows that a program writes in a smoke test, by the fields that say what they are of."""
    app = typer.Typer()
    app.command()(program.main)
    done = CliRunner().invoke(app, ["--smoke", "--out", str(path)])
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text())["rows"]


def test_each_gemm_runs_on_both_kinds_of_codes(tmp_path):
    rows = rows_of(power, tmp_path / "power.json")
    found = {(row["case"], row["accumulation"], row["codes"]) for row in rows if row["contender"] == power.OWN}
    wanted = [(case, each) for case, accumulations in power.CASES.items() for each in accumulations]
    assert found == {(*each, codes) for each in wanted for codes in (power.RANDOM, power.ZERO)}
    assert all(row["seconds"] > 0 for row in rows)


def test_only_samples_of_the_run_count():
    sampler = power.Sampler(torch.device("cpu"))
    for seconds, line in ((1.0, "345, 80.1, Not Active"), (2.0, "1300, 690.0, Active"), (3.0, "1350, 700.0, Active")):
        sampler._found.append(power.Sample.of(line)._replace(seconds=seconds))
    assert sampler.between(1.5, 3.5) == {"mhz": 1325, "watts": 695, "capped": 1}
    assert sampler.between(0.5, 3.5)["capped"] == pytest.approx(2 / 3)
    assert sampler.between(4, 5) == {}


def test_multicast_is_measured_beside_our_gemm(tmp_path):
    rows = rows_of(multicast, tmp_path / "multicast.json")
    assert [(row["accumulation"], row["contender"]) for row in rows] == [
        (each, multicast.OWN) for each in multicast.TILES
    ]
    assert all(0 < row["error"] < multicast.MAX_ERROR and row["seconds"] > 0 for row in rows)


def test_builds_that_differ_in_a_bit_or_err_are_refused():
    expected = torch.randn(16, 16)
    out = expected.bfloat16()
    same = {multicast.ALONE: out.clone, multicast.MULTICAST: out.clone}
    assert set(multicast.check(same, expected)) == set(same)
    other = out.clone()
    other.view(torch.int16)[3, 5] ^= 1
    with pytest.raises(RuntimeError, match="differs"):
        multicast.check({**same, multicast.RELAY: other.clone}, expected)
    with pytest.raises(RuntimeError, match="error"):
        multicast.check({multicast.OWN: out.neg}, expected)


def test_a_part_is_what_a_call_takes_less_without_it(tmp_path, monkeypatch):
    """The measured calls are the graph's; then launches, then memory, are replaced, and nothing afterwards."""
    seen, real = [], (triton_private.raw_launches, torch_private.empty_strided)

    def seconds(device, run, calls):
        run()
        replaced = (triton_private.raw_launches is host.no_launches, torch_private.empty_strided is host.same_memory)
        seen.append(replaced)
        return {0: 26.0, 1: 15.0, 2: 6.0, 3: 2.0}[(len(seen) - 1) % 4] * host.OPS_IN_GRAPH

    monkeypatch.setattr(host.Device, "idle_host_seconds", seconds)
    found = {}
    for row in rows_of(host, tmp_path / "host.json"):
        found.setdefault(row["op"], {})[row["part"]] = row["host_seconds"]
    expected = {"all": 26, host.GRAPH: 11, host.LAUNCH: 9, host.MEMORY: 4, host.REST: 2}
    assert found == {"quantize": expected, "scaled_matmul": expected, host.TORCH_LAUNCH: {"all": 26}}
    plain, launches, both = (False, False), (True, False), (True, True)
    assert seen == [plain, plain, launches, both] * 2 + [plain]
    assert real == (triton_private.raw_launches, torch_private.empty_strided)


def test_a_measurement_leaves_no_plans_behind():
    before = executor.generation[0]
    with host.new_plans():
        assert executor.generation[0] == before + 1
    assert executor.generation[0] == before + 2


def test_memory_of_the_same_layout_is_the_same():
    allocate = host.same_memory(torch.device("cpu"))
    first, again = (allocate((2, 3), (3, 1), torch.float32) for _ in range(2))
    assert first is again
    assert first.stride() == (3, 1)
    assert allocate((2, 3), (1, 2), torch.float32).stride() == (1, 2)


def test_seconds_are_those_of_the_package_that_spends_them():
    x, spec = torch.randn(256, 512), tritonfp8.recipes.get("rowwise").output.lhs
    profiler = cProfile.Profile()
    with profiler:
        tritonfp8.quantize(x, spec)
    found = first_step.by_package(profiler)
    assert found["tritonfp8"] > 0
    assert sum(found.values()) == pytest.approx(pstats.Stats(profiler).total_tt)


def test_a_profiled_first_step_has_the_parts():
    (shape, *_) = shapes.select("first_step", ["smoke"])
    found = test_launch.first_step(shape, "cpu", "rowwise", warm_up=False, smoke=True, profile=True)
    assert found["profile"]["tritonfp8"] > 0
    assert sum(found["profile"].values()) == pytest.approx(found["step_seconds"], rel=0.2)


@pytest.mark.parametrize(("name", "kv_heads"), [("tiny", 2), ("gemma layers", 4), ("tiny with biases", 4)])
def test_least_bytes_are_those_of_the_linear_layers(name, kv_heads):
    size = (2, 64, 96, 4, kv_heads, 2, 8)
    model = models.build(shapes.Shape("tiny", name, size), torch.device("cpu"))
    inputs, outputs, weights = {}, [], []

    def note(layer, args, out):
        inputs[id(args[0])] = args[0]
        outputs.append(out.numel())
        weights.append(layer.weight.numel())

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(note)
    model(torch.zeros(2, 8, 64, dtype=torch.bfloat16))
    tokens = sum(x.numel() for x in inputs.values()) + sum(outputs)
    for recipe, reads, weight_reads in (("blockwise", 1, 2), ("rowwise", 2, 2), ("tensorwise", 2, 3)):
        expected = tokens * (2 * reads + 1 + 1) + sum(weights) * (2 * weight_reads + 1 + 1)
        assert limits.least_bytes(recipe, name, *size) == expected


def test_least_bytes_of_experts_are_those_of_their_tensors():
    tokens, top_k, experts, hidden, inside = size = (8, 2, 4, 64, 32)
    rows = tokens * top_k
    x, y, picked = (torch.empty(n, hidden, dtype=torch.bfloat16) for n in (tokens, tokens, rows))
    gate_up, made = torch.empty(rows, 2 * inside, dtype=torch.bfloat16), torch.empty(rows, inside, dtype=torch.bfloat16)
    weights = 3 * experts * hidden * inside
    passes = [
        # What a pass reads, then the codes that it reads and writes, then what else it writes.
        ([x], x.numel(), []), ([], x.numel() + picked.numel(), []), ([gate_up], 0, [made]),
        ([made], 2 * made.numel(), []), ([picked], 0, [y]),
        ([x], picked.numel(), []), ([y], 2 * picked.numel(), []), ([picked, y], 0, []), ([picked], 0, [y]),
        ([made, gate_up], 0, [gate_up]), ([gate_up], 2 * gate_up.numel(), []),
    ]  # fmt: skip
    expected = sum(sum(t.nbytes for t in read + written) + codes for read, codes, written in passes)
    assert limits.least_bytes_of_experts(*size) == expected + weights * 2 * (2 + 1)


def test_a_row_of_a_step_has_its_times_and_parts(monkeypatch, tmp_path):
    """Of each contender and way; on a CPU nothing is launched. The functions that noted calls are put back."""
    real = (triton_private.raw_launches, torch_private.empty_strided, direct.site, direct.CALLS.quantize)
    (shape,) = (shape for shape in shapes.select("model", [shapes.SMOKE]) if shape.name in models.DIFFUSION)
    monkeypatch.setattr(shapes, "select", lambda kind, names: [shape])
    app = typer.Typer()
    app.command()(step.main)
    path = tmp_path / "step.json"
    options = ["--models", shapes.SMOKE, "--recipes", "rowwise", "--out", str(path)]
    done = CliRunner().invoke(app, [*options, "--parts"])
    assert done.exit_code == 0, done.output
    rows = {(row["contender"], row["way"]): row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {(name, way) for name in (step.BF16, "rowwise") for way in step.WAYS}
    assert all(row["seconds"] > 0 and row["host_seconds"] > 0 for row in rows.values())
    # Four linear layers; the one that computes scales and shifts stays in bf16.
    assert [rows[name, step.EAGER]["converted"] for name in (step.BF16, "rowwise")] == [0, 4]
    assert {row[step.LAUNCHES] for (_, way), row in rows.items() if way != step.GRAPH} == {0}
    args = torch.randn(32, 64), *tritonfp8.recipes.get("rowwise").output.lhs.args
    with step.noted() as times:
        direct.CALLS.quantize(*args)
        # On a CPU no plan serves the call, so it goes on to the function for any layouts.
        direct.site("quantize")(*args)
    assert [len(times[part]) for part in (step.CALLS, step.LAUNCHES, step.MEMORY)] == [3, 0, 0]
    assert min(times[step.CALLS]) > 0
    assert real == (triton_private.raw_launches, torch_private.empty_strided, direct.site, direct.CALLS.quantize)

    done = CliRunner().invoke(app, [*options, "--filter", "auto", "--ways", step.EAGER])
    assert done.exit_code == 0, done.output
    # "auto" leaves all in bf16: the layers are too small to gain.
    assert [row["converted"] for row in json.loads(path.read_text())["rows"]] == [0, 0]
