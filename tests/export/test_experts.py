"""Experts in 8 bits: a matrix for each expert and projection in a checkpoint, one weight ``[E, N, K]`` in a model."""

import pytest
import torch
from checkpoints import (
    EXPERTS,
    FINE_GRAINED,
    FORMATS,
    MIXTRAL,
    blocks_of,
    check_error,
    compressed,
    config_of,
    dequantized,
    files_of,
    model_of,
    scale_name,
    theirs_of,
    write,
)
from mixtures import experts_of
from mixtures import model_of as mixture

import tritonfp8
from tritonfp8.export import CHECKPOINT_FORMATS
from tritonfp8.layers.stored import StoredMatrices

# The recipe whose codes a format has.
RECIPES = {
    "fine_grained": "blockwise",
    "compressed_channel": "rowwise",
    "compressed_tensor": "tensorwise",
    "compressed_block": "blockwise",
    "compressed_mxfp8": "mxfp8",
}
# The experts of the first layer in the model, and how checkpoints of each family name its parent and the projections.
PATH = "model.layers.0.mlp.experts"
FAMILIES = {
    "moe": (EXPERTS, "mlp", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}),
    "mixtral": (MIXTRAL, "block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
}
ATTENTION = "model.layers.0.self_attn.q_proj"
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
each_format = pytest.mark.parametrize("format", FORMATS)
each_family = pytest.mark.parametrize("family", FAMILIES)


def plain_model(family="moe", seed=0, **sizes):
    return model_of(family, FAMILIES[family][0] | sizes, seed)


def converted(recipe, seed=0, family="moe", sizes=(), **options):
    model = plain_model(family, seed, **dict(sizes))
    tritonfp8.convert(model, recipe, **options)
    return model


def renamed(name, family):
    """The name in a checkpoint of a tensor or a module that is no weight of experts."""
    return name.replace(".mlp.", f".{FAMILIES[family][1]}.")


def matrices(state, family="moe"):
    """The matrix of each expert and projection by the name of its layer, from the weights of all experts."""
    names_of = FAMILIES[family][2]
    return {
        f"{renamed(path, family)}.{expert}.{names_of[name]}": matrix
        for path, key in (name.rsplit(".", 1) for name in state)
        if path.endswith(".experts")
        for expert, weight in enumerate(state[f"{path}.{key}"])
        for name, matrix in zip(PROJECTIONS[key], weight.chunk(len(PROJECTIONS[key])), strict=True)
    }


def weights_of_experts(model):
    """The names in the model, such as ``gate_up_proj`` and ``down_proj`` below ``PATH`` for the first layer."""
    return [name for name, _ in model.named_parameters() if ".experts." in name]


def checkpoint(folder, spec, config=FINE_GRAINED, change=lambda tensors: None, family="moe"):
    """What another program writes; returns the values of the experts, in the names of the checkpoint."""
    state = plain_model(family).state_dict()
    layers = matrices(state, family)
    tensors = {renamed(name, family): x for name, x in state.items() if ".experts." not in name}
    name = "weight_scale_inv" if config is FINE_GRAINED else "weight_scale"
    values = {}
    for layer, x in layers.items():
        q = tritonfp8.quantize(x, spec)
        tensors[f"{layer}.weight"], tensors[f"{layer}.{name}"] = q.qdata, q.scale
        values[layer] = tritonfp8.dequantize(q, torch.bfloat16)
    change(tensors)
    write(folder, tensors, config)
    return values


def check_values(model, values, family="moe"):
    for name, x in matrices(model.state_dict(), family).items():
        assert torch.equal(x, values[name]), name


