"""Recipes that change while a model trains."""

import copy
import pickle

import covering
import pytest
import torch
from cases import QUANTIZED
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tritonfp8
from tritonfp8 import RecipeSchedule, recipes
from tritonfp8.specs.testing import assert_bitwise_equal


def stages(recipe="rowwise"):
    return [(0, "bf16"), (2, recipe), (4, "bf16"), (6, recipe)]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False)).bfloat16()


def batch(step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()


def train(model, optimizer, steps, before_step, call=None):
    losses = []
    for step in steps:
        before_step(step)
        loss = (call or model)(batch(step)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def scheduled(recipe="rowwise"):
    model, schedule = mlp(), RecipeSchedule(stages(recipe))
    schedule.convert(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), schedule


def test_stages_begin_at_steps_and_shares():
    schedule = RecipeSchedule([(0, "bf16"), (10, "rowwise"), ("90%", "bf16"), ("97.5 %", "mxfp8")], total_steps=200)
    assert [stage.start for stage in schedule.stages] == [0, 10, 180, 195]
    found = [schedule.recipe_at(step).name for step in (0, 9, 10, 179, 180, 194, 195, 10_000)]
    assert found == ["bf16", "bf16", "rowwise", "rowwise", "bf16", "bf16", "mxfp8", "mxfp8"]


def test_each_step_computes_by_its_recipe():
    model, optimizer, schedule = scheduled()
    losses = train(model, optimizer, range(8), lambda step: schedule.step())

    def by_hand(step):
        tritonfp8.swap_recipe(other, schedule.recipe_at(step))

    other = mlp()
    tritonfp8.convert(other, "rowwise")
    assert_bitwise_equal(losses, train(other, torch.optim.AdamW(other.parameters(), lr=1e-2), range(8), by_hand))
    plain = mlp()
    bf16 = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(8), lambda step: None)
    assert_bitwise_equal(losses[:2], bf16[:2])
    assert not torch.equal(losses[2:4], bf16[2:4])


def test_parameters_optimizer_and_random_numbers_stay():
    model, optimizer, schedule = scheduled()
    parameters, state = list(model.parameters()), torch.get_rng_state()
    for _ in range(8):
        schedule.step()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert {id(p) for p in parameters} == {id(p) for p in optimizer.param_groups[0]["params"]}


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_recipe_seen_before_compiles_nothing(recipe):
    torch._dynamo.reset()
    model, optimizer, schedule = scheduled(recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(model, backend=counter, fullgraph=True), []

    def before_step(step):
        frames.append(counter.frame_count)
        schedule.step()

    train(model, optimizer, range(8), before_step, compiled)
    # After steps of bf16, of the recipe, and of each again.
    assert [frames[2], frames[4], frames[6], counter.frame_count] == [1, 2, 2, 2]


# Inside a stage and between two, of "bf16" and of a recipe: where is a matter of the schedule, not of the recipe.
@pytest.mark.parametrize(("at", "recipe"), covering.each([3, 2, 1, 5], QUANTIZED))
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(at, recipe):
    model, optimizer, schedule = scheduled(recipe)
    whole = train(model, optimizer, range(8), lambda step: schedule.step())
    model, optimizer, schedule = scheduled(recipe)
    first = train(model, optimizer, range(at), lambda step: schedule.step())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    model, optimizer, schedule = scheduled(recipe)
    for each, state in zip((model, optimizer, schedule), saved, strict=True):
        each.load_state_dict(state)
    rest = train(model, optimizer, range(at, 8), lambda step: schedule.step())
    assert_bitwise_equal(torch.cat([first, rest]), whole)


def test_a_schedule_may_be_given_the_step():
    _, _, schedule = scheduled()
    assert schedule.step(5).name == "bf16"
    assert schedule.step().name == "rowwise"
    assert schedule.state_dict() == {"next_step": 7}
    # A model may be converted before.
    model = mlp()
    tritonfp8.convert(model, {"0": "mxfp8"})
    schedule = RecipeSchedule([(0, "bf16"), (1, "mxfp8")])
    schedule.attach(model)
    assert model[0].recipe == recipes.get("bf16")
    schedule.step(1)
    assert model[0].recipe == recipes.get("mxfp8")
    assert type(model[2]) is nn.Linear


def warnings_of_step(caplog):
    return [r for r in caplog.records if "training forward before the first schedule.step()" in r.getMessage()]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_forward_before_the_first_step_is_told_of_once(caplog, compiled):
    torch._dynamo.reset()
    model, _, schedule = scheduled()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
    # Neither is a step of the training.
    model.eval()(batch(0))
    tritonfp8.verify(model.train(), batch(0), backward=True)
    with torch.no_grad():
        model(batch(0))
    assert warnings_of_step(caplog) == []
    for _ in range(3):
        call(batch(0)).sum().backward()
    (record,) = warnings_of_step(caplog)
    assert "call step() before the forward of each step" in record.getMessage()
    assert record.levelname == "WARNING"
    schedule.step()
    call(batch(0)).sum().backward()
    assert len(warnings_of_step(caplog)) == 1
    # Once more after the first step, without the hook.
    assert compiled <= counter.frame_count <= 2 * compiled
    assert not model._forward_pre_hooks


def test_a_schedule_that_steps_before_each_forward_is_not_told_of(caplog):
    model, optimizer, schedule = scheduled()
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    train(model, optimizer, range(3), lambda step: schedule.step())
    schedule.attach(model)
    schedule.attach(model)
    assert len(model._forward_pre_hooks) == 1
    schedule.step()
    model(batch(0)).sum().backward()
    assert warnings_of_step(caplog) == []
    assert not model._forward_pre_hooks
    for each in copies:
        each(batch(0))
    assert len(warnings_of_step(caplog)) == 2


# More than Dynamo compiles.
SEVERAL = [recipes.Recipe(f"recipe {i}", output=recipes.get("rowwise").output) for i in range(8)]


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ([], {}, "first stage must start at step 0"),
        ([(1, "rowwise")], {}, "first stage must start at step 0"),
        ([(0, "bf16"), (5, "rowwise"), (5, "bf16")], {}, "later than the one before"),
        ([(0, "bf16"), ("50%", "rowwise"), (10, "bf16")], {"total_steps": 100}, "later than the one before"),
        ([(0, "bf16"), ("90%", "rowwise")], {}, "needs total_steps"),
        ([(0, "bf16"), ("190%", "rowwise")], {"total_steps": 10}, "between 0% and 100%"),
        ([(0, "bf16"), ("x%", "rowwise")], {"total_steps": 10}, "number before the percent sign"),
        ([(0, "bf16")], {}, "no stage quantizes"),
        ([(0, "bf16"), (1, "rowise")], {}, "did you mean 'rowwise'"),
        (list(enumerate(SEVERAL)), {}, "7 different recipes"),
    ],
)
def test_impossible_schedules_are_errors(stages, options, message):
    with pytest.raises(ValueError, match=message):
        RecipeSchedule(stages, **options)


def test_a_schedule_without_a_model_or_of_other_types_says_what_to_do():
    with pytest.raises(TypeError, match=r"a step \(an int\) or at a share"):
        RecipeSchedule([(0.5, "rowwise")])
    with pytest.raises(RuntimeError, match=r"RecipeSchedule.convert\(model\)"):
        RecipeSchedule(stages()).step()
    with pytest.raises(ValueError, match="no converted layer"):
        RecipeSchedule(stages()).attach(mlp())
