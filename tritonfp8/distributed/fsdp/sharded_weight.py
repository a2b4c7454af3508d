"""A weight as FSDP2 sees it when it gathers: its two hooks, and the state of its gather."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tritonfp8.distributed.fsdp.byte_layout import GatheredBytes
from tritonfp8.distributed.fsdp.gather_plan import GatherPlan, GatherSettings, Reduction, RowsPlan, Sent
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight
from tritonfp8.distributed.fsdp.grouped import segments_to_send
from tritonfp8.distributed.fsdp.torch_fsdp import Managed
from tritonfp8.distributed.torch_private import all_gather_single
from tritonfp8.distributed.traffic import counted_inside_ops
from tritonfp8.layers import Watch, sample_of

log = logging.getLogger("tritonfp8")


class GatherSource(Protocol):
    """Gathers the weights of one model: :class:`~.all_gather.Float8AllGather`, which says what these are."""

    weights: dict[str, WeightToGather]
    kept: KeptSegments | None
    reduced: torch.cuda.Event | None
    key: int

    def require_reduction(self, weight: WeightToGather, plan: RowsPlan, backward: bool) -> None:
        """Reduce the amaxes of the weight's group, unless the amaxes of the model's forward are still valid."""


class WeightToGather:
    """One weight of a model, and the hooks of FSDP2's all-gather extension for it.

    FSDP finds the hooks here. The sharded parameter itself stays a plain DTensor of a plain tensor, so optimizers,
    checkpoints and code that compares memory or identity see nothing of the 8-bit gather.

    Args:
        source: gathers the weights of the model.
        name: of the weight's layer, or of a weight of experts.
        index: of the weight in the model.
        owners: the modules that own the parameter, and its names there; several layers may share it.
        of_experts: whether it is ``[E, N, K]``.

    Attributes:
        managed: the weight as FSDP has it; None until FSDP shards it.
        is_sharded: whether FSDP shards it. By torch's replicate each rank has all of it, and nothing is gathered.
        settings: how it is gathered; None before the first forward, and for experts that are gathered otherwise.
        plan: how it is gathered in 8 bits; None in high precision.
        reduction: of the amaxes of a weight of rows.
    """

    # FSDP reads the signature of the first hook at every gather.
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(
        self, source: GatherSource, name: str, index: int, owners: list[tuple[Any, str]], of_experts: bool
    ) -> None:
        self.source, self.name, self.index, self.owners, self.of_experts = source, name, index, owners, of_experts
        self.module = owners[0][0]
        # The values in high precision, until the next gather.
        self.kept_values: Tensor | None = None
        self._told = False
        self.forget()

    def forget(self) -> None:
        """Begin again, as before FSDP sharded the weight."""
        self.managed: Managed | None = None
        self.is_sharded = False
        self.settings: GatherSettings | None = None
        self.plan: GatherPlan | None = None
        self.reduction: Reduction | None = None
        # What was made together with the bytes of another weight, and is not sent yet.
        self.ready: tuple[Reduction, tuple[int, ...], Tensor] | None = None
        self._moved: Tensor | None = None
        self._seen: tuple[Any, weakref.ref[Tensor]] | None = None

    def parameter(self) -> Tensor:
        """The sharded DTensor."""
        assert self.managed is not None
        found: Tensor = self.managed.param.sharded_param
        return found

    def was_assigned(self) -> bool:
        """Whether ``param.data = other`` was called since the last call of this; torch ignores it for a DTensor."""
        assert self.managed is not None
        holder, local = self.managed.holder, self.managed.param.sharded_param._local_tensor
        before, self._seen = self._seen, (holder, weakref.ref(local))
        return before is not None and before[1]() is local and before[0] != holder

    # What FSDP reads.

    def to(self, *args: Any, **kwargs: Any) -> WeightToGather:
        """With CPU offload FSDP moves the shard to another device before it gathers."""
        assert self.managed is not None
        self._moved = self.managed.local.to(*args, **kwargs)
        return self

    @property
    def fsdp_pre_all_gather(self) -> WeightToGather:
        """The hook that FSDP calls with the mesh before it gathers; absent where it gathers from fewer ranks."""
        assert self.managed is not None
        if self.managed.param.sharded_state.name == "SHARDED_POST_FORWARD":
            self.managed.send_bytes()
            raise AttributeError("fsdp_pre_all_gather")
        return self

    @torch.no_grad()
    def __call__(self, mesh: Any) -> tuple[tuple[Tensor, ...], Sent]:
        """The bytes that this rank sends, flat uint8, and what the other hook must know of them."""
        plan = self.plan
        assert plan is not None
        backward = plan.managed.in_backward
        content = int(backward) if plan.sends_one else None
        shard, self._moved = self._moved, None
        wanted = plan.layout.contents(content)
        if not isinstance(plan, RowsPlan):
            return self._packed(plan, wanted, shard), Sent(plan, (), content)
        self.source.require_reduction(self, plan, backward)
        assert self.reduction is not None
        return (self._segment(plan, self.reduction, wanted, shard),), Sent(plan, self.reduction.scales, content)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], sent: Sent | None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The hook that FSDP calls with the bytes of all ranks: returns the gathered weight, or refills ``out``."""
        if sent is None:
            # Gathered again from fewer ranks: the bytes of the forward, into their memory.
            assert out is not None
            return None
        plan, scales, content = sent
        if plan.managed.reshards_to_fewer:
            plan.managed.keep_bytes()
        given = plan.layout.joined([x.view(torch.uint8) for x in outputs], scales)
        if out is None:
            # The empty tuple names no tensor for FSDP to free: it frees what it gathered anyway.
            return self._gathered(plan, given, content), ()
        held = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(held, GatheredWeight)
        held.refill(given, plan.layout)
        if held._tag is not None:
            assert content is not None
            # Through .data: a graph that saved the tag for backward must see the write, and must not raise for it.
            held._tag.data.select(0, -1).fill_(content)
        return None

    def _gathered(self, plan: GatherPlan, given: GatheredBytes, content: int | None) -> GatheredWeight:
        tag = None if content is None else torch.tensor([self.source.key, self.index, content], device="cpu")
        found = GatheredWeight(given, tag, plan.layout, plan.dtype, plan.rounded)
        if isinstance(plan, RowsPlan):
            found.high_precision = self
        return found

    # The bytes of this rank.

    def _segment(self, plan: RowsPlan, reduction: Reduction, wanted: tuple[int, ...], shard: Tensor | None) -> Tensor:
        """The rank segment with the orientations of these indices; the segments of a group may be made together."""
        ready, self.ready = self.ready, None
        if ready is not None and ready[0] is reduction and ready[1] == wanted:
            return ready[2]
        source = self.source
        if source.kept is not None and (segment := source.kept.find(self, wanted)) is not None:
            return segment
        if source.reduced is not None:
            # FSDP calls this on a stream of its own, which may not have waited for the stream of forward.
            torch.cuda.current_stream().wait_event(source.reduced)
        found = segments_to_send(reduction.batch.groups[id(plan.managed.group)], reduction, wanted)
        for name, segment in found.items():
            source.weights[name].take(wanted, segment)
        if found:
            self.ready = None
            return found[self.name]
        return self._packed(plan, wanted, shard)[0]

    def take(self, wanted: tuple[int, ...], segment: Tensor) -> None:
        """Send this segment next, which was made together with the segments of other weights."""
        assert self.reduction is not None
        self.ready = self.reduction, wanted, segment
        if self.source.kept is not None:
            self.source.kept.keep(self, wanted, segment)

    def _packed(self, plan: GatherPlan, wanted: tuple[int, ...], shard: Tensor | None = None) -> tuple[Tensor, ...]:
        shard = plan.shard(shard)
        if self.reduction is None:
            return plan.layout.pack(shard, wanted)
        sent = plan.layout.pack(shard, wanted, plan.rank, self.reduction.reduced)
        if self.source.kept is not None:
            self.source.kept.keep(self, wanted, sent[0])
        return sent

    @torch.no_grad()
    def gather_now(self, index: int) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of one orientation, gathered by this call."""
        plan = self.plan
        assert plan is not None
        kept = None if self.source.kept is None else self.source.kept.find(self, (index,))
        sent = self._packed(plan, (index,)) if kept is None else (kept,)
        gathered = [self._joined(plan, x) for x in sent]
        scales = () if self.reduction is None else self.reduction.scales
        return plan.layout.read(plan.layout.joined(gathered, scales), index, index)

    @torch.no_grad()
    def values(self) -> Tensor:
        """A weight ``[N, K]`` as FSDP would gather it without this; with tensor parallelism, this rank's part."""
        plan = self.plan
        assert isinstance(plan, RowsPlan)
        layout, shard = plan.layout, plan.managed.local.detach().to(plan.device, plan.dtype)
        padded = shard.new_zeros(layout.shard_rows, layout.cols)
        padded[: shard.shape[0]] = shard
        return self._joined(plan, padded)[: layout.rows]

    def keep_values(self, dtype: torch.dtype) -> Tensor:
        """The values, gathered once: a loss in chunks reads them for each chunk."""
        if self.kept_values is None or self.kept_values.dtype != dtype:
            self.kept_values = self.values().to(dtype)
            if not self._told:
                log.warning(
                    "code outside of %s multiplies by its weight, which FSDP2 gathers in 8 bits: its values are "
                    "gathered in high precision as well. Leave it out of convert, as is done with an output head that "
                    "no pattern names, and they are gathered once.",
                    self.name,
                )
                self._told = True
        return self.kept_values

    @staticmethod
    def _joined(plan: GatherPlan, x: Tensor) -> Tensor:
        """``x`` of all ranks, joined along dim 0."""
        whole = x.new_empty(plan.layout.shards * x.shape[0], *x.shape[1:])
        with counted_inside_ops():
            all_gather_single(whole, x, group=plan.managed.process_group)
        return whole


