"""torchtitan: a converter that trains a model in FP8, and activation checkpointing that saves the results of its GEMMs.

    from tritonfp8.integrations.torchtitan import Float8Converter

    spec = model_registry("0.6B", converters=[Float8Converter.Config(recipe="rowwise")])

The converter leaves the tree of configs as it is and changes what its root builds: the model is made by torchtitan,
converted by :func:`tritonfp8.convert`, and then sharded by torchtitan.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

try:
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.protocols.model import BaseModel, ModelConfigConverter
except ImportError as error:
    raise ImportError(
        "tritonfp8.integrations.torchtitan needs torchtitan 0.3 with all of its dependencies: pip install torchtitan "
        f"({error})"
    ) from error

from tritonfp8.conversion import convert
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.distributed.expert_parallel import PAYLOADS, exchange, payload_of
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.recipes import Recipe
from tritonfp8.specs.checks import require, require_type

SPMD_BACKEND = "partial_dtensor"
"""The ``parallelism.spmd_backend`` under which layers see how their tensors are sharded."""

SAVED_OPS = ("scaled_matmul", "matmul", "whole_linear", "scaled_grouped_matmul", "grouped_matmul")
"""The ops of a layer's GEMMs, by name: to compute one of them again takes as long as the layer."""

log = logging.getLogger("tritonfp8")


class Float8SelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing, which also saves the results of FP8 GEMMs.

    :class:`Float8Converter` puts it in the place of ``SelectiveAC``, which does not know these ops and computes every
    FP8 GEMM of a forward twice. All of their results are saved; ``SelectiveAC`` saves every second bf16 GEMM's result.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """See ``SelectiveAC``."""

    def get_save_ops(self) -> set[Any]:
        """The ops whose results are saved: the ops of ``SelectiveAC``, and the FP8 GEMMs."""
        return super().get_save_ops() | {getattr(torch.ops.tritonfp8, name).default for name in SAVED_OPS}


class Float8Converter(ModelConfigConverter):
    """Trains a model of torchtitan in FP8: ``model_registry(flavor, converters=[Float8Converter.Config()])``.

    It converts the model on the meta device, before torchtitan shards it, applies activation checkpointing and
    compiles. With FSDP2 it has weights gathered in 8 bits. It replaces ``SelectiveAC`` by :class:`Float8SelectiveAC`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """How the model is converted.

        Attributes:
            recipe: as for :func:`tritonfp8.convert`.
            filter: as for :func:`tritonfp8.convert`.
            all_gather: whether FSDP2 gathers weights in 8 bits. None: where torchtitan can shard them by FSDP2, which
                is without pipeline parallelism. Pipeline stages are copies of the model, and a copy gathers in high
                precision.
            payload: how rows travel to converted experts of other ranks: as for
                :func:`tritonfp8.distributed.shard_experts`. It changes ``AllToAllTokenDispatcher`` only.
        """

        recipe: Any = "rowwise"
        filter: Any = None
        all_gather: bool | None = None
        payload: str = "float8"

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The config of a model that is converted when it is built.

        Args:
            model_config: the root of a tree of configs. It is not changed.

        Returns:
            A config of a subclass, with the same fields.

        Raises:
            TypeError: ``model_config`` is not the config of a model.
            ValueError: it was converted before.
        """
        require_type("model_config", model_config, BaseModel.Config, "the config of a model of torchtitan")
        if isinstance(getattr(model_config, "float8", None), Float8Converter.Config):
            raise ValueError("the model is converted already: give Float8Converter.Config once")
        fields = {f.name: getattr(model_config, f.name) for f in dataclasses.fields(model_config)}
        cls: Any = type(model_config)
        return _converting_config(cls)(**fields, float8=self.config)


