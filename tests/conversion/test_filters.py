"""The argument ``filter``: patterns, "auto", and what is neither; and a call without a recipe."""

import json
import re
from pathlib import Path

import pytest
import torch
from cases import llama
from torch import nn

from tritonfp8 import RecipeSchedule, convert, recipes, swap_recipe
from tritonfp8.conversion.selection import cost

MEASURED = Path(__file__).resolve().parents[2] / "bench" / "results" / "nvidia-h200" / "linear.json"
UP = [f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up")]


class TestPatterns:
    def test_layers_that_one_of_them_matches(self):
        report = convert(llama(), "rowwise", filter=["*.gate_proj", "*.mlp.up_*"])
        assert sorted(report.converted) == sorted(UP)
        assert set(report.skipped.values()) == {"no pattern of the filter matches it"}

    def test_exact_names(self):
        assert list(convert(llama(), "rowwise", filter={UP[0]}).converted) == [UP[0]]

    def test_with_recipes_by_patterns(self):
        report = convert(llama(), {"*gate_proj": "blockwise", "*": "rowwise"}, filter=("*gate_proj", "*up_proj"))
        assert {name: recipe.name for name, recipe in report.converted.items()} == {
            name: "blockwise" if "gate" in name else "rowwise" for name in UP
        }

    def test_small_layers_stay_out(self):
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32))
        assert convert(model, "rowwise", filter=["0", "1"]).skipped == {"0": "in_features=8 below 16"}

    def test_a_pattern_of_no_use(self):
        model = llama()
        with pytest.raises(ValueError, match=r"'\*\.mpl\.\*' of the filter match no linear layer"):
            convert(model, "rowwise", filter=["*.mlp.*", "*.mpl.*"])
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize(
    ("filter", "error", "message"),
    [
        ("*.mlp.*", ValueError, 'must be "auto" if it is a str.*give a list'),
        ([], ValueError, "no patterns"),
        ([3], TypeError, "must be a str; got int"),
        (3, TypeError, 'a list of patterns, "auto" or None; got int'),
        ({"*": True}, TypeError, "got dict"),
    ],
)
def test_what_is_no_filter(filter, error, message):
    with pytest.raises(error, match=message):
        convert(llama(), "rowwise", filter=filter)


@pytest.mark.parametrize("function", [convert, swap_recipe])
def test_a_call_without_a_recipe_lists_the_recipes(function):
    with pytest.raises(TypeError, match="a recipe is needed") as caught:
        function(llama())
    for name in recipes.names():
        assert f"\n  {name} " in str(caught.value)


def test_a_recipe_in_a_file(tmp_path):
    mine = recipes.get("rowwise", accumulation="fast")
    recipes.save(mine, tmp_path / "mine.toml")
    model = nn.Sequential(nn.Linear(32, 32))
    assert convert(model, str(tmp_path / "mine.toml")).converted == {"0": mine}
    swap_recipe(model, {"0": str(tmp_path / "mine.toml")})
    assert model[0].recipe == mine


