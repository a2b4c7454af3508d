"""Hugging Face's Trainer and accelerate with FSDP2 and the FP8 all-gather: all weights train, to the same bits."""

import pytest
import trainer_cases
from cases import QUANTIZED, each_recipe
from pretrained_cases import written

from bench.distributed.trainer import VOCABULARY

PROCESSES = 2

pytestmark = [pytest.mark.xdist_group("trainers"), pytest.mark.timeout(600), pytest.mark.one_in(2)]

# Each program is a combination of options in which weights once did not train.
PROGRAMS = {
    "callback_float32": {"recipe": "rowwise", "dtype": "float32", "callback": True},
    "ram_efficient": {"recipe": "tensorwise", "ram_efficient": True},
    "ram_efficient_float32_recomputed": {
        "recipe": "blockwise", "dtype": "float32", "ram_efficient": True, "checkpointing": True,
    },
    "compiled_before": {"recipe": "blockwise", "compiled": "before"},
    "compiled_by_argument_float32": {"recipe": "tensorwise", "dtype": "float32", "compiled": "argument"},
    "compiled_both_ram_efficient": {"recipe": "rowwise", "compiled": "both", "ram_efficient": True, "callback": True},
    "recomputed": {"recipe": "mxfp8", "checkpointing": True, "callback": True},
    "tied_float32": {"recipe": "rowwise_hp_grad_weight", "dtype": "float32", "tied": True},
    "tied_compiled_ram_efficient": {"recipe": "mxfp8", "tied": True, "ram_efficient": True, "compiled": "before"},
    "scheduled_resumed": {"recipe": "rowwise_hp_grad_weight", "resume": True, "callback": True, "schedule": True},
    "scheduled_float32": {"recipe": "tensorwise", "dtype": "float32", "callback": True, "schedule": True},
    "resumed_float32": {"recipe": "rowwise", "dtype": "float32", "resume": True, "ram_efficient": True},
    "accumulated_no_reshard": {"recipe": "blockwise", "accumulate": 2, "reshard": False, "callback": True},
}  # fmt: skip
OF_EACH = {"resumed": {"resume": True}, "accumulated_no_reshard": {"accumulate": 2, "reshard": False}}
RARE = {
    **{f"{kind}_{x}": {"recipe": x, **OF_EACH[kind], "callback": True} for kind in OF_EACH for x in QUANTIZED},
    "compiled_rowwise_hp_grad_weight": {"recipe": "rowwise_hp_grad_weight", "compiled": "before"},
}
PROGRAMS |= RARE


# Compiled layers are alike: a second one takes as long to compile as the first, and FSDP's own tests compile two.
COMPILED = {"layers": 1}


def check_gathers(ranks, program, gathered, steps):
    """With the gather in 8 bits and without: the layers and experts that are gathered, and the same losses."""
    for row in ranks.run(2, trainer_cases.compare_on_cpus, timeout=300, **program):
        on, off = row["on"], row["off"]
        assert [on["gathered"], on["gathered_experts"]] == gathered
        assert [off["gathered"], off["gathered_experts"]] == [0, 0]
        assert on["stuck"] == off["stuck"] == []
        assert on["losses"] == off["losses"]
        assert len(set(on["losses"])) == steps
        assert row["ok"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.one_in(len(RARE)) if name in RARE else ()) for name in PROGRAMS]
)
def test_trainer(ranks, name):
    program = PROGRAMS[name]
    program = {**trainer_cases.SMALL, **(COMPILED if "compiled" in program else {}), **program}
    # All linear layers, but for a head that shares the embedding's weight, or that no pattern names.
    head = not (program.get("tied") or program.get("schedule"))
    steps = trainer_cases.SMALL["steps"] * program.get("accumulate", 1)
    check_gathers(ranks, program, [7 * program["layers"] + head, 0], steps)