@each_family
@each_format
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_round_trip_that_transformers_reads_too(tmp_path, family, format, mode):
    model = converted(RECIPES[format], family=family, mode=mode)
    report = tritonfp8.export.save(model, tmp_path, format)
    assert PATH in report.exported
    assert ".experts" not in str(report.quantization_config)
    files = files_of(tmp_path)
    assert sum(x.nbytes for x in files.values()) == report.bytes_after
    layers = [layer for name, layer in report.layers.items() if name.endswith(".experts")]
    sizes = [x.nbytes for name, x in files.items() if ".experts." in name]
    assert sum(layer.bytes_after for layer in layers) == sum(sizes)
    assert sum(sizes) < 0.55 * 2 * sum(x.numel() for x in matrices(model.state_dict(), family).values())
    found = plain_model(family, seed=1)
    loaded = tritonfp8.export.load(found, tmp_path)
    assert loaded.layers[f"{PATH}.down_proj"].loaded_as.endswith(", of each expert")
    assert {*loaded.layers, *loaded.copied} == {name.removesuffix(".weight") if name.endswith("_proj.weight") else name
                                                for name in found.state_dict()}  # fmt: skip
    for name, x in matrices(found.state_dict(), family).items():
        codes, scale = files[f"{name}.weight"], files[f"{name}.{scale_name(format)}"]
        expected = dequantized(codes, scale, blocks_of(format, codes.shape))
        assert torch.equal(x.double(), expected), name
        again = tritonfp8.quantize(matrices(model.state_dict(), family)[name], CHECKPOINT_FORMATS[format].spec)
        assert torch.equal(tritonfp8.dequantize(again, torch.bfloat16), x), name
    # transformers refuses the other formats.
    if format in ("fine_grained", "compressed_channel", "compressed_tensor"):
        theirs = theirs_of(tmp_path, format).state_dict()
        assert all(torch.equal(theirs[name], x) for name, x in found.state_dict().items())


@each_family
def test_names_are_those_that_transformers_saves(tmp_path, family):
    model = plain_model(family)
    model.save_pretrained(tmp_path / "theirs")
    report = tritonfp8.export.save(converted("blockwise", family=family), tmp_path / "ours", "fine_grained")
    theirs, ours = files_of(tmp_path / "theirs"), files_of(tmp_path / "ours")
    assert {name for name in ours if not name.endswith("_scale_inv")} == theirs.keys()
    router = "model.layers.0.mlp.gate"
    assert renamed(f"{router}.weight", family) in report.others
    # transformers takes either name, engines the name in the checkpoint.
    ignored = config_of(tmp_path / "ours")["modules_to_not_convert"]
    assert {router, renamed(router, family)} <= set(ignored)
    assert len(set(ignored)) == len(ignored)


@each_family
@pytest.mark.parametrize("format", ["fine_grained", "compressed_channel", "compressed_mxfp8"])
def test_codes_that_are_stored_are_written_and_read_as_they_are(tmp_path, family, format):
    model, found = (converted(RECIPES[format], seed, family, mode="inference") for seed in (0, 1))
    tritonfp8.export.save(model, tmp_path, format)
    report = tritonfp8.export.load(found, tmp_path)
    for name in weights_of_experts(model):
        ours, theirs = (each.get_parameter(name) for each in (model, found))
        assert type(theirs) is StoredMatrices
        assert torch.equal(theirs._qdata.view(torch.uint8), ours._qdata.view(torch.uint8))
        assert torch.equal(theirs._scale.float(), ours._scale.float())
        assert report.layers[name].again == "codes kept"


@each_family
@pytest.mark.parametrize("format", ["compressed_block", "compressed_mxfp8"])
def test_what_transformers_refuses_is_a_note(tmp_path, family, format):
    # One block, as in a matrix of 128x128, it would read.
    model = converted(RECIPES[format], family=family, sizes={"hidden_size": 256, "head_dim": 64})
    report = tritonfp8.export.save(model, tmp_path, format)
    assert any("transformers 5 refuses experts in this format" in note for note in report.notes)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        theirs_of(tmp_path, format)


