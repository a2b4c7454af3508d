"""quantize_weights_once: the same bits with fewer casts, and no weight that changed is used as it was."""

import copy
import functools

import pytest
import torch
from cases import QUANTIZED, llama, normal, tokens, with_gradients
from cast_counts import casts_of
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tritonfp8
from tritonfp8 import Float8Linear, convert, quantize_weights_once, recipes, revert, swap_recipe
from tritonfp8.functional import linear, quantize_weight
from tritonfp8.layers.changes import SAMPLES, Watch
from tritonfp8.specs.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", recipes.names())
SHAPE = (24, 40)
STEPS = 3


def layer(name="rowwise", dtype=torch.float32):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(*SHAPE[::-1]), nn.ReLU(), nn.Linear(24, 24, bias=False)).to(dtype)
    convert(module, name)
    return module


def inputs(dtype=torch.float32):
    return [normal(33, 40, seed=seed, dtype=dtype).requires_grad_() for seed in range(STEPS)]


def accumulate(module, xs):
    """Outputs, gradients of the inputs and accumulated gradients of the parameters."""
    module.zero_grad()
    outs = [module(x) for x in xs]
    for out in outs:
        out.backward(torch.ones_like(out))
    results = [*outs, *(x.grad for x in xs), *(p.grad for p in module.parameters())]
    for x in xs:
        x.grad = None
    return results


def inside_a_block(module, *actions):
    with quantize_weights_once(module):
        for action in actions:
            action()


