"""warm_up: what it finds to do, what it does, and what is left when it is stopped."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import warmup_jobs
from cases import QUANTIZED
from tuned import layer_products, stored
from warmup_jobs import SHAPES, Touch, choices, last_is_fastest

from tritonfp8.compat import hardware
from tritonfp8.tuning import store
from tritonfp8.tuning.matmul_space import space
from tritonfp8.warmup import run as warmup
from tritonfp8.warmup.measure import OpJob
from tritonfp8.warmup.ranks import Ranks
from tritonfp8.warmup.workers import run_jobs

CPU = torch.device("cpu")
JOBS = [sys.executable, warmup_jobs.__file__]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.one_in(3)]


class TestShapes:
    def test_a_file(self, tmp_path):
        path = tmp_path / "shapes.json"
        with pytest.raises(ValueError, match="cannot be read"):
            warmup.read_shapes(path)
        path.write_text('[{"m": 1, "n": 2, "k": 3}, {"k": 6, "n": 5, "m": 4}]')
        assert warmup.read_shapes(path) == ((1, 2, 3), (4, 5, 6))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "cannot be read"), ("[" * 100_000, "cannot be read"), ("[]", r"it holds \[\]"), ("{}", "it holds {}"),
            ('[{"m": 1, "n": 2, "k": 3}, {"m": 1, "n": 2}]', "entry 2 is"),
            ('[{"m": 1, "n": 2, "k": 0}]', "entry 1 is"),
            ('[{"m": 1, "n": 2, "k": true}]', "entry 1 is"), ('[{"m": 1, "n": 2, "k": 3.0}]', "entry 1 is"),
            ('[{"m": 1, "n": 2, "k": 3, "x": 1}]', "entry 1 is"), ("[[1, 2, 3]]", "entry 1 is"),
        ],
    )  # fmt: skip
    def test_a_bad_file(self, tmp_path, text, message):
        path = tmp_path / "shapes.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            warmup.read_shapes(path)

    def test_tokens(self):
        assert warmup.parse_tokens("4x2048") == (4, 2048)
        assert warmup.parse_tokens("8192") == (1, 8192)
        for text in ("", "x", "4x", "1x2x3", "-1", "4x0", "4.5"):
            with pytest.raises(ValueError, match="sequences x tokens"):
                warmup.parse_tokens(text)


@pytest.fixture
def no_process_is_left():
    """The processes of the current test; other tests in this process may have long-lived ones."""
    before = set(multiprocessing.active_children())
    yield
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.usefixtures("no_process_is_left")
class TestWorkers:
    def run(self, jobs, workers=2):
        outcome = {}

        def done(index, error):
            assert index not in outcome
            outcome[index] = error

        run_jobs(jobs, CPU, workers, done)
        return outcome

    def test_a_job_that_dies_or_fails_is_reported_and_the_others_run(self, tmp_path):
        jobs = [Touch(str(tmp_path / str(i))) for i in range(5)]
        jobs[0] = dataclasses.replace(jobs[0], kill=signal.SIGKILL)
        jobs[1] = dataclasses.replace(jobs[1], error="CUDA out of memory")
        outcome = self.run(jobs)
        assert outcome == {
            **dict.fromkeys(range(5)), 0: "its process was ended by SIGKILL", 1: "RuntimeError: CUDA out of memory",
        }  # fmt: skip
        pids = [int((tmp_path / str(i)).read_text().split()[0]) for i in (2, 3, 4)]
        assert os.getpid() not in pids

    def test_none_run_here(self, tmp_path):
        jobs = [Touch(str(tmp_path / str(i)), error="no" if i else None) for i in range(2)]
        assert self.run(jobs, workers=0) == {0: None, 1: "RuntimeError: no"}
        assert (tmp_path / "0").read_text() == f"{os.getpid()} cpu"

    def test_ctrl_c_ends_the_workers(self, tmp_path):
        def stop(index, error):
            raise KeyboardInterrupt

        jobs = [Touch(str(tmp_path / "0")), Touch(str(tmp_path / "1"), nap=60)]
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_jobs(jobs, CPU, 2, stop)
        assert time.monotonic() - begin < 30
        assert not (tmp_path / "1").exists()


class TestWarmUp:
    def warm_up(self, **options):
        return warmup.warm_up(**{"shapes": SHAPES, "recipes": ["rowwise"], "device": "cpu", "workers": 0, **options})

    @pytest.fixture
    def ran(self, monkeypatch):
        """The jobs that run."""
        jobs, real = [], OpJob.run
        monkeypatch.setattr(OpJob, "run", lambda job, device: jobs.append(job) or real(job, device))
        return jobs

    def test_every_op_runs_in_a_worker_and_here(self, ran):
        stages = []
        report = self.warm_up(progress=lambda *step: stages.append(step))
        calls, _ = layer_products(*SHAPES)
        distinct = list(dict.fromkeys(calls))
        assert [job.call for job in ran] == distinct * 2
        assert (report.compiled, report.skipped, report.tuned, report.failed) == (len(distinct), 0, 0, ())
        assert 0 < report.seconds < 60
        assert not report.interrupted
        n = len(distinct)
        assert stages == [*(("compile", i, n) for i in range(n + 1)), *(("load", i, n) for i in range(n + 1))]
        # A worker compiles what this process has chosen.
        for job in ran[:n]:
            assert (job.config is not None) == (job.call.op == "scaled_matmul")
        assert stored() == {}

    def test_workers_run_them(self):
        report = self.warm_up(workers=2, shapes=SHAPES[:1])
        assert report.failed == ()
        assert report.compiled == len(layer_products(SHAPES[0])[0])

    def test_tuning_comes_first_and_decides_what_is_compiled(self, ran):
        report = self.warm_up(tune=True, timer=last_is_fastest)
        _, found = layer_products(*SHAPES)
        assert (report.tuned, report.skipped) == (len(found), 0)
        tried = sum(len(product.candidates(CPU)) for product in found)
        chosen = {job.call: job.config for job in ran[tried:] if job.config}
        for product in found:
            assert chosen[product.call] == product.candidates(CPU)[-1].name
        again = self.warm_up(tune=True, timer=pytest.fail)
        assert (again.tuned, again.skipped) == (0, len(found))
        assert self.warm_up(tune=True, timer=last_is_fastest, force=True).tuned == len(found)

    def test_of_a_machine_one_rank_compiles_and_of_all_one_tunes(self, monkeypatch, ran):
        monkeypatch.setattr(warmup, "joined", lambda timeout: contextlib.nullcontext(Ranks(rank=9, local_rank=1)))
        report = self.warm_up(tune=True, timer=pytest.fail)
        calls, _ = layer_products(*SHAPES)
        assert [job.call for job in ran] == list(dict.fromkeys(calls))
        assert (report.compiled, report.tuned, report.failed) == (len(ran), 0, ())

    def test_what_fails_is_reported_and_not_tried_again_here(self, monkeypatch):
        ran = []

        def run(job, device):
            ran.append(job)
            if job.call.op == "quantize_both":
                raise RuntimeError("ptxas\ndied")

        monkeypatch.setattr(OpJob, "run", run)
        report = self.warm_up(shapes=SHAPES[:1])
        calls, _ = layer_products(SHAPES[0])
        bad = [call for call in calls if call.op == "quantize_both"]
        assert report.failed == tuple(f"{call}: RuntimeError: ptxas" for call in bad)
        assert report.compiled == len(calls) - len(bad)
        assert len(ran) == len(calls) + report.compiled

    def test_ctrl_c_keeps_what_is_done(self):
        def stop(stage, done, total):
            if (stage, done) == ("compile", 3):
                raise KeyboardInterrupt

        report = self.warm_up(progress=stop, tune=True, timer=last_is_fastest)
        assert report.interrupted
        assert report.compiled == 3
        assert report.tuned == len(stored()) > 0

    def test_a_killed_one_goes_on(self, home):
        _, found = layer_products(*SHAPES)
        killed = subprocess.run([*JOBS, "killed_while_tuning"], env={**os.environ, "XDG_CACHE_HOME": str(home)})
        assert killed.returncode == -signal.SIGKILL
        before = stored()
        assert len(before) == 2
        report = self.warm_up(tune=True, timer=last_is_fastest)
        assert (report.skipped, report.tuned) == (2, len(found) - 2)
        assert stored().items() >= before.items()

    def test_a_read_only_home_is_no_obstacle(self, monkeypatch, home):
        (home / "tritonfp8").write_text("in the way")
        with pytest.warns(UserWarning, match="tuned configurations") as caught:
            report = self.warm_up(tune=True, timer=last_is_fastest)
        assert len(caught) == 1
        _, found = layer_products(*SHAPES)
        assert report.tuned == len(found)
        assert choices() == {str(product): product.candidates(CPU)[-1].name for product in found}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"shapes": None}, "needs a model or a file of shapes"),
            ({"recipes": []}, "at least one recipe"),
            ({"recipes": ["rowise"]}, "did you mean 'rowwise'"),
            ({"recipes": ["bf16"]}, "nothing to warm up"),
            ({"dtype": "int8"}, "dtype must be one of"),
            ({"model": "8b"}, "no model is named '8b'"),
            ({"device": "cuda:7"}, r"needs a CUDA GPU with FP8 tensor cores \(sm_89 or later\)"),
            pytest.param({"device": None}, "needs a CUDA GPU", marks=NO_GPU),
            ({"model": "tiny", "tokens": [(1, 10**6)]}, "seq_len must be at most"),
        ],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            self.warm_up(**options)

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("model", [3, ["tiny"]]),
            ("shapes", [3, [(1, 2)], [(0, 1, 1)], ["abc"], [(1, 2, None)], [3]]),
            ("recipes", [3, None, "rowwise", [None]]),
            ("tokens", [3, None, [(1,)], [("1", "2")], [(-1, 2)], "4x4"]),
            ("device", [3, torch.device("cpu")]),
            ("timeout", [0, -1, "1", None, float("nan"), True, 1e30]),
            ("workers", [-1, "2", 1.5, True]),
        ],
    )
    def test_arguments_of_another_type(self, name, values):
        for value in values:
            with pytest.raises((ValueError, TypeError), match="must be"):
                self.warm_up(**{name: value})


@pytest.mark.gpu
class TestOnGpu:
    STEP = (
        "import torch, tritonfp8; layer = tritonfp8.Float8Linear(512, 384, bias=False, device='cuda', "
        "dtype=torch.bfloat16, recipe='{}'); x = torch.randn(640, 512, device='cuda', dtype=torch.bfloat16, "
        "requires_grad=True); out = layer(x); out.backward(torch.randn_like(out)); torch.cuda.synchronize()"
    )

    @pytest.mark.parametrize("recipe", QUANTIZED)
    def test_the_first_step_compiles_nothing(self, recipe, tmp_path, monkeypatch):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        report = warmup.warm_up(shapes=[(640, 384, 512)], recipes=[recipe], workers=2)
        assert report.failed == ()
        before = set((tmp_path / "triton").iterdir())
        assert before
        subprocess.run([sys.executable, "-c", self.STEP.format(recipe)], check=True)
        assert set((tmp_path / "triton").iterdir()) == before

    def test_tuning_measures_and_is_used(self):
        report = warmup.warm_up(shapes=[(640, 384, 512)], recipes=["rowwise", "blockwise"], tune=True, workers=2)
        assert report.failed == ()
        machine = hardware.machine_key(hardware.abilities("cuda"))
        entries = store.read_user(machine)
        assert len(entries) == report.tuned > 3
        for at, found in entries.items():
            assert 1 < found.microseconds < 1000
            assert found.config in {config.name for config in space(at.kind.family, at.kind.accumulation)}