@each_family
@pytest.mark.parametrize("kind", ["plain", "converted", "stored", "meta"])
@pytest.mark.parametrize("rounding", ["pow2", "none"])
def test_a_checkpoint_of_another_program(tmp_path, family, kind, rounding):
    spec = tritonfp8.QuantSpec(block=(128, 128), scale_rounding=rounding)
    values = checkpoint(tmp_path, spec, family=family)
    model = plain_model(family, seed=1)
    if kind == "converted":
        tritonfp8.convert(model, "blockwise")
    if kind == "stored":
        tritonfp8.convert(model, {"*.experts": "blockwise"}, mode="inference")
    if kind == "meta":
        model = model.to("meta")
    weight = model.model.layers[0].mlp.experts.down_proj
    report = tritonfp8.export.load(model, tmp_path)
    found = {name: layer.again for name, layer in report.layers.items()}
    again = {"pow2": "codes kept", "none": "rounded again"}[rounding] if kind in ("converted", "stored") else None
    assert found == dict.fromkeys(weights_of_experts(model), again)
    assert (model.model.layers[0].mlp.experts.down_proj is weight) == (kind != "meta")
    if kind == "stored" and rounding == "none":
        # Its scales are powers of two, so that values are rounded once more.
        weight = model.model.layers[0].mlp.experts.down_proj
        names = [f"{renamed(PATH, family)}.{expert}.{FAMILIES[family][2]['down_proj']}" for expert in range(4)]
        expected = torch.stack([values[name] for name in names])
        assert torch.equal(weight.dequantize(), StoredMatrices.of(expected, weight.spec).dequantize())
    else:
        check_values(model, values, family)


@each_family
@pytest.mark.parametrize("kind", ["plain", "converted", "stored"])
def test_what_transformers_saves_is_read(tmp_path, family, kind):
    """Its own files of a model in bfloat16, with the config that they need here."""
    source = plain_model(family)
    source.save_pretrained(tmp_path)
    write(tmp_path, files_of(tmp_path), FINE_GRAINED)
    model = plain_model(family, seed=1)
    if kind != "plain":
        mode = {"converted": "training", "stored": "inference"}[kind]
        tritonfp8.convert(model, "blockwise", mode=mode)
        tritonfp8.convert(source, "blockwise", mode=mode)
    report = tritonfp8.export.load(model, tmp_path)
    assert report.copied[f"{PATH}.down_proj"] == "copied, of each expert"
    for (name, x), y in zip(source.named_parameters(), model.parameters(), strict=True):
        if kind == "stored" and x.dim() > 1 and hasattr(x, "_qdata"):
            assert torch.equal(x._qdata.view(torch.uint8), y._qdata.view(torch.uint8)), name
            assert torch.equal(x._scale, y._scale), name
        else:
            assert torch.equal(x, y), name


def test_one_scale_of_each_projection(tmp_path):
    """One scale cannot serve gate and up, so the stored weight is quantized again, and the report says so."""
    spec = tritonfp8.QuantSpec(block=(-1, -1), scale_rounding="pow2")

    def larger(tensors):
        for expert in range(4):
            tensors[f"{PATH}.{expert}.up_proj.weight_scale"] *= 2.0**12

    values = checkpoint(tmp_path, spec, compressed("tensor"), larger)
    model = converted({"*.experts": "tensorwise"}, seed=1, mode="inference")
    report = tritonfp8.export.load(model, tmp_path)
    assert report.layers[f"{PATH}.down_proj"].again == "codes kept"
    assert report.layers[f"{PATH}.gate_up_proj"].again == "rounded again"
    plain = model_of("moe", EXPERTS, seed=1)
    tritonfp8.export.load(plain, tmp_path)
    values = {name: x * 2.0**12 if name.endswith("up_proj") else x for name, x in values.items()}
    check_values(plain, values)