MIXTURES = {
    "ram_efficient": {"recipe": "rowwise", "ram_efficient": True},
    "callback_float32_recomputed": {
        "recipe": "blockwise", "dtype": "float32", "callback": True, "checkpointing": True,
    },
    "compiled_before": {"recipe": "mxfp8", "compiled": "before"},
    "resumed_no_reshard": {"recipe": "tensorwise", "resume": True, "reshard": False, "callback": True},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_trainer_on_a_mixture(ranks, name):
    """Experts are converted, and their weights gathered in 8 bits: a Qwen3-MoE of four experts."""
    program = {**trainer_cases.SMALL, "layers": 1, "experts": 4, **MIXTURES[name]}
    # The linear layers of attention and the head; both weights of the experts.
    check_gathers(ranks, program, [4 + 1, 2], trainer_cases.SMALL["steps"])


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(ranks, kind):
    """The Trainer saves a whole model only with full state dicts: ``from_pretrained`` loads its bits."""
    full = kind == "FULL_STATE_DICT"
    options = {"callback": True, "dtype": "float32", "state_dict": kind, "save": full}
    whole, resumed = (
        ranks.run(2, trainer_cases.train_on_cpus, timeout=300, resume=resume, **options) for resume in (False, True)
    )
    for row, expected in zip(resumed, whole, strict=True):
        assert row["stuck"] == []
        assert row["losses"] == expected["losses"]
        assert row["digest"] == expected["digest"]
        assert row.get("saved") == (row["digest"] if full else None)


@pytest.mark.one_in(6)
@each_recipe
def test_trainer_with_distributed_data_parallel(ranks, recipe):
    """Every process has all weights, which must stay the same on all of them."""
    options = {"sharded": False, "callback": True, "dtype": "float32", "recipe": recipe}
    found = ranks.run(2, trainer_cases.train_on_cpus, timeout=300, **options)
    assert found[0]["gathered"] == 0
    assert found[0]["stuck"] == []
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["losses"] != found[1]["losses"]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("order", ["optimizer first", "optimizer last"])
def test_accelerate_with_an_optimizer_made_before(ranks, order, recipe):
    options = {"order": order, "recipe": recipe}
    on, off = (ranks.run(2, trainer_cases.accelerate_loop, gather=gather, **options) for gather in (True, False))
    assert on == off
    for losses, stuck in on:
        assert stuck == []
        assert len(set(losses)) == 3


def test_a_parameter_that_does_not_move_fails_the_comparison(ranks):
    """Shows that the tests above can fail: with a learning rate of zero every parameter is reported."""
    (row, _) = ranks.run(2, trainer_cases.compare_on_cpus, timeout=300, learning_rate=0.0)
    assert not row["ok"]
    assert len(row["on"]["stuck"]) == len(row["off"]["stuck"]) > 20


def check_adapters(ranks, case, stored=14, **options):
    """Adapters trained on codes as on bf16 weights of the same values, to the bit."""
    on, off = (ranks.run(2, case, timeout=300, stored=codes, **options) for codes in (True, False))
    assert [kept for _, kept, _ in on] == [stored, stored]
    assert [kept for _, kept, _ in off] == [0, 0]
    for mine, theirs in zip(on, off, strict=True):
        assert mine[0] == theirs[0]
        assert len(set(mine[0])) == 3
        assert mine[2] == theirs[2]
        # They begin as zeros.
        assert all(any(values) for name, values in mine[2].items() if "lora_B" in name)


@pytest.mark.parametrize("ram_efficient", [False, True])
def test_accelerate_and_peft_on_a_stored_base(ranks, ram_efficient):
    check_adapters(ranks, trainer_cases.lora_by_accelerate, ram_efficient=ram_efficient)


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "rowwise", "ram_efficient": True},
        {"recipe": "blockwise", "dtype": "float32", "checkpointing": True},
        {"recipe": "mxfp8", "experts": 3},
        {"recipe": "rowwise", "experts": 3, "ram_efficient": True},
    ],
    ids=["rowwise, ram efficient", "blockwise, float32, recomputed", "experts", "experts, ram efficient"],
)
def test_trainer_and_peft_on_a_stored_base(ranks, options):
    # In each of two layers: attention, and a dense MLP or all experts.
    stored = 2 * (4 + (1 if "experts" in options else 3))
    check_adapters(ranks, trainer_cases.lora_by_trainer, stored, **options)


@pytest.mark.parametrize(("case", "recipe"), [("stored_by_trainer", "blockwise"), ("stored_by_accelerate", "rowwise")])
def test_weights_stored_in_8_bits_train_by_our_adamw_and_resume_to_the_bit(ranks, tmp_path, case, recipe):
    """Each rank steps its shard of the codes; another checkpoint for each run, one for both ranks."""
    case, folders = getattr(trainer_cases, case), {x: str(tmp_path / str(x)) for x in (False, True)}
    whole, resumed = (ranks.run(2, case, timeout=300, recipe=recipe, folder=folders[x], resume=x) for x in folders)
    for (losses, kept, stuck, codes), expected in zip(resumed, whole, strict=True):
        assert kept == 7 * trainer_cases.SMALL["layers"]
        # A weight may keep some scales.
        assert [name for name in stuck if "scale" not in name] == []
        assert losses == expected[0]
        assert len(set(losses)) == 4
        assert codes == expected[3]


@pytest.fixture
def checkpoint(tmp_path):
    return written(tmp_path / "checkpoint", "compressed_channel", "qwen3", num_hidden_layers=2, vocab_size=VOCABULARY)


def test_adapters_train_on_a_checkpoint_in_8_bits(ranks, tmp_path, checkpoint):
    """As on a base of the same values; stopped and resumed, too."""
    options = {"checkpoint": checkpoint, "mode": "adapters"}
    runs = {"whole": {}, "plain": {"plain": "rowwise"}, "resumed": {"resume": True}}
    whole, plain, resumed = (
        ranks.run(
            2, trainer_cases.pretrained_by_trainer, timeout=300, folder=str(tmp_path / name), **options, **runs[name]
        )
        for name in runs
    )
    assert [kept for _, kept, _ in whole] == [14, 14]
    assert [kept for _, kept, _ in plain] == [0, 0]
    for (losses, _, adapters), theirs, again in zip(whole, plain, resumed, strict=True):
        assert losses == theirs[0] == again[0]
        assert len(set(losses)) == 4
        assert adapters == theirs[2] == again[2]
        assert all(any(x) for name, x in adapters.items() if "lora_B" in name)


def test_all_weights_of_a_checkpoint_in_8_bits_train_by_the_trainers_own_optimizer(ranks, tmp_path, checkpoint):
    """And a resumed run ends with the bits of one that was not stopped."""
    whole, resumed = (
        ranks.run(
            2, trainer_cases.pretrained_by_trainer, timeout=300, checkpoint=checkpoint, mode="full", resume=resume,
            folder=str(tmp_path / str(resume)),
        )
        for resume in (False, True)
    )  # fmt: skip
    for (losses, kept, stuck, codes), expected in zip(resumed, whole, strict=True):
        assert kept == 14
        assert [name for name in stuck if "scale" not in name] == []
        assert losses == expected[0]
        assert len(set(losses)) == 4
        assert codes == expected[3]


def test_sampled_steps_with_fsdp2_change_no_bit(ranks):
    sampled, plain = (ranks.run(2, trainer_cases.sampled_on_cpus, every=every) for every in (2, None))
    for (losses, final, logged), (expected, others, none) in zip(sampled, plain, strict=True):
        assert (logged, none) == ([1, 3], [])
        assert losses == expected
        assert len(set(losses)) == 2 * trainer_cases.SMALL["steps"]
        assert final == others