def weight_casts(function):
    return sum(casts_of(function, shape)[0] for shape in (SHAPE, (24, 24)))


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits(name, dtype):
    module, xs = layer(name, dtype), inputs(dtype)
    expected = accumulate(module, xs)
    with quantize_weights_once(module):
        assert_bitwise_equal(accumulate(module, xs), expected)
    assert_bitwise_equal(accumulate(module, xs), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_no_pass_quantizes_a_weight(name):
    module, xs = layer(name), inputs()
    # To MXFP4 first, where the recipe does that.
    casts = 2 if recipes.get(name).weights is None else 4
    assert weight_casts(lambda: accumulate(module, xs)) == casts * 2 * STEPS
    with quantize_weights_once(module):
        assert weight_casts(lambda: accumulate(module, xs)) == 0


@each_recipe
def test_bytes_held(name):
    """One copy where the transposed weight is the weight transposed, else two."""
    recipe = recipes.get(name)
    operands = quantize_weight(normal(256, 384), recipe)
    held = sum(q.qdata.nbytes for q in operands if q is not None)
    copies = {"bf16": 0, "tensorwise": 1, "blockwise": 1}.get(name, 2)
    assert held == copies * 256 * 384
    assert quantize_weight(normal(256, 384), recipe, needs_grad_input=False)[1] is None


@each_recipe
def test_without_gradients(name):
    module, (x, *_) = layer(name), inputs()
    with torch.no_grad():
        expected = module(x)
        with quantize_weights_once(module):
            assert_bitwise_equal(module(x), expected)
    if recipes.get(name).grad_input.quantized and name not in ("tensorwise", "blockwise"):
        words = "quantize_weights_once was opened under .*no_grad.*, open it where"
        with torch.no_grad(), quantize_weights_once(module), torch.enable_grad():  # noqa: SIM117
            with pytest.raises(ValueError, match=words):
                module(x)


def optimizer_step(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=1.0).step()


def load(module, **options):
    module.load_state_dict({name: x * 2 for name, x in module.state_dict().items()}, **options)


# Of a module, whose first weight they change, and of that weight.
CHANGES = {
    "in place": lambda module, weight: weight.detach().mul_(2),
    "optimizer": lambda module, weight: optimizer_step(module),
    "load_state_dict": lambda module, weight: load(module),
    "assign": lambda module, weight: load(module, assign=True),
    "new Parameter": lambda module, weight: setattr(module[0], "weight", nn.Parameter(weight.detach() * 2)),
    "data": lambda module, weight: setattr(weight, "data", weight.data * 2),
    "data in place": lambda module, weight: weight.data.mul_(-3),
    "storage": lambda module, weight: weight.untyped_storage().copy_((weight.detach() * 3).untyped_storage()),
}
UNSEEN = {"data in place", "storage"}
each_change = pytest.mark.parametrize("change", CHANGES)


@each_change
def test_a_change_after_the_block_is_seen(change):
    module, (x, *_) = layer(), inputs()
    with quantize_weights_once(module):
        accumulate(module, [x])
    CHANGES[change](module, module[0].weight)
    after = module(x)
    expected = linear(x, module[0].weight, module[0].bias, "rowwise").relu()
    assert_bitwise_equal(after, linear(expected, module[2].weight, None, "rowwise"))
    with quantize_weights_once(module):
        assert_bitwise_equal(module(x), after)


@each_change
def test_a_change_inside_the_block_is_an_error(change):
    module, (x, *_) = layer(), inputs()

    def change_it():
        CHANGES[change](module, module[0].weight)

    with pytest.raises(RuntimeError, match="weights changed inside quantize_weights_once.*: 0"):
        inside_a_block(module, lambda: module(x), change_it)
    assert_bitwise_equal(module(x), copy.deepcopy(module)(x))
    if change not in UNSEEN:
        # At the next use.
        with pytest.raises(RuntimeError, match="a weight was changed inside.*after the block"):
            inside_a_block(module, change_it, lambda: module(x))
        module(x)


def swapped(module, change, *inside):
    """Change weights as torch cannot see, run something, and change them back."""
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        change(p.data)
    for action in inside:
        action()
    for p, old in zip(module.parameters(), before, strict=True):
        p.data.copy_(old)


def one_row(data):
    data[-1] = 1


def one_column(data):
    one_row(data.t())


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_swapped_in_and_out_are_an_error(compiled):
    """EMA: where the block ends, nothing is left of it."""
    module, (x, *_) = layer(), inputs()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    inside_a_block(module, lambda: run(x), lambda: swapped(module, lambda data: data.mul_(1.01)), lambda: run(x))
    with pytest.raises(RuntimeError, match="weights changed inside quantize_weights_once.*: 0, 2.*EMA"):
        inside_a_block(module, lambda: swapped(module, lambda data: data.mul_(1.01), lambda: run(x)))
    inside_a_block(module, lambda: run(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [one_row, one_column, torch.Tensor.zero_])
@pytest.mark.parametrize("shape", [(300, 70), (64, 512), (130, 130)])
def test_a_row_or_column_that_was_changed_in_passing_is_an_error(mode, change, shape):
    module = nn.Linear(*shape[::-1], bias=False, dtype=torch.bfloat16)
    convert(module, "rowwise")
    x = normal(3, shape[1], dtype=torch.bfloat16)
    with mode():
        inside_a_block(module, lambda: module(x))
        with pytest.raises(RuntimeError, match="weights changed inside"):
            inside_a_block(module, lambda: swapped(module, change, lambda: module(x)))


def test_the_sample_is_small_and_of_the_weight():
    for weight in (normal(1024, 700), normal(1024, 700).t(), normal(2048, 1400)[::2, ::2]):
        watch = Watch(lambda weight=weight: [weight])
        assert 1024 <= watch.differences[0].numel() <= 3 * SAMPLES
        assert watch._samples[0].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_checkpointing_with_held_weights():
    module, (x, *_) = layer(), inputs()
    save = functools.partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    with quantize_weights_once(module):
        expected = with_gradients(module(x), [x])
        for _ in range(2):
            out = checkpoint(module, x, use_reentrant=False, context_fn=save)
            assert_bitwise_equal(with_gradients(out, [x]), expected)


def test_weights_that_a_hook_computes_are_refused():
    module = layer()
    prune.l1_unstructured(module[2], "weight", 0.5)
    with pytest.raises(TypeError, match="weight of 2 must be a Parameter; a hook computes it for each use"):
        inside_a_block(module)
    assert module[0].cached_weight is None
    module(inputs()[0])


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": lambda m: parametrizations.spectral_norm(m).parametrizations.eval(),
}


# Compiled code reads the cached weight, however it was computed: one way shows it.
@pytest.mark.parametrize(("how", "compiled"), [*((how, False) for how in PARAMETRIZATIONS), ("weight_norm", True)])
def test_parametrized_weights(how, compiled):
    module, xs = layer(), inputs()
    for linear_layer in (module[0], module[2]):
        PARAMETRIZATIONS[how](linear_layer)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    expected = accumulate(run, xs)
    with quantize_weights_once(module):
        if compiled:
            assert_bitwise_equal(accumulate(run, xs), expected)
        else:
            assert weight_casts(lambda: assert_bitwise_equal(accumulate(run, xs), expected)) == 0


def test_a_parametrization_that_changes_its_weight_each_time_is_refused():
    module, (x, *_) = layer(), inputs()
    parametrizations.spectral_norm(module[2])
    twin = copy.deepcopy(module)
    with pytest.raises(TypeError, match=r"weight of 2 must stay the same.*spectral_norm.*eval\(\)"):
        inside_a_block(module)
    assert_bitwise_equal(module(x), twin(x))


def test_a_parametrized_weight_that_changes_inside_the_block_is_an_error():
    module, (x, *_) = layer(), inputs()
    parametrizations.weight_norm(module[2])
    original = module[2].parametrizations.weight.original1
    with pytest.raises(RuntimeError, match="a weight was changed inside.*after the block"):
        inside_a_block(module, lambda: original.detach().mul_(2), lambda: module(x))
    with pytest.raises(RuntimeError, match="weights changed inside quantize_weights_once.*: 2"):
        inside_a_block(module, lambda: original.data.mul_(2), lambda: module(x))
    # The codes of a float32 weight cannot serve a layer that computes in bf16.
    parametrizations.orthogonal(module[0])
    with pytest.raises(RuntimeError, match="computes in torch.bfloat16"):
        inside_a_block(module, lambda: torch.autocast("cpu", torch.bfloat16)(module)(x))


def test_an_interrupt_while_the_block_opens_holds_nothing_and_an_error_inside_is_the_callers_own():
    class Interrupted(Float8Linear):
        def __setattr__(self, name, value):
            raise KeyboardInterrupt

    module, (x, *_) = layer(), inputs()
    with pytest.raises(KeyError, match="mine"):
        inside_a_block(module, lambda: module[0].weight.data.mul_(2), lambda: {}["mine"])
    assert module[0].cached_weight is None
    module(x)
    module[2].__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        inside_a_block(module)
    assert "cached_weight" not in module[0].__dict__
    assert module[0].cached_weight is None


def test_autocast():
    module, xs = layer(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(xs[0])
        with quantize_weights_once(module):
            assert_bitwise_equal(module(xs[0]), expected)
    with quantize_weights_once(module, dtype=torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            assert_bitwise_equal(module(xs[0]), expected)
        with pytest.raises(RuntimeError, match=r"computes in torch.float32.*from torch.bfloat16.*dtype="):
            module(xs[0])


def test_tied_weights_are_held_once():
    module = layer()
    module[2].weight = nn.Parameter(normal(24, 24))
    twin = nn.Sequential(*module, nn.ReLU(), copy.deepcopy(module[2]))
    twin[4].weight = module[2].weight
    with quantize_weights_once(twin):
        assert twin[2].cached_weight is twin[4].cached_weight
        twin(inputs()[0])


def test_a_copy_and_a_state_dict_hold_nothing():
    module, (x, *_) = layer(), inputs()
    keys = list(module.state_dict())
    with quantize_weights_once(module):
        assert list(module.state_dict()) == keys
        twin, shallow = copy.deepcopy(module), copy.copy(module[0])
        assert twin[0].cached_weight is None
    for each in (twin[0], shallow):
        each.weight = nn.Parameter(module[0].weight.detach() * 2)
        assert_bitwise_equal(each(x), linear(x, each.weight, each.bias, "rowwise"))
    assert "cached_weight" not in module[0].__dict__


def test_what_else_cannot_be():
    module = layer()
    with pytest.raises(ValueError, match="convert first"):
        inside_a_block(nn.Linear(3, 4))
    with quantize_weights_once(module):
        with pytest.raises(ValueError, match="do not nest, and one is open on 0, 2"):
            inside_a_block(module)
        with pytest.raises(ValueError, match="open on 0, 2: revert after"):
            revert(module)
    with pytest.raises(RuntimeError, match="recipe was changed"):
        inside_a_block(module, lambda: swap_recipe(module, "blockwise"), lambda: module(inputs()[0]))
    with pytest.raises(TypeError, match=r"weight of 0 must have data.*meta"):
        inside_a_block(module.to("meta"))
    # A weight of another recipe, or of another shape.
    x, weight = normal(5, 40), normal(24, 40)
    held = quantize_weight(weight, recipes.get("blockwise"))
    with pytest.raises(ValueError, match=r"weight as recipe 'rowwise' reads it.*got e4m3 128x128"):
        linear(x, weight, recipe="rowwise", quantized_weight=held)
    held = quantize_weight(normal(24, 41), recipes.get("rowwise"))
    with pytest.raises(ValueError, match=r"shape \(24, 40\); got .*\(24, 41\)"):
        linear(x, weight, recipe="rowwise", quantized_weight=held)


@pytest.mark.slow
def test_llama_accumulates_the_same_gradients():
    model = llama()
    convert(model, "blockwise")
    batches = [tokens(seed=seed) for seed in range(2)]

    def gradients():
        model.zero_grad()
        for ids in batches:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with quantize_weights_once(model):
        assert_bitwise_equal(gradients(), expected)
    assert tritonfp8.quantize_weights_once is quantize_weights_once
