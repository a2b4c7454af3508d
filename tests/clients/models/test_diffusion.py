"""Diffusion models of diffusers: converted layers run and train, and what diffusers does around a model works."""

import diffusers
import peft
import pytest
import torch
from cases import each_recipe
from diffusers.training_utils import EMAModel
from diffusion import DIFFUSION, dit, flux, sd3
from torch._dynamo.testing import CompileCounter

import tritonfp8
from tritonfp8 import Float8Linear
from tritonfp8.layers.stored import StoredWeight
from tritonfp8.optim import AdamW, float32_copy
from tritonfp8.specs.testing import assert_bitwise_equal

LORA = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"])


def converted(make, recipe="rowwise", **options):
    model, inputs = make()
    tritonfp8.convert(model, recipe, **options)
    return model, inputs


def count(model):
    return sum(isinstance(layer, Float8Linear) for layer in model.modules())


def train(model, inputs, optimizer=None, steps=3, after=lambda: None):
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        loss = (model(**inputs).sample - 1).square().mean()
        loss.backward()
        if step == 0:
            with tritonfp8.verify_training(model, optimizer):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    return losses


def output(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).sample


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DIFFUSION)
def test_every_converted_layer_runs_and_every_weight_moves(name):
    model, inputs = converted(DIFFUSION[name])
    assert tritonfp8.verify(model, **inputs).fp8_share > 0.9
    train(model, inputs)