class KeptSegments:
    """Rank segments that serve several gathers, inside :func:`tritonfp8.quantize_weights_once`."""

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}
        self._segments: dict[tuple[str, tuple[int, ...]], tuple[Reduction, Tensor]] = {}

    def find(self, weight: WeightToGather, orientations: tuple[int, ...]) -> Tensor | None:
        """The segment of a weight in the orientations of these indices, if one was kept with the scales of now."""
        found = self._segments.get((weight.name, orientations))
        # A write that torch counts brought a new reduction.
        if found is None or found[0] is not weight.reduction:
            return None
        self._watches[weight.name].note()
        if found[1].is_cuda:
            # Another stream may have made it.
            found[1].record_stream(torch.cuda.current_stream())
        return found[1]

    def keep(self, weight: WeightToGather, orientations: tuple[int, ...], segment: Tensor) -> None:
        """Keep a segment that was made just now of the sharded weight."""
        assert weight.reduction is not None
        self._segments[weight.name, orientations] = weight.reduction, segment
        watch = self._watches.get(weight.name)
        if watch is None or watch.is_written():
            self._watches[weight.name] = Watch(lambda: [weight.parameter()])
        else:
            watch.note()

    def changed(self) -> list[str]:
        """The weights whose shards changed since by writes that torch does not count."""
        return [name for name, watch in self._watches.items() if not watch.is_written() and watch.has_changed()]