def test_experts_in_high_precision_by_themselves(tmp_path):
    """A checkpoint may have a matrix of each expert and no codes."""
    values = matrices(model_of("moe", EXPERTS).state_dict())

    def in_bfloat16(tensors):
        for name, x in values.items():
            tensors[f"{name}.weight"] = x
            del tensors[f"{name}.weight_scale_inv"]
        # A config of codes without a single code would say nothing.
        tensors[f"{ATTENTION}.weight"] = torch.ones(128, 128).to(torch.float8_e4m3fn)
        tensors[f"{ATTENTION}.weight_scale_inv"] = torch.ones(1, 1)

    checkpoint(tmp_path, tritonfp8.QuantSpec(block=(128, 128), scale_rounding="pow2"), change=in_bfloat16)
    model = model_of("moe", EXPERTS, seed=1)
    report = tritonfp8.export.load(model, tmp_path)
    assert report.copied[f"{PATH}.down_proj"] == "copied, of each expert"
    check_values(model, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{PATH}.3.up_proj.weight": None}, rf"no place for .*{PATH}.3.up_proj.weight_scale_inv.*not have"),
        (
            dict.fromkeys(f"{PATH}.2.down_proj.{x}" for x in ("weight", "weight_scale_inv")),
            rf"does not have these tensors of the model: {PATH}.2.down_proj.weight",
        ),
        ({f"{PATH}.1.gate_proj.weight_scale_inv": None}, "has codes and needs one scale, .* got no scale"),
        ({f"{PATH}.4.up_proj.weight": torch.ones(1)}, rf"no place for .* of the checkpoint: {PATH}.4.up_proj.weight"),
        (
            {f"{PATH}.0.down_proj.weight": torch.ones(64, 128).to(torch.float8_e4m3fn)},
            r"0.down_proj.weight must have shape \(128, 128\), as in the model; got \(64, 128\)",
        ),
        (
            {f"{PATH}.0.down_proj.weight_scale_inv": torch.full((1, 1), torch.nan)},
            "0.down_proj.weight_scale_inv must be finite",
        ),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(tmp_path, changes, message):
    def change(tensors):
        tensors |= changes
        for name in [name for name, x in tensors.items() if x is None]:
            del tensors[name]

    checkpoint(tmp_path, tritonfp8.QuantSpec(block=(128, 128), scale_rounding="pow2"), change=change)
    check_error(tmp_path, message, model_of("moe", EXPERTS, seed=1))


def test_which_experts_are_exported():
    plain = model_of("moe", EXPERTS)
    report = tritonfp8.export.plan(plain, "compressed_channel")
    assert report.layers[PATH].reason.startswith("experts, in high precision unless they are converted")
    assert PATH in report.quantization_config["ignore"]
    assert tritonfp8.export.plan(plain, "compressed_channel", filter=["*.experts"]).exported == [PATH]
    assert PATH not in tritonfp8.export.plan(converted("rowwise"), "compressed_channel", filter=["*proj"]).exported
    model = converted({"*.experts": "bf16", "*": "rowwise"})
    reason = tritonfp8.export.plan(model, "compressed_channel").layers[PATH].reason
    assert "their recipe, 'bf16', keeps output" in reason
    ragged = converted("blockwise", sizes={"moe_intermediate_size": 192})
    reason = tritonfp8.export.plan(ragged, "fine_grained").layers[PATH].reason
    assert reason.startswith("intermediate_size=192 is no multiple of 128")


@pytest.mark.parametrize(
    ("family", "reason"), [("gpt_oss", "their weights lie transposed"), ("mixtral", None), ("deepseek_v3", None)]
)
def test_families(family, reason):
    model = mixture(family, torch.bfloat16)
    tritonfp8.convert(model, "rowwise")
    report = tritonfp8.export.plan(model, "compressed_channel")
    for name in experts_of(model):
        found = report.layers[name].reason
        assert found is None if reason is None else found.startswith(reason)


def test_experts_that_transformers_makes_otherwise_stay_in_high_precision():
    """The experts of GraniteMoe have other names and are stacked in its checkpoints."""
    model = model_of("granitemoe", MIXTRAL)
    tritonfp8.convert(model, "rowwise")
    report = tritonfp8.export.plan(model, "compressed_channel")
    name = "model.layers.0.block_sparse_moe.experts"
    assert report.layers[name].reason.startswith("transformers stacks no matrices of each expert from checkpoints of")
    written = [f"model.layers.0.block_sparse_moe.{each}" for each in ("input_linear", "output_linear")]
    assert f"such as {written[0]}.weight: they are in high precision and stay whole" in report.notes[-1]
    assert {name, *written} < set(report.quantization_config["ignore"])
