"""torchtitan's own Trainer: its optimizer, schedule, metrics and checkpoints, with the FP8 all-gather."""

import pytest
import torchtitan_trainer_cases as cases
from cases import QUANTIZED
from torchtitan_cases import HEAD

# torchtitan's checkpoints make a group of all processes.
PROCESSES = 2
pytestmark = [pytest.mark.xdist_group("torchtitan"), pytest.mark.timeout(600), pytest.mark.one_in(2)]

PROGRAMS = {"fsdp": {}, "fsdp_chunked_loss": {"chunked": True, "recipe": HEAD}}
RARE = {f"fsdp_{name}": {"recipe": name} for name in QUANTIZED if name != "rowwise"}
PROGRAMS |= RARE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.one_in(len(RARE)) if name in RARE else ()) for name in PROGRAMS]
)
def test_the_gather_changes_no_bit_and_a_run_goes_on_from_its_checkpoint(ranks, tmp_path, name):
    def run(gather, **options):
        options |= PROGRAMS[name]
        return ranks.run(PROCESSES, cases.train, timeout=200, folder=tmp_path / str(gather), gather=gather, **options)

    on, off, resumed = run(True), run(False), run(True, resume_at=2)
    for row, expected, rest in zip(on, off, resumed, strict=True):
        assert row["stuck"] == expected["stuck"] == rest["stuck"] == []
        assert len(set(row["losses"])) == 4
        assert row["losses"] == expected["losses"]
        assert row["weights"] == expected["weights"] == rest["weights"]
        assert rest["losses"] == row["losses"][2:]
