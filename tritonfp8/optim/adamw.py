"""AdamW that steps weights stored in 8 bits, without a copy of them in high precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import torch_private
from tritonfp8.layers.stored import StoredPart, distribute, gradient_of, part_to_update, starts_of, whole_amaxes
from tritonfp8.optim import moments as moment
from tritonfp8.specs.checks import require

ROUNDINGS = ("stochastic", "nearest")
# Groups of torch.optim.AdamW have these; each must be off here.
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
# Rows of small tensors begin at multiples of 16 bytes, so that kernels are compiled once.
_NUMBERS, _KEYS = 8, 4


class _Job(NamedTuple):
    """One stored weight in a step."""

    param: Tensor
    part: StoredPart
    grad: Tensor
    state: dict[str, Any]


class AdamW(torch.optim.AdamW):
    """AdamW for models whose weights are stored in 8 bits (``convert(model, recipe, weight_storage="quantized")``).

    A step dequantizes such a weight, computes in float32, and stores codes and scales again; no copy in high precision
    is kept. It rounds up or down at random, so that the expected change is the exact one: rounded to nearest, a change
    of less than half a spacing is lost, at each step. The random bits are a hash of the seed, the step, the position
    of the weight in the optimizer, and the row and column of the element in the whole weight. So the codes are the same
    on any mesh and world size that gives the same gradients. Scales are computed from the whole weight after each step.

    All other parameters are stepped by ``torch.optim.AdamW``, with its options, in its formats. The state_dict has the
    format of ``torch.optim.AdamW``, with moments in float32: either optimizer loads the other's state_dict.

    A step of stored weights can always be captured in a CUDA graph, once it ran before; ``capturable=True`` is for the
    other parameters.

    Args:
        params, lr, betas, eps, weight_decay, foreach, capturable, fused: as ``torch.optim.AdamW``.
        moments: of stored weights: ``"fp32"``, ``"bf16"`` or ``"fp8"`` (e4m3 in blocks of 128; 8, 4 or 2 bytes a
            weight). They are rounded as the weights are.
        rounding: ``"stochastic"``, or ``"nearest"``, which stalls at small learning rates and is there to compare.
        seed: of the random bits, an int of 64 bits. Every rank passes the same one.

    Raises:
        ValueError: an unknown value; a stored weight that is not float32; and in the first step 8-bit moments of a
            weight whose columns are sharded at other places than multiples of 128.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: str = "fp32",
        rounding: str = "stochastic",
        seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        require("moments", moments, tuple(moment.DTYPES))
        require("rounding", rounding, ROUNDINGS)
        if type(seed) is not int:
            raise TypeError(f"seed must be an int; got {type(seed).__name__}")
        self.moments, self.rounding, self.seed = moments, rounding, seed
        self._ids: dict[tuple[Any, ...], Tensor] = {}
        super().__init__(
            params, lr, betas, eps, weight_decay, foreach=foreach, capturable=capturable, fused=fused
        )  # fmt: skip
        # A GradScaler would leave gradients scaled for a fused optimizer.
        self._step_supports_amp_scaling = False

    def __getstate__(self) -> dict[str, Any]:
        own = {"moments": self.moments, "rounding": self.rounding, "seed": self.seed}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._ids = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``.

        Raises:
            ValueError: a weight that is stored in 8 bits and trained, and is not float32.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if part_to_update(param) is not None and param.dtype != torch.float32:
                raise ValueError(
                    f"a weight that is trained in 8 bits counts as float32; got {param.dtype} {tuple(param.shape)}: "
                    "call float() of the model"
                )

    @torch_private.outside_graphs  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Ranks that share a weight call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        jobs, rows = self._jobs()
        self._step_others([job.param for job in jobs])
        amaxes = whole_amaxes([job.param for job in jobs], lambda i: _amax(jobs[i], rows[i][0]))
        for job, (numbers, keys), amax in zip(jobs, rows, amaxes, strict=True):
            if job.part.qdata.numel():
                ops.adamw(
                    *_tensors(job), numbers, keys, *_layout(job.part), self.rounding == "stochastic",
                    *_scales(job.state), amax,
                )  # fmt: skip
            job.part.changed()
        return loss

    def _step_others(self, stored: list[Tensor]) -> None:
        """Step the other parameters as torch does, without the hooks around a step: those run around ours."""
        ours = set(stored)
        if all(param.grad is None or param in ours for group in self.param_groups for param in group["params"]):
            # torch refuses to step while a graph is captured, unless its own parameters are capturable.
            return
        grads = [param.grad for param in stored]
        for param in stored:
            param.grad = None
        try:
            inspect.unwrap(torch.optim.AdamW.step)(self)
        finally:
            for param, grad in zip(stored, grads, strict=True):
                param.grad = grad

    def _jobs(self) -> tuple[list[_Job], list[tuple[Tensor, Tensor]]]:
        """The stored weights that have a gradient, with counted steps; and the numbers and keys of each."""
        jobs: list[_Job] = []
        rows: list[tuple[Tensor, Tensor]] = []
        first = 0
        for group in self.param_groups:
            by_device: dict[torch.device, tuple[list[_Job], list[int]]] = {}
            for index, param in enumerate(group["params"], first):
                part = None if param.grad is None else part_to_update(param)
                if part is None:
                    continue
                job = _Job(param, part, gradient_of(param), self._state_of(param, part))
                of_device = by_device.setdefault(part.qdata.device, ([], []))
                of_device[0].append(job)
                of_device[1].append(index)
            first += len(group["params"])
            for device, (found, ids) in by_device.items():
                jobs += found
                rows += self._rows(group, found, ids, device)
        return jobs, rows

    def _rows(
        self, group: dict[str, Any], jobs: list[_Job], ids: list[int], device: torch.device
    ) -> Iterable[tuple[Tensor, Tensor]]:
        steps = [job.state["step"] for job in jobs]
        torch_private.add_to_each(steps, 1)
        t = torch.stack(steps).double()
        a, b = group["betas"]
        lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
        columns = (1 - lr * decay, 1 - a, b, 1 - b, lr / (1 - a**t), (1 - b**t).rsqrt(), eps, 0)
        assert len(columns) == _NUMBERS
        numbers = torch.stack([_like(x, t) for x in columns], 1).float()
        # A tensor that is made from numbers of the host cannot be made while a graph is captured.
        key = device, *ids
        if key not in self._ids:
            self._ids[key] = torch.tensor(ids, device=device)
        keys = ops.rounding_keys(self.seed, t, self._ids[key])
        padded = torch.cat([keys, keys.new_zeros(len(ids), _KEYS - keys.shape[1])], 1)
        return zip(numbers.unbind(), padded.unbind(), strict=True)

    def _state_of(self, param: Tensor, part: StoredPart) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            self._check_columns(param)
            state["step"] = torch.zeros((), dtype=torch.float32, device=part.qdata.device)
            state.update(moment.zeros(part.shape, part.qdata.device, self.moments))
        found: dict[str, Any] = state
        return found

    def _check_columns(self, param: Tensor) -> None:
        size = moment.SPEC.block[1]
        starts = [start for start in starts_of(param)[1] if start % size]
        if self.moments == "fp8" and starts:
            raise ValueError(
                f"8-bit moments have a scale for each {size} columns; got a weight {tuple(param.shape)} whose columns "
                f"are sharded at {starts[0]}, inside of a block: use moments='bf16', or a number of columns that is a "
                f"multiple of {size} times the ranks"
            )

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.AdamW``: moments are float32, DTensors where the weights are."""
        found = super().state_dict()
        found["state"] = dict(found["state"])
        for index, param in self._stored():
            if index in found["state"]:
                state = found["state"][index]
                values = {name: distribute(moment.values(state, name), param) for name in moment.NAMES}
                found["state"][index] = {"step": state["step"], **values}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.AdamW``, whose state_dict it takes too; moments are rounded to ours.

        Raises:
            ValueError: a group has an option that this optimizer lacks, such as ``amsgrad``.
        """
        for group in state_dict["param_groups"]:
            for name in _UNSUPPORTED:
                if group.get(name):
                    raise ValueError(f"tritonfp8.optim.AdamW has no {name}; got a state_dict with {name}=True")
        super().load_state_dict(state_dict)
        for _, param in self._stored():
            if state := self.state.get(param):
                self._check_columns(param)
                self.state[param] = self._loaded(param, state)

    def _loaded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        part = part_to_update(param)
        assert part is not None
        step = torch.as_tensor(state["step"], dtype=torch.float32).to(part.qdata.device, copy=True)
        found: dict[str, Any] = {"step": step}
        for name in moment.NAMES:
            found.update(moment.stored(gradient_of(param, state[name]), name, self.moments))
        return found

    def _stored(self) -> Iterable[tuple[int, Tensor]]:
        """The stored weights with their positions among all parameters."""
        every = [param for group in self.param_groups for param in group["params"]]
        return [(i, param) for i, param in enumerate(every) if part_to_update(param) is not None]


def _like(x: Any, t: Tensor) -> Tensor:
    return x.to(t).expand_as(t) if isinstance(x, Tensor) else torch.full_like(t, x)


def _tensors(job: _Job) -> tuple[Tensor, ...]:
    state = job.state
    return job.part.qdata, job.part.scale, state["exp_avg"], state["exp_avg_sq"], job.grad


def _scales(state: dict[str, Any]) -> list[Tensor | None]:
    return [state.get(moment.scale_name(name)) for name in moment.NAMES]


def _layout(part: StoredPart) -> tuple[str, list[int], list[int]]:
    return part.spec.args[0], list(part.scale_block), list(part.place)


def _amax(job: _Job, numbers: Tensor) -> Tensor:
    return ops.adamw_amax(*_tensors(job), numbers, *_layout(job.part), *_scales(job.state))
