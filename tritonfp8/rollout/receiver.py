"""Receiver: the tensors of an export go into the tensors of an engine, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tritonfp8.compat import uninterrupted
from tritonfp8.export import (
    CODES,
    Stored,
    TensorStream,
    attempt,
    check_names,
    check_patterns,
    checkpoint_format,
    matches,
    patterns_of,
)
from tritonfp8.rollout.names import ENGINE_NAMES, EngineName, by_expert, content_of
from tritonfp8.rollout.shards import EngineRank, Piece, cut, pieces_of, scale_piece
from tritonfp8.rollout.transfer import announced, settle, take, whole_group
from tritonfp8.specs import TENSORWISE
from tritonfp8.specs.checks import require_type
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES

# Two dtypes of one meaning for an exponent biased by 127.
_EXPONENTS = {torch.uint8, torch.float8_e8m0fnu}
# Codes and exponents: values are in none of these.
_BYTES = {*CODES, *_EXPONENTS}


class Receiver:
    """Puts the tensors of an export into the tensors of one rank of an inference engine, in place, codes as codes.

    The tensors keep their names, shapes and dtypes of the load: vLLM's and SGLang's, in which q, k and v, gate and up,
    and experts are joined. For a model of this package there is :func:`tritonfp8.export.load_tensors`, which knows its
    modules, and rounds where the model stores other blocks. Here nothing is rounded: what does not fit is an error.

    All is checked before anything is written: names (each tensor of the stream has a place, each tensor of the engine
    is filled but for rows that pad a vocabulary), shapes, dtypes, scales, and codes that are NaN. So an error leaves
    the old weights, and Ctrl-C the old or the new ones. Memory stays where it is: CUDA graphs of the engine stay valid.

    Args:
        tensors: the engine's tensors by name, such as ``dict(engine.named_parameters())``. A weight that the engine has
            transposed is given as ``weight.t()``.
        format: the checkpoint format of the stream; see :func:`tritonfp8.export.plan`. ``"compressed_tensor"`` has one
            scale for a weight, where engines need one for all that they join: it is refused.
        rank: of the tensors, among the ``size`` ranks of the engine. Each tensor is the whole, or the rank's part along
            one dim, as its shape says: by rows, by columns, by experts. Heads of keys and values that are fewer than
            ranks are repeated.
        size: number of ranks of the engine.
        experts: the numbers of the experts that this rank has, in their order; None for ``E/size`` by rank, or all.
        names: rows before :data:`ENGINE_NAMES`, for engines that join other tensors.
        ignore: patterns of names that have no partner: of the stream they are left out, of the engine left as they are.

    Raises:
        ValueError: an unknown format, a rank that is not below ``size``, or ``experts`` that are no numbers of experts.
        TypeError: an argument of another type.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        format: str,
        *,
        rank: int = 0,
        size: int = 1,
        experts: Sequence[int] | None = None,
        names: Sequence[EngineName] = (),
        ignore: Collection[str] = (),
    ) -> None:
        require_type("tensors", tensors, Mapping, "a mapping from names to tensors")
        for name, x in tensors.items():
            require_type(f"the tensor {name!r}", x, Tensor, "a tensor")
        self._tensors = {name: x.detach() for name, x in tensors.items()}
        self._row = checkpoint_format(format, "pow2", None)
        if self._row.spec.block == TENSORWISE:
            raise ValueError(f"{format!r} has one scale a weight, and engines join weights: use 'compressed_channel'")
        if not 0 <= rank < size:
            raise ValueError(f"rank must be between 0 and size - 1; got {rank} of {size}")
        if experts is not None and (not experts or min(experts) < 0):
            raise ValueError(f"experts must be numbers of experts; got {experts}")
        self._rank = EngineRank(rank, size, None if experts is None else tuple(experts))
        self._names = (*names, *ENGINE_NAMES)
        self._ignore = patterns_of(ignore)

    def load(
        self,
        stream: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> int:
        """Take a stream of this process, or of another one on this machine.

        Args:
            stream: of :func:`tritonfp8.export.tensors`: it is checked by its headers, then taken tensor by tensor, and
                this rank's part is kept until all are there: the bytes of the engine's tensors, once more. Or names and
                tensors, such as a queue of ``torch.multiprocessing`` hands on: they are in memory together.
            group: of ranks that call this together, such as the engine's: all of them write, or none.

        Returns:
            The bytes that were written.

        Raises:
            ValueError: a name, shape, dtype or scale that does not fit. The engine is unchanged then.
            TypeError: something else than tensors. The engine is unchanged then.
            RuntimeError: another rank of the group raised, with its text. No rank has changed then.
        """

        def planned() -> tuple[TensorStream, list[Piece]]:
            found = TensorStream.of(stream)
            return found, self._pieces(found.headers)

        plan, error = attempt(planned)
        settle(group, error)
        assert plan is not None
        return self._put(group, partial(_taken, *plan))

    def receive(self, group: dist.ProcessGroup | None = None, *, src: int = 0) -> int:
        """Take what :func:`send` sends: every rank of the group calls one of both.

        Args:
            group: a process group; None for the default one.
            src: the rank, in the default group, that sends.

        Returns:
            The bytes of this rank's part of the tensors. They are in memory, beside the engine's tensors, until all
            ranks have theirs.

        Raises:
            ValueError: as :meth:`load`. No rank has changed then.
            RuntimeError: another rank raised, with its text. No rank has changed then.
        """
        group = whole_group(group)
        headers, bucket_bytes = announced(group, src)
        found, error = attempt(lambda: self._pieces(headers) if headers is not None else [])
        pieces = found or []
        settle(group, error, [(piece.name, piece.box) for piece in pieces])
        parts = take(group, src, [(headers[piece.name].dtype, piece.shape) for piece in pieces], bucket_bytes)
        return self._put(group, lambda: zip(pieces, parts, strict=True))

    def _put(self, group: dist.ProcessGroup | None, taken: Callable[[], Iterable[tuple[Piece, Tensor]]]) -> int:
        """Write what was taken, once it is checked, by all ranks of the group if there is one. Returns the bytes."""
        writes, error = attempt(lambda: self._checked(taken()))
        # Ctrl-C between the two would leave this rank old and others new.
        with uninterrupted():
            settle(group, error)
            return _write(writes or ())

    def _pieces(self, headers: Mapping[str, Stored]) -> list[Piece]:
        """What this rank takes of a stream, in its order. Raises ValueError as :meth:`load`, but for values."""
        scales = self._scales(headers)
        stream = by_expert(headers)
        found: list[Piece] = []
        used, filled = set[str](), set[str]()
        for target, x in self._tensors.items():
            content = content_of(target, stream, self._names)
            names = [name for part in content.parts for name in part.values()] if content is not None else []
            # Scales go with their codes.
            if content is None or not scales.isdisjoint(names):
                continue
            for name in names:
                _check_dtype(name, headers[name].dtype, target, x.dtype)
            new = pieces_of(target, x.shape, content, headers, self._rank)
            if self._has_codes(target, x.dtype):
                self._check_scale(target)
                new += [scale_piece(piece, headers[piece.name].shape, self._row) for piece in new]
                used.update(map(self._row.scale_beside, names))
                filled.add(self._row.scale_beside(target))
            found += new
            used.update(names)
            filled.add(target)
        unused, missing = headers.keys() - used, self._tensors.keys() - filled
        left = [name for name in (*unused, *missing) if matches(name, self._ignore)]
        check_names(unused.difference(left), missing.difference(left), "stream", "engine")
        check_patterns(self._ignore, left)
        order = {name: at for at, name in enumerate(headers)}
        return sorted(found, key=lambda piece: order[piece.name])

    def _has_codes(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a tensor of the stream or the engine has codes: by its dtype, or by name if bytes have several."""
        return dtype in CODES or (dtype == self._row.dtype and name.endswith(self._row.codes_end))

    def _scales(self, headers: Mapping[str, Stored]) -> set[str]:
        """The names of the scales of all codes. Raises ValueError for codes of another format."""
        row, found = self._row, set()
        for name, (_, dtype, shape) in headers.items():
            if not self._has_codes(name, dtype):
                continue
            if len(shape) != 2:
                raise ValueError(f"{name} has codes and must be a matrix [N, K]; got {shape}")
            scale, expected = row.scale_beside(name), row.scale_shape(row.spec.shape_of(shape))
            got = headers.get(scale)
            if got != ("", row.scale_dtype, expected):
                raise ValueError(
                    f"{name} {shape} in format {row.name!r} needs {scale} of {row.scale_dtype} {expected}; got "
                    f"{'none' if got is None else f'{got.dtype} {got.shape}'}. The stream is of another format"
                )
            found.add(scale)
        return found

    def _check_scale(self, target: str) -> None:
        """Raise ValueError for codes of the engine that have no scale of this format beside them."""
        row, shape = self._row, tuple(self._tensors[target].shape)
        scale, expected = row.scale_beside(target), (*shape[:-2], *row.scale_shape(row.spec.shape_of(shape[-2:])))
        got = self._tensors.get(scale)
        if got is None or tuple(got.shape) != expected:
            raise ValueError(
                f"{target} {shape} of the engine in format {row.name!r} needs {scale} of shape {expected}; got "
                f"{'none' if got is None else tuple(got.shape)}. The engine has another format, or joined scales"
            )
        _check_dtype("a scale of the stream", row.scale_dtype, scale, got.dtype)

    def _checked(self, taken: Iterable[tuple[Piece, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """What is written where. Raises ValueError for a scale or codes that no engine can compute with."""
        writes = []
        for piece, x in taken:
            if piece.is_scale:
                self._row.check_scale(piece.name, x, piece.target)
            elif x.dtype in CODES and bool((x.view(torch.uint8) & 0x7F == 0x7F).any()):
                raise ValueError(f"{piece.name} must be finite; it has codes that are NaN")
            into = _bytes(cut(self._tensors[piece.target], piece.into))
            writes.append((into, _bytes(x).reshape(into.shape).to(into.dtype)))
        return writes


def _taken(stream: TensorStream, pieces: Iterable[Piece]) -> list[tuple[Piece, Tensor]]:
    """The pieces of a stream. Raises ValueError for a stream that is not as announced."""
    of_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_name.setdefault(piece.name, []).append(piece)
    found = []
    for name, x in stream.checked():
        for piece in of_name.get(name, ()):
            part = cut(x.detach(), piece.box)
            # A view would keep the whole tensor.
            found.append((piece, part if part.shape == x.shape else part.clone()))
    return found


def _check_dtype(name: str, dtype: torch.dtype, target: str, needed: torch.dtype) -> None:
    if dtype == needed or {dtype, needed} == _EXPONENTS:
        return
    if (dtype in _BYTES) != (needed in _BYTES) or (dtype in CODES) != (needed in CODES):
        raise ValueError(
            f"{name} is {dtype}, and {target} of the engine {needed}: the engine must have the quantization config of "
            "the export, which says which layers have codes"
        )
    if not {dtype, needed} <= {*HIGH_PRECISION_DTYPES} or torch.promote_types(dtype, needed) != needed:
        raise ValueError(f"{name} is {dtype}, and {target} of the engine {needed}: export in its dtype, with dtype=")


def _bytes(x: Tensor) -> Tensor:
    """Elements of one byte as numbers, so that a copy takes them as they are."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _write(writes: Iterable[tuple[Tensor, Tensor]]) -> int:
    """Copy each second tensor into the first. Returns the bytes. Nothing here makes a tensor, or can find an error."""
    total, devices = 0, set()
    # Engines make tensors in this mode, and then no other may change them.
    with torch.inference_mode():
        for into, x in writes:
            into.copy_(x)
            total += into.nbytes
            devices.add(into.device)
    for device in devices:
        if device.type == "cuda":
            # Another process may use the memory of its tensors again.
            torch.cuda.synchronize(device)
    return total
