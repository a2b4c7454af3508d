"""The runs of whole models by torchtitan's Trainer, and torchtitan's config of each.

The config is torchtitan's for the model. The text is replaced, which would be downloaded, and the attention is torch's
for every contender.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from bench.models import with_head
from tritonfp8.specs.checks import require
from tritonfp8.training import corpus

PLAIN, PEER, HEAD = "bf16", "torchao ", " with head"
# torchtitan's module, its config and its flavor.
MODELS = {
    "debug": ("llama3", "llama3_debugmodel", "debugmodel"),
    "debug-moe": ("qwen3", "qwen3_moe_debug", "debugmodel_moe"),
    "8b": ("llama3", "llama3_8b", "8B"),
    "70b": ("llama3", "llama3_70b", "70B"),
    "30b-a3b": ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "none": {"checkpointing": "none"},
    "full": {"checkpointing": "full"},
    "tp": {"tp": 2},
    "tp8": {"tp": 8},
    "ep": {"ep": 2},
    "ep4": {"ep": 4},
    "wide": {"gather": False},
    "exact": {"payload": "high_precision"},
    "graph": {"graphs": True},
}
LOGGED = 10
# The first of them compiles.
WINDOWS = 2


@dataclass(frozen=True)
class Whole:
    """A whole model, trained by torchtitan's Trainer.

    Attributes:
        model: a name of :data:`MODELS`.
        contender: a recipe, also with ``" with head"``, ``"bf16"``, or ``"torchao "`` and a recipe of torchao.
        layers: of the model's layers so many; 0 for all.
        tp: degree of tensor parallelism; FSDP2 takes the other processes.
        ep: degree of expert parallelism.
        checkpointing: of activations: ``"none"``, ``"selective"`` or ``"full"``.
        gather: whether FSDP2 gathers weights in 8 bits; of torchao's recipes tensorwise can.
        payload: how rows travel to converted experts: ``"float8"`` or ``"high_precision"``.
        deterministic: compare losses, not speeds: kernels are deterministic, each step logs its loss, and no weight
            decay moves parameters that have no gradient.
        batch: sequences of a rank; 0 for torchtitan's.
        length: tokens of a sequence; 0 for torchtitan's.
        steps: optimizer steps.
        compiled: whether blocks and loss are compiled.
        graphs: whether forward and backward are replayed as a CUDA graph, torchtitan's default. No bytes are counted
            in it.
        processes: their number.
    """

    model: str
    contender: str
    layers: int = 0
    tp: int = 1
    ep: int = 1
    checkpointing: str = "selective"
    gather: bool = True
    payload: str = "float8"
    deterministic: bool = False
    batch: int = 0
    length: int = 0
    steps: int = LOGGED * (1 + WINDOWS)
    compiled: bool = True
    graphs: bool = False
    processes: int = 2


def text_of(vocabulary: int) -> tuple[Any, Any]:
    """The configs of a data loader of bytes of text, and of a tokenizer that is not used."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Bytes(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.sizes = {"batch_size": local_batch_size, "seq_len": seq_len, "steps": 1}
            self.rank, self.step, self.text = dp_rank, 0, corpus.load()

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                (rows,) = corpus.batches(self.text, seed=1000 * self.step + self.rank, **self.sizes)
                self.step += 1
                yield {"input": rows[:, :-1].long()}, rows[:, 1:].long()

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    class Unused(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        def encode(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        def decode(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return vocabulary

    return Bytes.Config(), Unused.Config()


def without_a_device() -> None:
    """Replace what CPUs lack: torchtitan logs the memory of the device, and waits at a barrier of devices."""
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **options: None
    stats = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor


def _converters(whole: Whole) -> list[Any]:
    if whole.contender == PLAIN:
        return []
    if not whole.contender.startswith(PEER):
        from tritonfp8.integrations.torchtitan import Float8Converter

        name = whole.contender.removesuffix(HEAD)
        recipe = with_head(name) if whole.contender.endswith(HEAD) else name
        return [Float8Converter.Config(recipe=recipe, all_gather=whole.gather, payload=whole.payload)]
    from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter

    options: dict[str, Any] = {"model_compile_enabled": whole.compiled}
    linear = Float8LinearConverter.Config(
        recipe_name=whole.contender.removeprefix(PEER), filter_fqns=["lm_head", "router.gate"],
        emulate=not torch.cuda.is_available(), **options,
    )  # fmt: skip
    return [linear, *([Float8GroupedExpertsConverter.Config(**options)] if whole.model == "30b-a3b" else [])]


def use_torch_attention(spec: Any) -> None:
    """Flex attention needs a mask, and has no backward on CPUs."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())


def gather_with_torchao(whole: Whole, spec: Any) -> Any:
    """The spec with torchao's 8-bit gather, which its tensorwise recipe has, and torchtitan's layer does not ask for.

    On a CPU torchao emulates its GEMMs. torchtitan then forgets the recipe.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
    from torchtitan.components.quantization.float8 import Float8Linear

    recipe = whole.contender.removeprefix(PEER)
    gather = whole.gather and recipe == "tensorwise" and whole.tp == 1
    chosen = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=gather,
        emulate=not torch.cuda.is_available(),
    )  # fmt: skip
    for _, layer, _, _ in list(spec.model.traverse(Float8Linear.Config)):
        layer._torchao_config = chosen
    parallelize = spec.parallelize_fn

    def wrapped(model: nn.Module, **options: Any) -> nn.Module:
        for module in model.modules() if gather else ():
            if isinstance(module, Float8Linear):
                dtype = module.config.cast_config_weight.target_dtype
                weight = WeightWithDynamicFloat8CastTensor(module.weight, module.linear_mm_config, dtype)
                module.weight = nn.Parameter(weight)
        parallel: nn.Module = parallelize(model, **options)
        return parallel

    return dataclasses.replace(spec, parallelize_fn=wrapped)


def config_of(whole: Whole, folder: str) -> Any:
    """torchtitan's config of the model, with the contender's layers and layout.

    Raises:
        ValueError: there is no such model or policy.
    """
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.tools.profiler import Profiler

    policies = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    if whole.model not in MODELS or whole.checkpointing not in policies:
        raise ValueError(
            f"the model must be one of {', '.join(MODELS)}, and checkpointing one of {', '.join(policies)}; got "
            f"{whole.model!r} and {whole.checkpointing!r}"
        )
    family, name, flavor = MODELS[whole.model]
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    config = getattr(registry, name)()
    spec = registry.model_registry(flavor, converters=_converters(whole))
    use_torch_attention(spec)
    if whole.contender.startswith(PEER):
        spec = gather_with_torchao(whole, spec)
    if whole.layers:
        spec.model.layers = spec.model.layers[: whole.layers]
    given = {"local_batch_size": whole.batch, "seq_len": whole.length}
    sizes = {name: size for name, size in given.items() if size}
    dataloader, tokenizer = text_of(spec.model.vocab_size)
    # Losses in chunks of tokens multiply by a weight that FSDP2 of earlier releases has freed before.
    loss = config.loss if Version(torch.__version__) >= Version("2.12") else config.loss.loss_fn
    if whole.deterministic:
        for group in config.optimizer.param_groups:
            group.optimizer_kwargs["weight_decay"] = 0.0
    return dataclasses.replace(
        config,
        dump_folder=folder,
        loss=loss,
        model_spec=spec,
        dataloader=dataloader,
        tokenizer=tokenizer,
        profiler=Profiler.Config(),
        metrics=MetricsProcessor.Config(log_freq=1 if whole.deterministic else LOGGED),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", tensor_parallel_degree=whole.tp, expert_parallel_degree=whole.ep
        ),
        # The last two steps are not timed: one counts bytes, and one is profiled.
        training=dataclasses.replace(
            config.training, steps=whole.steps + 2, disable_cuda_graphs=not whole.graphs, **sizes
        ),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, warmup_steps=min(10, whole.steps)),
        validator=dataclasses.replace(config.validator, enable=False),
        checkpoint=dataclasses.replace(config.checkpoint, enable=False),
        activation_checkpoint=policies[whole.checkpointing],
        compile=CompileConfig(enable=whole.compiled),
        debug=DebugConfig(seed=0),
    )


def wholes_of(model: str, layouts: list[str], contenders: list[str], options: dict[str, Any]) -> list[Whole]:
    """A run of each contender in each layout.

    Raises:
        ValueError: there is no such layout.
    """
    found = []
    for layout in layouts:
        for part in layout.split("+"):
            require("layout", part, tuple(LAYOUTS))
        way = {name: x for part in layout.split("+") for name, x in LAYOUTS[part].items()}
        found += [Whole(model, contender, **{**options, **way}) for contender in contenders]
    return found
