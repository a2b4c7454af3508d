"""All private names of torch that the core uses: what each is for, and what serves if torch lacks it.

The names are known in torch 2.11 to 2.15. No public function replaces those in :data:`WITHOUT_FALLBACK`: the import
fails if torch lacks one. :mod:`tritonfp8.distributed.torch_private` has the names for distributed training, and
:mod:`tritonfp8.compat.checkpointing` a name of torch before 2.13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
import torch.utils._python_dispatch as _python_dispatch
from packaging.version import Version
from torch import Tensor

from tritonfp8.compat.versions import supported

_C: Any = torch._C
_jit: Any = torch.jit

WITHOUT_FALLBACK: Mapping[str, str] = {
    "_C._len_torch_dispatch_stack": "the number of dispatch modes",
    "_C._get_dispatch_stack_at": "a dispatch mode, which must not miss a cast that was made outside of it",
    "_C._get_dispatch_mode": "whether a graph is traced, in less time than by get_proxy_mode",
    "_C._TorchDispatchModeKey.PROXY": "the mode that traces",
    "_C._dispatch_tls_is_dispatch_key_included": "whether torch.export traces",
    "_C.DispatchKey.PreDispatch": "the key by which torch.export traces",
    "_C._functorch.maybe_current_level": "whether a transform of torch.func is open",
    "_C._functorch.peek_interpreter_stack": "which transform of torch.func is open",
    "_C._functorch.TransformType.Functionalize": "the transform that takes ops, not autograd functions",
    "_C._disabled_torch_function_impl": "a tensor type whose functions are decomposed into ops",
    "_C._DisableFuncTorch": "writes to tensors that a transform of torch.func does not follow",
    "autograd.forward_ad._current_level": "whether a forward-mode derivative is open",
    "utils._python_dispatch._disable_current_modes": "operations that selective checkpointing must not keep",
}
"""Names without which the package cannot work, below ``torch``, with their use."""


def find_missing(root: Any = torch) -> tuple[str, ...]:
    """The names of :data:`WITHOUT_FALLBACK` that torch lacks, with their use."""

    def lacks(path: str) -> bool:
        owner = root
        for name in path.split("."):
            if not hasattr(owner, name):
                return True
            owner = getattr(owner, name)
        return False

    return tuple(f"torch.{path} ({use})" for path, use in WITHOUT_FALLBACK.items() if lacks(path))


def require(missing: tuple[str, ...]) -> None:
    """Check that nothing is missing.

    Raises:
        ImportError: something is. The message names it and the versions of torch that have it.
    """
    if missing:
        raise ImportError(
            f"tritonfp8 needs private names that torch {torch.__version__} lacks: {', '.join(missing)}. "
            f"Install one of {supported()}."
        )


require(find_missing())

dispatch_mode_count: Callable[[], int] = _C._len_torch_dispatch_stack
dispatch_mode_at: Callable[[int], Any] = _C._get_dispatch_stack_at
disable_current_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes

proxy_mode: Callable[[], Any] = functools.partial(_C._get_dispatch_mode, _C._TorchDispatchModeKey.PROXY)
"""The mode that records operations into a graph, or None. Also under ``torch.compile``, where ``is_compiling`` of torch
2.11 is False once Dynamo is done: in backward, and inside of functions that Dynamo does not trace."""

_is_included, _PRE_DISPATCH = _C._dispatch_tls_is_dispatch_key_included, _C.DispatchKey.PreDispatch
# In less time than torch.jit.is_tracing, which also asks whether it is scripted.
_is_jit_tracing: Callable[[], bool] = getattr(_C, "_is_tracing", _jit.is_tracing)


def is_traced() -> bool:
    """Whether operations are recorded into a graph just now, by other means than Dynamo."""
    return proxy_mode() is not None or _is_included(_PRE_DISPATCH) or _is_jit_tracing()


_functorch, _forward_ad = _C._functorch, torch.autograd.forward_ad
_level, _innermost, _FUNCTIONALIZE = (
    _functorch.maybe_current_level,
    _functorch.peek_interpreter_stack,
    _functorch.TransformType.Functionalize,
)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or a forward-mode derivative is open just now."""
    return _level() is not None or _forward_ad._current_level >= 0


outside_transforms: Callable[[], AbstractContextManager[Any]] = _C._DisableFuncTorch
"""A context in which operations skip the open transforms of ``torch.func``."""


def is_functionalized() -> bool:
    """Whether the innermost open transform is ``torch.func.functionalize``."""
    return _level() is not None and _innermost().key() == _FUNCTIONALIZE


def _exporting_flag() -> bool:
    return bool(torch.compiler._is_exporting_flag)


# Dynamo of torch 2.11 takes torch.compiler.is_exporting() for True in all that it traces; the flag behind it is right.
# Later versions answer without following a call.
is_exporting: Callable[[], bool] = (
    _exporting_flag if Version(torch.__version__) < Version("2.13") else torch.compiler.is_exporting
)
"""Whether Dynamo traces for ``torch.export``, not for ``torch.compile``; to be called while Dynamo traces."""