class TestAuto:
    def layers(self):
        with torch.device("meta"):
            return nn.ModuleDict(
                {"large": nn.Linear(4096, 14336), "thin": nn.Linear(4096, 64), "lm_head": nn.Linear(4096, 256)}
            )

    def test_layers_that_would_get_slower_stay(self):
        report = convert(self.layers(), "rowwise", filter="auto", tokens=16384)
        assert list(report.converted) == ["large"]
        assert "it would take" in report.skipped["thin"]
        assert "with 16384 tokens on" in report.skipped["thin"]
        assert "an output head" in report.skipped["lm_head"]

    @pytest.mark.parametrize(("recipe", "tokens"), [("rowwise", 16), ("mxfp8", 16384)], ids=["few", "emulated"])
    @pytest.mark.parametrize("options", [{}, {"mode": "inference"}, {"weight_storage": "quantized"}], ids=str)
    def test_where_bf16_is_best_everywhere_nothing_is_changed(self, recipe, tokens, options):
        model = self.layers()
        parameters = list(model.parameters())
        report = convert(model, recipe, filter="auto", tokens=tokens, **options)
        assert report.is_empty
        assert not report.converted
        assert "an output head" in report.skipped["lm_head"]
        for name in ("large", "thin"):
            assert re.search(
                rf"it would take \d+ us a step and \d+ us in bf16, with {tokens} tokens", report.skipped[name]
            )
        assert "0 converted, 3 skipped" in str(report)
        assert "nothing was changed: bf16 is faster for each layer that could be converted" in str(report)
        assert report.stored_bytes is None
        assert {type(layer) for layer in model.values()} == {nn.Linear}
        assert all(a is b and a.requires_grad for a, b in zip(model.parameters(), parameters, strict=True))

    def test_other_empty_conversions_are_errors(self):
        with pytest.raises(ValueError, match="nothing was converted"):
            convert(nn.ModuleDict({"lm_head": nn.Linear(4096, 256)}), "rowwise", filter="auto", tokens=16)
        with pytest.raises(ValueError, match="nothing was converted"):
            convert(nn.Sequential(nn.Linear(8, 8)), "rowwise", filter="auto", tokens=16)

    def test_a_schedule_of_a_model_that_stays_in_bf16(self):
        schedule = RecipeSchedule([(0, "bf16"), (1, "rowwise")], total_steps=3)
        model = self.layers()
        assert schedule.convert(model, filter="auto", tokens=16).is_empty
        assert [schedule.step().name for _ in range(3)] == ["bf16", "rowwise", "rowwise"]
        assert {type(layer) for layer in model.values()} == {nn.Linear}

    @pytest.mark.parametrize(("tokens", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
    def test_tokens(self, tokens, error):
        with pytest.raises(error, match="tokens must be"):
            convert(self.layers(), "rowwise", filter="auto", tokens=tokens)

    class TestHost:
        """Blocks of a diffusion transformer, 1152 wide: their GEMMs gain, but the host launches them too slowly."""

        TOKENS = 8192

        def model(self, width=1152):
            def block():
                sizes = {"qkv": 3 * width, "up": 4 * width}
                return nn.ModuleDict({name: nn.Linear(width, n) for name, n in sizes.items()})

            with torch.device("meta"):
                return nn.ModuleDict(
                    {"blocks": nn.ModuleList(block() for _ in range(3)), "first": nn.Linear(4096, 4096)}
                )

        def converted(self, monkeypatch, launch, **options):
            monkeypatch.setattr(cost, "TORCH_LAUNCH", launch)
            monkeypatch.setattr(cost, "launch_seconds", lambda name: launch)
            return convert(self.model(**options), "rowwise", filter="auto", tokens=self.TOKENS)

        def test_a_block_for_which_the_host_is_too_slow_stays(self, monkeypatch):
            report = self.converted(monkeypatch, 8e-6)
            assert list(report.converted) == ["first"]
            reasons = {report.skipped[f"blocks.{i}.{name}"] for i in range(3) for name in ("qkv", "up")}
            assert len(reasons) == 1
            assert re.fullmatch(
                r"the host would need \d+ us a step to launch its block, which takes \d+ us in bf16, with 8192 .*",
                reasons.pop(),
            )

        def test_a_quick_host_or_a_wide_block_gains(self, monkeypatch):
            assert len(self.converted(monkeypatch, 8e-7).converted) == 7
            assert len(self.converted(monkeypatch, 8e-6, width=4096).converted) == 7

        @pytest.mark.parametrize("name", ["is_initialized", "is_torchelastic_launched"])
        def test_ranks_do_not_measure_each_by_itself(self, monkeypatch, name):
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(cost, "machine_of", lambda device: cost.H200)
            report = self.converted(monkeypatch, 8e-7)
            assert len(report.converted) == 7
            monkeypatch.setattr(cost, "launch_seconds", lambda name: 1.0)
            assert not convert(self.model(), "rowwise", filter="auto", tokens=self.TOKENS).converted
            monkeypatch.setattr(cost.dist, name, lambda: True)
            assert len(convert(self.model(), "rowwise", filter="auto", tokens=self.TOKENS).converted) == 7

        def test_without_auto_the_host_does_not_count(self, monkeypatch):
            monkeypatch.setattr(cost, "TORCH_LAUNCH", 1.0)
            assert len(convert(self.model(), "rowwise").converted) == 7

        def test_where_the_host_is_slow_for_all_nothing_is_changed(self, monkeypatch):
            report = self.converted(monkeypatch, 1.0)
            assert report.is_empty
            assert "nothing was changed" in str(report)

    def test_predictions_are_near_what_was_measured(self):
        """Of an H200, for each shape and recipe: seconds of the kernels over those of bf16."""
        rows = [row for row in json.loads(MEASURED.read_text())["rows"] if row["case"] == "layer kernels"]
        plain = {tuple(row["shape"]): row["seconds"] for row in rows if row["contender"] == "bf16"}
        # mxfp8 was measured with the kernel that multiplied MX operands of every M before.
        ours = [
            row for row in rows if row["own"] and row["contender"].endswith(" precise") and "mx" not in row["contender"]
        ]
        assert len(ours) >= 16
        for row in ours:
            tokens, *sizes = row["shape"]
            recipe = recipes.get(row["contender"].removesuffix(" precise"))
            both = (cost.layer_seconds(each, tokens, tuple(sizes), cost.H200) for each in (recipe, None))
            measured = row["seconds"] / plain[tuple(row["shape"])]
            assert next(both) / next(both) == pytest.approx(measured, rel=0.2), row

    def test_bf16_takes_as_long_as_it_did(self):
        assert cost.layer_seconds(recipes.get("bf16"), 512, (96, 64), cost.H200) == cost.layer_seconds(
            None, 512, (96, 64), cost.H200
        )
