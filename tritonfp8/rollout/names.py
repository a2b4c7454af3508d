"""Which tensors of a stream lie in which tensor of an engine: a table of names.

Sources: ``stacked_params_mapping`` and ``make_expert_params_mapping`` of the models of vLLM, which SGLang has, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritonfp8.specs.naming import listed


@dataclass(frozen=True)
class EngineName:
    """A part of the names of an engine's tensors, and of the tensors that lie below each other in them.

    Attributes:
        engine: a part of the name in the engine, such as ``".qkv_proj."``.
        parts: what stands in its place in the names of the stream, in the order of their rows: ``(".q_proj.",
            ".k_proj.", ".v_proj.")``. A ``*`` is the number of an expert; then the engine's tensor has a dim of experts
            before the others.
        repeated: whether ranks share the rows of all parts but the first, where these have fewer heads than ranks.
        padded: whether rows without a value follow the last ones.
    """

    engine: str
    parts: tuple[str, ...]
    repeated: bool = False
    padded: bool = False


def _experts(engine: str, parts: Sequence[str]) -> tuple[EngineName, ...]:
    # Newer versions of vLLM have one more module around the weights.
    inserted = ("", ".routed_experts")
    return tuple(
        EngineName(f".experts{each}.{engine}_", tuple(f".experts.*.{part}." for part in parts)) for each in inserted
    )


ENGINE_NAMES: tuple[EngineName, ...] = (
    EngineName(".qkv_proj.", (".q_proj.", ".k_proj.", ".v_proj."), repeated=True),
    EngineName(".gate_up_proj.", (".gate_proj.", ".up_proj.")),
    EngineName(".fused_qkv_a_proj.", (".q_a_proj.", ".kv_a_proj_with_mqa.")),
    EngineName(".fused_qkv_a_proj_with_mqa.", (".q_a_proj.", ".kv_a_proj_with_mqa.")),
    *_experts("w13", ("gate_proj", "up_proj")),
    *_experts("w13", ("w1", "w3")),
    *_experts("w2", ("down_proj",)),
    *_experts("w2", ("w2",)),
    *(EngineName(each, (each,)) for each in (".q_proj.", ".q_b_proj.", ".kv_b_proj.", ".up_proj.")),
    EngineName("embed_tokens.", ("embed_tokens.",), padded=True),
    EngineName("lm_head.", ("lm_head.",), padded=True),
)
"""Names of vLLM and SGLang, of tensors whose rows are joined, stacked, or shared by ranks."""


class Content(NamedTuple):
    """What lies in one tensor of an engine.

    Attributes:
        row: of the table; None for a tensor that it does not have. How ranks share its rows is not known.
        parts: the names in the stream of each part, by expert (0 without experts).
    """

    row: EngineName | None
    parts: tuple[Mapping[int, str], ...]

    @property
    def has_experts(self) -> bool:
        """Whether the engine's tensor has a dim of experts."""
        return self.row is not None and "*" in self.row.parts[0]


def by_expert(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Names by what they are with ``*`` for the number of an expert, and by this number; 0 without one."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        number = re.search(r"(?<=\.experts\.)\d+(?=\.)", name)
        key = name if number is None else f"{name[: number.start()]}*{name[number.end() :]}"
        found.setdefault(key, {})[0 if number is None else int(number[0])] = name
    return found


def content_of(name: str, stream: Mapping[str, Mapping[int, str]], table: Iterable[EngineName]) -> Content | None:
    """What lies in the tensor ``name`` of an engine; None if the stream, by :func:`by_expert`, has nothing of it.

    Raises:
        ValueError: the stream has some of its parts, or of its experts, and not the others.
    """
    for row in (*(row for row in table if row.engine in name), None):
        keys = [name] if row is None else [name.replace(row.engine, part) for part in row.parts]
        if not any(key in stream for key in keys):
            continue
        parts = tuple(stream.get(key, {}) for key in keys)
        experts = range(1 + max(expert for part in parts for expert in part))
        missing = [
            key.replace("*", str(expert))
            for key, part in zip(keys, parts, strict=True)
            for expert in experts
            if expert not in part
        ]
        if missing:
            raise ValueError(f"{name} of the engine also needs {listed(missing)}, which the stream does not have")
        return Content(row, parts)
    return None