def constant_for_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.assume_constant_result``, which imports the compiler: that takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def statically_known_true(condition: Any) -> bool:
    """torch's, whose module imports sympy: that takes two thirds as long as torch, and numbers do not need it."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.statically_known_true(condition)


def current_device_getter() -> Callable[[], int]:
    """A function that returns the index of the current CUDA device, without the check that CUDA is initialized."""
    return getattr(_C, "_cuda_getDevice", torch.cuda.current_device)


def _public_raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream if torch.cuda.is_available() else 0


raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _public_raw_stream)
"""The current stream of a CUDA device as an integer; torch built without CUDA lacks the name, and has no streams."""


outside_graphs: Any = getattr(torch, "_disable_dynamo", lambda function: function)
"""A decorator: the function runs as it is while a graph is traced. torch.compiler.disable imports the compiler."""

TensorType = torch._C._TensorMeta
"""The class of the class ``torch.Tensor``."""

can_set_data: Callable[[torch.Tensor, torch.Tensor], bool] = torch._has_compatible_shallow_copy_type
"""Whether ``x.data = y`` may take the memory of ``y``, as ``Module.to`` does: not from or to the meta device."""

without_torch_function: Any = _C._disabled_torch_function_impl
"""The ``__torch_function__`` of a tensor type that implements ops, and leaves functions to torch."""


def _check_now(holds: torch.Tensor, message: str) -> None:
    if not bool(holds):
        raise RuntimeError(message)


assert_later: Callable[[torch.Tensor, str], None] = getattr(torch, "_assert_async", _check_now)
"""Raise RuntimeError unless a bool tensor of one element holds; on a GPU when the kernel runs, and the host goes on."""

foreach_copy: Any = getattr(torch.ops.aten, "_foreach_copy_").default  # noqa: B009
"""The op that copies several tensors at once."""


def add_to_each(tensors: Sequence[torch.Tensor], number: float) -> None:
    """Add a number to each tensor in place, by one launch if torch can."""
    together = getattr(torch, "_foreach_add_", None)
    if together is not None:
        together(tensors, number)
        return
    for x in tensors:
        x.add_(number)


def amaxes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, float32, by one launch for many of them if torch can."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return torch.stack([torch.linalg.vector_norm(x, math.inf, dtype=torch.float32) for x in tensors])
    return torch.stack(together(list(tensors), math.inf, dtype=torch.float32))


is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
"""Whether a profiler of torch records the ops of this thread."""


def empty_strided(device: torch.device) -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """``torch.empty_strided`` of sizes, strides and dtype on a device that is the current one.

    Code that Inductor generates allocates by the private function, which takes half of the time.
    """
    quick = getattr(getattr(getattr(_C, "_dynamo", None), "guards", None), f"_empty_strided_{device.type}", None)
    return quick or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))


def address_of(data: torch.Tensor, method: FrameType | None) -> int:
    """What ``data_ptr`` of a tensor subclass without storage returns: the address of ``data``, but 0 to torch itself.

    torch knows by 0 that such a tensor has no storage to copy or export. Others tell parameters apart by the address.

    Args:
        data: the tensor inside.
        method: the frame of ``data_ptr``.
    """
    caller = None if method is None else method.f_back
    name = "torch" if caller is None else str(caller.f_globals.get("__name__"))
    return 0 if name.partition(".")[0] == "torch" else data.data_ptr()


FSDP1 = "torch.distributed.fsdp._flat_param"
"""The module in which FSDP version 1 joins parameters. A torch without it has no such FSDP."""
AVERAGES = "torch.optim.swa_utils"
"""The module of ``AveragedModel``."""


def is_called_by(module: str, dispatch: FrameType | None) -> bool:
    """Whether a function of this module called the operation that a tensor subclass dispatches in this frame."""
    caller = None if dispatch is None else dispatch.f_back
    return caller is not None and caller.f_globals.get("__name__") == module


def merges_adapters(frame: FrameType | None) -> bool:
    """Whether peft, to merge adapters or take them out, called the code of this frame, by way of torch or not."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "peft" and frame.f_code.co_name.lstrip("_").startswith(("merge", "unmerge")):
            return True
        frame = frame.f_back if package in ("peft", "torch", "tritonfp8") else None
    return False


def has_cudnn_attention() -> bool:
    """Whether torch has cuDNN's gradient of attention as an op, and cuDNN to run it."""
    return (
        hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward") and torch.backends.cudnn.is_available()
    )


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of causal attention by cuDNN, from a result and a logsumexp that another kernel computed.

    Args:
        grad: of ``out``, ``[B, T, Hq, D]``.
        q: ``[B, Hq, T, D]``.
        k, v: ``[B, Hkv, T, D]``.
        out: ``[B, T, Hq, D]``.
        logsumexp: float32 ``[B, Hq, T]``, natural logarithms.
        scale: of the scores.
    """
    t = q.shape[2]
    # Without dropout nothing reads the state of the random generator.
    none = torch.empty((), dtype=torch.int64, device=q.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad.transpose(1, 2), q, k, v, out.transpose(1, 2), logsumexp.unsqueeze(-1), none, none,
        None, None, None, t, t, 0.0, True, scale=scale,
    )  # fmt: skip
    return found