@pytest.mark.one_in(3)
@each_recipe
@pytest.mark.parametrize("precision", ["autocast", "bfloat16 weights"])
def test_layers_run_in_both_precisions(recipe, precision):
    model, inputs = converted(sd3, recipe)
    is_autocast = precision == "autocast"
    if not is_autocast:
        model.bfloat16()
        inputs = {name: x.bfloat16() for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        assert tritonfp8.verify(model, **inputs).ok
        assert model(**inputs).sample.dtype == torch.bfloat16
        # The small steps of bfloat16 weights are lost, whatever computes them.
        if is_autocast:
            train(model, inputs)


def test_blocks_share_their_graphs_over_image_sizes():
    """Converted blocks take as many graphs as plain ones, and two each over all sizes."""
    found = []
    for is_converted in (False, True):
        torch._dynamo.reset()
        model, inputs = sd3()
        if is_converted:
            tritonfp8.convert(model, "rowwise")
        graphs = CompileCounter()
        for block in model.transformer_blocks:
            block.compile(backend=graphs, fullgraph=True)
        counts = []
        for size in (16, 12, 8, 14):
            model(**{**inputs, "hidden_states": torch.randn(3, 4, size, size)}).sample.sum().backward()
            counts.append(graphs.frame_count)
        found.append(counts)
    first, *later = found[0]
    assert later == [2 * first] * 3
    assert found[1] == found[0]


@pytest.mark.parametrize("make", [dit, sd3])
def test_saved_models_are_plain_and_give_the_same_bits(tmp_path, make):
    model, inputs = converted(make)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert count(loaded) == 0
    assert_bitwise_equal(list(loaded.state_dict().values()), list(model.state_dict().values()))
    tritonfp8.convert(loaded, "rowwise", mode="inference")
    assert_bitwise_equal([output(loaded, inputs)], [output(model, inputs)])
    loaded.save_pretrained(tmp_path / "stored")
    again = type(model).from_pretrained(tmp_path / "stored")
    assert {type(p) for p in again.parameters()} == {torch.nn.Parameter}
    tritonfp8.convert(again, "rowwise")
    assert_bitwise_equal([output(again, inputs)], [output(model, inputs)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [dit, flux])
def test_blocks_that_are_compiled_as_one_graph_each_train_as_eager_ones(make):
    expected = train(*converted(make))
    model, inputs = converted(make)
    keys = list(model.state_dict())
    if model._repeated_blocks:
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    else:
        with pytest.raises(ValueError, match="_repeated_blocks"):
            model.compile_repeated_blocks()
        for block in model.transformer_blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    # A graph has the RMSNorms of Flux in parts, which round in float32; a code that they move is 2^-4 of one value.
    assert train(model, inputs) == pytest.approx(expected, rel=1e-5)
    assert list(model.state_dict()) == keys


def test_gradient_checkpointing_changes_no_bit():
    results = []
    for checkpointed in (False, True):
        model, inputs = converted(sd3)
        if checkpointed:
            model.enable_gradient_checkpointing()
        results.append([torch.tensor(train(model, inputs)), *(p.detach() for p in model.parameters())])
    assert_bitwise_equal(*results)


@pytest.mark.parametrize("storage", ["parameters", "quantized"])
def test_an_average_follows_and_is_swapped_in_and_out(storage):
    model, inputs = converted(dit, weight_storage=storage)
    average = EMAModel((model if storage == "parameters" else float32_copy(model)).parameters(), decay=0.9)
    before = [p.clone() for p in average.shadow_params]
    optimizer = AdamW(model.parameters(), lr=1e-3) if storage == "quantized" else None
    train(model, inputs, optimizer, after=lambda: average.step(model.parameters()))
    assert not any(map(torch.equal, average.shadow_params, before))
    assert all(type(p) is torch.Tensor for p in average.shadow_params)
    trained = output(model, inputs)
    average.store(model.parameters())
    average.copy_to(model.parameters())
    assert not torch.equal(output(model, inputs), trained)
    average.restore(model.parameters())
    assert_bitwise_equal([output(model, inputs)], [trained])


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_adapters_train_are_saved_and_loaded(tmp_path, mode):
    model, inputs = sd3()
    model.requires_grad_(False)
    tritonfp8.convert(model, "rowwise", mode=mode)
    layers = count(model)
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    model.add_adapter(LORA)
    assert count(model) == layers
    train(model, inputs)
    after = {name.replace("base_layer.", ""): p for name, p in model.state_dict().items() if "lora" not in name}
    assert_bitwise_equal([after[name] for name in before], list(before.values()))
    model.save_lora_adapter(tmp_path)
    other, _ = converted(sd3, mode=mode)
    other.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    assert_bitwise_equal([output(other, inputs)], [output(model, inputs)])
    if mode == "inference":
        with pytest.raises(
            NotImplementedError, match="merging adapters would round a frozen weight that is stored in 8 bits"
        ):
            model.fuse_lora()
        tritonfp8.revert(model)
        expected = output(model, inputs)
        model.fuse_lora()
        assert torch.allclose(output(model, inputs), expected, atol=1e-4)


def pipeline():
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    vae = diffusers.AutoencoderKL(**blocks, block_out_channels=(32,), norm_num_groups=8, sample_size=16)
    # In training mode labels are dropped at random.
    found = diffusers.DiTPipeline(transformer=dit()[0].eval(), vae=vae, scheduler=diffusers.DDIMScheduler())
    found.set_progress_bar_config(disable=True)
    return found


def test_a_pipeline_with_a_stored_transformer(tmp_path):
    pipe = pipeline()

    def image():
        generator = torch.Generator().manual_seed(0)
        return torch.from_numpy(pipe([1], num_inference_steps=2, generator=generator, output_type="np").images)

    expected = image()
    tritonfp8.convert(pipe.transformer, "rowwise", mode="inference")
    found = image()
    assert len([p for p in pipe.transformer.parameters() if type(p) is StoredWeight]) == 12
    assert not torch.equal(found, expected)
    assert torch.allclose(found, expected, atol=0.1)
    pipe.save_pretrained(tmp_path)
    pipe = diffusers.DiTPipeline.from_pretrained(tmp_path)
    tritonfp8.convert(pipe.transformer, "rowwise")
    assert_bitwise_equal([image()], [found])


class TestFusedProjections:
    """``fuse_qkv_projections`` makes a new layer of three, and keeps the three, which it calls no more."""

    def test_after_convert_it_is_an_error_of_verify(self):
        model, inputs = converted(sd3)
        model.fuse_qkv_projections()
        with pytest.raises(tritonfp8.VerificationError, match="12 of 22 converted layers .*\n.*it was never called"):
            tritonfp8.verify(model, **inputs)

    def test_before_convert_a_filter_leaves_the_three_out(self):
        model, inputs = sd3()
        model.fuse_qkv_projections()
        tritonfp8.convert(model, "rowwise", filter=["*.to_*qkv", "*.to_*out*", "*.ff*"])
        assert tritonfp8.verify(model, **inputs).fp8_share > 0.9