class GatheredInEvaluation:
    """Groups of weights that FSDP leaves gathered after a forward without gradients, such as the outermost group.

    FSDP computes the next forward with the gathered values, even if the shards have others by then: an evaluation of
    EMA weights would be one of the old weights. Torch does not count writes through ``.data``, so samples are compared.
    They have elements of each row and of each column, so no swap of weights misses them.

    Args:
        groups: the parameters of each group.
    """

    def __init__(self, groups: Sequence[Sequence[Managed]]) -> None:
        self._seen = [(group, _sample(group)) for group in groups if not group[0].is_sharded]

    def gather_changed(self) -> None:
        """Have FSDP gather the groups again whose shards changed since. All ranks of a group call this together."""
        for group, (stamps, before) in self._seen:
            first = group[0]
            if first.is_sharded:
                continue
            now = _sample(group)
            same = now[0] == stamps and all(torch.equal(x, before[dtype]) for dtype, x in now[1].items())
            changed = torch.tensor(int(not same), device=first.device)
            # A rank whose rows did not change gathers as well.
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=first.process_group)
            if changed.item():
                first.shard_again()


def _sample(group: Sequence[Managed]) -> tuple[list[object], dict[torch.dtype, Tensor]]:
    """The stamps of shards, and some of their elements as integers, by the size of these."""
    samples: dict[torch.dtype, list[Tensor]] = {}
    for managed in group:
        sample = sample_of(managed.local).reshape(-1)
        samples.setdefault(sample.dtype, []).append(sample)
    return [managed.stamp for managed in group], {dtype: torch.cat(each) for dtype, each in samples.items()}