@functools.cache
def _converting_config(cls: Any) -> Any:
    """A subclass of the config class ``cls`` whose models are converted when they are built."""

    # dataclass(slots=True) makes the class again, and super() without arguments would look for the first one.
    @dataclass(kw_only=True, slots=True)
    class Float8ModelConfig(cls):
        float8: Any = field(default_factory=Float8Converter.Config)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            cls.update_from_config(self, config=config, **kwargs)
            check_backend(config.parallelism.spmd_backend)
            if self.float8.all_gather is None:
                gather = config.parallelism.pipeline_parallel_degree == 1
                self.float8 = dataclasses.replace(self.float8, all_gather=gather)
            if type(getattr(config, "activation_checkpoint", None)) is SelectiveAC.Config:
                config.activation_checkpoint = saving_gemms(config.activation_checkpoint)

        def build(self, **kwargs: Any) -> Any:
            model = cls.build(self, **kwargs)
            apply(model, self.float8)
            return model

    Float8ModelConfig.__qualname__ = f"Float8{cls.__qualname__}"
    return Float8ModelConfig


def check_backend(backend: str) -> None:
    """Raise ValueError unless layers see DTensors under this ``parallelism.spmd_backend``."""
    if backend != SPMD_BACKEND:
        raise ValueError(
            f"parallelism.spmd_backend must be {SPMD_BACKEND!r}; got {backend!r}, under which a layer sees a plain "
            f"tensor and cannot know that it is a shard. Give --parallelism.spmd_backend {SPMD_BACKEND}"
        )


def saving_gemms(config: SelectiveAC.Config) -> Float8SelectiveAC.Config:
    """The config of :class:`Float8SelectiveAC` with the fields of ``config``."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return Float8SelectiveAC.Config(**fields)


def apply(model: nn.Module, config: Float8Converter.Config) -> None:
    """Convert ``model`` as ``config`` says. The reports go to the logger ``tritonfp8``."""
    require("payload", config.payload, PAYLOADS)
    report = convert(model, config.recipe, config.filter)
    log.info("%s", report)
    if report.is_empty:
        return
    if config.payload == "float8":
        send_in_8_bits(model)
    if config.all_gather:
        log.info("gathered in 8 bits under FSDP2: %s", enable_float8_all_gather(model))


class Float8TokenDispatcher(AllToAllTokenDispatcher):
    """torchtitan's all-to-all of tokens, in 8 bits where that changes no bit of an expert's output.

    Rows travel to experts in 8 bits, and the gradients of what experts return on their way back.

    Attributes:
        experts: the converted experts, whose recipe says how rows are quantized.
    """

    experts: Any

    def _dispatch_token_exchange(
        self, routed_input_ND: Tensor, pg: Any, output_splits: list[int], input_splits: list[int]
    ) -> Tensor:
        recipe: Recipe = self.experts.recipe
        there = payload_of(recipe.output.lhs, self.experts.casts_to)
        return self._exchange(routed_input_ND, input_splits, output_splits, there)

    def _combine_token_exchange(
        self, routed_output_RD: Tensor, pg: Any, input_splits: list[int], output_splits: list[int]
    ) -> Tensor:
        recipe: Recipe = self.experts.recipe
        back = payload_of(recipe.grad_input.lhs, self.experts.casts_to)
        return self._exchange(routed_output_RD, output_splits, input_splits, None, back)

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int], *specs: Any) -> Tensor:
        assert self.ep_mesh is not None
        group = self.ep_mesh.get_group().group_name
        # Experts of torchtitan compute in bfloat16 whatever they get.
        return exchange(rows.to(self.experts.casts_to), send, receive, group, *specs).to(rows.dtype)


def send_in_8_bits(model: nn.Module) -> list[str]:
    """Give converted experts that torchtitan sends tokens to by all-to-all a :class:`Float8TokenDispatcher`.

    Returns:
        The names of the modules around these experts.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and is_converted_experts(module.inner_experts):
            dispatcher = module.token_dispatcher
            if type(dispatcher) is AllToAllTokenDispatcher:
                dispatcher.__class__ = Float8TokenDispatcher
                # Past Module.__setattr__: the experts stay a child of their own module only.
                dispatcher.__dict__["experts"] = module.inner_experts
                found.append(name)
    return found
