"""Rollout: a model that generates with the weights of the model that trains."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonfp8.compat import uninterrupted
from tritonfp8.conversion import bare, reshard
from tritonfp8.conversion.selection import converted
from tritonfp8.layers import stamp
from tritonfp8.layers.linear import autocast_dtype, require_module
from tritonfp8.layers.stored import stored_part
from tritonfp8.rollout.casting import CastsInPlace
from tritonfp8.rollout.continuous import generate_paged
from tritonfp8.rollout.decoding import Replayed, can_replay
from tritonfp8.rollout.exact import EXACT_OPTIONS, checked_masks, is_exact
from tritonfp8.rollout.scoring import RawLogits, check_temperature, chosen_log_probs, inside, processing
from tritonfp8.rollout.sharing import OwnWeight, own_weights, read_all, second_model
from tritonfp8.specs.checks import require_type
from tritonfp8.specs.naming import listed

# Options of transformers by which a row would end, or be chosen, otherwise than a mask of tokens says.
_REFUSED = (
    "num_beams", "assistant_model", "prompt_lookup_num_tokens", "stop_strings", "custom_generate", "inputs_embeds",
    "generation_config", "return_dict_in_generate",
)  # fmt: skip


class Generated(NamedTuple):
    """What :meth:`Rollout.generate` returns, for B sequences of T tokens whose last ``new`` were generated.

    Attributes:
        sequences: int64 ``[B, T]``: prompts, then the tokens, then the padding token behind an end of sequence.
        log_probs: float32 ``[B, new]``: :func:`log_probs` of the tokens; 0 behind an end of sequence.
        mask: bool ``[B, new]``: which tokens were generated. An end of sequence is, what follows it is not.
        attention_mask: int64 ``[B, T]``: the mask of the prompts, then ``mask``.
    """

    sequences: Tensor
    log_probs: Tensor
    mask: Tensor
    attention_mask: Tensor


class Rollout:
    """A generator with the weights of a model that trains.

    It is a second model of the same modules in eval mode. All parameters and buffers are the same tensors, with two
    exceptions. Weights of converted layers that the trainer keeps in high precision are codes here, which
    :meth:`refresh` quantizes from them as the trainer's forward does. Weights that the trainer stores in 8 bits are the
    same memory. And what FSDP2 shards is gathered, once a refresh, as the trainer's forward gathers it: in 8 bits where
    it gathers 8 bits; then each rank has the whole model.

    Args:
        model: a causal model of transformers, converted or exact (:func:`make_exact`). It may be compiled, wrapped by
            DistributedDataParallel or peft, or sharded by FSDP2; then all ranks make the Rollout together.
        autocast: the dtype of the ``torch.autocast`` in which the model trains. By default the dtype of an autocast
            around this call, else none. Weights are cast to it before they are quantized, as forward casts them.

    Attributes:
        model: the second model; do not change it.
        trainer: the model of transformers inside of the model that trains.
        own: the parameters that the second model has in memory of its own.
        autocast: see above; None for none.

    Raises:
        ValueError: no layer is converted and the model is not exact; a weight on the meta device, sharded other than by
            FSDP2, or that cannot be kept as codes; or a recipe whose scales of weights are no powers of two
            (``tensorwise``).
        TypeError: ``model`` is no model of transformers that generates, or ``autocast`` no dtype.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        require_module(model)
        self.trainer, self._outer = inside(model), bare(model)
        if not hasattr(self.trainer, "generate"):
            raise TypeError(f"a causal model of transformers is needed; got {type(self.trainer).__name__}")
        layers = converted(self.trainer)
        if not layers and not is_exact(self.trainer):
            raise ValueError(
                "the model has no converted layer and is not exact: use tritonfp8.convert or make_exact first"
            )
        if parallel := [name for name, layer in layers.items() if getattr(layer, "dispatch", None) is not None]:
            raise ValueError(f"experts are sharded over ranks, which a Rollout cannot gather: {listed(parallel)}")
        require_type("autocast", autocast, torch.dtype | None, "a torch.dtype or None")
        self.autocast = autocast or autocast_dtype(next(self.trainer.parameters()).device.type)
        reshard(self._outer)
        self.model = second_model(self.trainer)
        self.own = own_weights(self.trainer, self.model, self._outer)
        # By name the parameter that was read, and its stamp then.
        self._read: dict[str, tuple[Tensor, object]] = {}
        self._cache: tuple[tuple[int, int], Any] | None = None
        self._cast = CastsInPlace()
        self._replayed = Replayed(self.model)
        self.refresh()

    def __repr__(self) -> str:
        parts = [part for p in self.model.parameters() if (part := stored_part(p)) is not None]
        own = [each.tensor for each in self.own]
        same = len(parts) - sum(each.stored for each in self.own)
        return (
            f"Rollout({type(self.model).__name__}: {len(parts)} weights as codes, {same} of them the trainer's; "
            f"{sum(x.nbytes for x in own)} bytes of its own)"
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights that the trainer has now. Addresses of tensors stay, so CUDA graphs stay valid.

        A whole weight is cast into the codes that exist; on a GPU all of them by one CUDA graph, from the second time
        on. What FSDP2 gathers is read before anything is written, so a
        second set of these codes is in memory until the end, and all ranks call this together. Ctrl-C leaves the
        weights before or the new ones, and never some of both. After an error all weights count as changed, so
        :meth:`generate` refuses. A weight that the trainer stores in 8 bits needs no refresh.

        Raises:
            ValueError: the model has other Parameters, layers or recipes than when the Rollout was made.
        """
        self._check_same()
        reshard(self._outer)
        cast = [each for each in self.own if each.is_cast_in_place]
        found = list(read_all([each for each in self.own if not each.is_cast_in_place], self.autocast))
        with uninterrupted():
            for each, x in found:
                each.write(x)
            self._cast(cast, self.autocast)
            # At the end: after an error in between, each weight that changed still counts as changed.
            self._read = {each.name: (each.parameter, stamp(each.parameter)) for each in self.own}

    def changed(self) -> list[str]:
        """The names of weights that the trainer changed since the last :meth:`refresh`, as far as torch counts it.

        A write by ``.data`` is not counted.
        """

        def is_changed(each: OwnWeight) -> bool:
            before, seen = self._read[each.name]
            # FSDP2 puts what it gathered in the place of its shard.
            return stamp(before) != seen or (each.gathers is None and each.parameter is not before)

        return [each.name for each in self.own if is_changed(each)]

    def _check_same(self) -> None:
        # Before the first refresh nothing was read.
        for each in self.own if self._read else []:
            x = each.parameter
            now = x.device, self.autocast or x.dtype, x.shape
            if each.gathers is None and now != (each.tensor.device, each.tensor.dtype, each.tensor.shape):
                raise ValueError(
                    f"{each.name} was moved, cast or resized since the Rollout was made: make another Rollout"
                )
        own = {(module, key) for each in self.own for module, key in each.places}
        sources = dict(self.trainer.named_modules())
        for name, module in self.model.named_modules():
            before = sources.get(name)
            shared = {key: p for key, p in module._parameters.items() if (module, key) not in own}
            if (
                before is None
                or any(before._parameters.get(key) is not p for key, p in shared.items())
                or getattr(before, "recipe", None) != getattr(module, "recipe", None)
            ):
                raise ValueError(
                    f"{name or 'the model'} has other Parameters or another recipe than when the Rollout was made: "
                    "make another Rollout"
                )

    def computing(self) -> AbstractContextManager[Any]:
        """The autocast in which the model trains."""
        return nullcontext() if self.autocast is None else torch.autocast(self.model.device.type, self.autocast)

    def release(self) -> None:
        """Free the cache of keys and values, which is kept for CUDA graphs; they are captured again then."""
        self._cache = None
        self._replayed.release()

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        do_sample: bool = True,
        temperature: float = 1.0,
        seed: int | None = None,
        compile: bool | None = None,
        **options: Any,
    ) -> Generated:
        """Generate by ``generate`` of transformers, with a static cache or by continuous batching.

        Log-probs are ``log_softmax(logits / temperature)``, the model's own distribution: before top-k, top-p,
        penalties and other changes that options or the generation config of the model ask for. Without options all of
        the vocabulary is sampled (``top_k=0, top_p=1``). With ``do_sample=False`` the most probable token is taken.

        Args:
            ids: int64 ``[B, P]``, prompts with padding on the left.
            attention_mask: ``[B, P]``, 0 at padding. Default: no padding.
            max_new_tokens: at most; fewer where all sequences end before.
            do_sample: whether to sample.
            temperature: above 0.
            seed: of the sampling; torch's state is the same afterwards. Default: torch's state.
            compile: whether decoding is compiled, and on a GPU replayed as a CUDA graph. Default: as transformers does,
                on a GPU.
            **options: of ``generate`` of transformers, such as ``top_k``, ``eos_token_id``, ``pad_token_id``. With
                ``cache_implementation="paged"`` an exact model generates by continuous batching: sequences of any
                lengths at a time, as many as ``continuous_batching_config`` has pages for; by default all.

        Returns:
            :class:`Generated`.

        Raises:
            RuntimeError: weights changed since :meth:`refresh`. Norms and embeddings, which are shared, are newer than
                the codes then.
            ValueError: ``ids`` or the mask of another shape or padded on the right, ``temperature`` not above 0, an
                option that has no log-probs here, such as ``num_beams``, or continuous batching of a model that is not
                exact.
            TypeError: ``ids`` are no int64.
        """
        mask = self._ready(ids, attention_mask, temperature, options)
        sampling = {"top_k": 0, "top_p": 1.0, "temperature": temperature} if do_sample else {}
        if options.get("cache_implementation") == "paged":
            options = {**sampling, **options, "compile": compile}
            return self._generate_paged(ids, mask, max_new_tokens, temperature, do_sample, seed, options)
        replayed = None
        if "cache_implementation" not in options:
            sampling["past_key_values"] = cache = self._static_cache(len(ids), ids.shape[1] + max_new_tokens, options)
            replayed = cache if ids.is_cuda and compile is not False and can_replay(cache) else None
        sampling |= self._compiling(compile, ids.device, replayed is not None)
        chosen = _Chosen(temperature)
        with _seeded(seed, ids.device), processing(self.model, chosen), self._decoding(replayed):
            sequences = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=do_sample,
                **{**sampling, **options},
            )  # fmt: skip
        return self._generated(sequences, mask, chosen, options)

    def _ready(self, ids: Tensor, attention_mask: Tensor | None, temperature: float, options: dict[str, Any]) -> Tensor:
        """The mask of the prompts. Raises as :meth:`generate`, unless it can begin."""
        mask = _checked(ids, attention_mask)
        check_temperature(temperature)
        if refused := sorted(set(options) & set(_REFUSED)):
            raise ValueError(f"generate does not take {listed(refused)}: it samples each sequence by single options")
        self._check_same()
        if names := self.changed():
            raise RuntimeError(
                f"{len(names)} weights changed since refresh(), such as {names[0]}: call rollout.refresh() first"
            )
        return mask

    def _generate_paged(
        self,
        ids: Tensor,
        mask: Tensor,
        new: int,
        temperature: float,
        do_sample: bool,
        seed: int | None,
        options: dict[str, Any],
    ) -> Generated:
        if not is_exact(self.model):
            raise ValueError(
                "continuous batching needs a model whose tokens have bits of their own: use make_exact first"
            )
        if options.pop("compile"):
            raise ValueError("continuous batching is not compiled here: compile=True is for other caches")
        del options["cache_implementation"]
        copies = options.pop("num_return_sequences", 1)
        ids, mask = ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
        prompts = [row[seen == 1].tolist() for row, seen in zip(ids, mask, strict=True)]
        with _seeded(seed, ids.device):
            found = generate_paged(self.model, prompts, new, temperature, do_sample, options, self.computing)
        (tokens, log_probs), longest = found, max(map(len, found[0]))
        padding = options.get("pad_token_id", self.model.generation_config.pad_token_id)
        rows = [row + [padding or 0] * (longest - len(row)) for row in tokens]
        valid = torch.tensor([[at < len(row) for at in range(longest)] for row in tokens], device=ids.device)
        sequences = torch.cat([ids, torch.tensor(rows, device=ids.device)], 1)
        return Generated(sequences, log_probs[:, :longest], valid, torch.cat([mask, valid.long()], 1))

    @contextmanager
    def _decoding(self, replayed: Any) -> Iterator[None]:
        """What surrounds ``generate`` of transformers; ``replayed`` is the cache with which a CUDA graph decodes."""
        replaying = nullcontext() if replayed is None else self._replayed.replaying(replayed)
        with self.computing(), checked_masks(), replaying:
            yield

    def _compiling(self, compile: bool | None, device: torch.device, replays: bool) -> dict[str, Any]:
        if compile is not None and not compile:
            return {"disable_compile": True}
        if compile is None and not (is_exact(self.model) and device.type == "cuda") and not replays:
            return {}
        from transformers import CompileConfig

        options = EXACT_OPTIONS if is_exact(self.model) else {}
        config = CompileConfig(
            mode=None, options=options | {"triton.cudagraphs": device.type == "cuda" and not replays}
        )
        # A CPU is compiled for only if it is asked for.
        config._compile_all_devices = device.type != "cuda"
        return {"compile_config": config}

    def _static_cache(self, batch: int, length: int, options: dict[str, Any]) -> Any:
        """A cache for so many tokens. It is kept: a CUDA graph reads it at its address."""
        sizes = batch * options.get("num_return_sequences", 1), length
        if self._cache is None or self._cache[0][0] != sizes[0] or self._cache[0][1] < sizes[1]:
            config = self.model.config.get_text_config(decoder=True)
            self._cache = sizes, _cache_class()(config=config, max_cache_len=length)
        self._cache[1].reset()
        return self._cache[1]

    def _generated(self, sequences: Tensor, mask: Tensor, chosen: _Chosen, options: dict[str, Any]) -> Generated:
        new = sequences[:, mask.shape[1] :]
        end = options.get("eos_token_id", self.model.generation_config.eos_token_id)
        ends = torch.zeros_like(new) if end is None else torch.isin(new, torch.as_tensor(end, device=new.device)).long()
        valid = ends.cumsum(1) - ends == 0
        found = chosen.log_probs(new).masked_fill(~valid, 0.0)
        prompts = mask.repeat_interleave(len(new) // len(mask), 0)
        return Generated(sequences, found, valid, torch.cat([prompts, valid.long()], 1))


@functools.cache
def _cache_class() -> Any:
    """transformers' cache, imported on demand."""
    from transformers import StaticCache

    class OneDtypeCache(StaticCache):  # type: ignore[misc]
        """Under autocast rotary positions make keys float32, which holds values in bfloat16 exactly, too."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
            return super().update(key_states, value_states.to(key_states.dtype), *args, **options)

    return OneDtypeCache


def _checked(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mask of prompts, int64 ``[B, P]``."""
    require_type("ids", ids, Tensor, "a torch.Tensor")
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be int64; got {ids.dtype}")
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"ids must be [B, P], not empty; got shape {tuple(ids.shape)}")
    if attention_mask is None:
        return torch.ones_like(ids)
    if attention_mask.shape != ids.shape:
        raise ValueError(f"attention_mask must be {tuple(ids.shape)}; got {tuple(attention_mask.shape)}")
    mask = attention_mask.long()
    if not bool((mask[:, -1] == 1).all()) or bool((mask.diff(dim=1) < 0).any()):
        raise ValueError("prompts must be padded on the left: a mask of zeros, then ones (padding_side='left')")
    return mask


class _Chosen(RawLogits):
    """Keeps the log-probs of the tokens that were chosen: of each step when the next one begins."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._found: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` float32 ``[B, vocabulary]``."""
        self._take(input_ids[:, -1])
        return super().__call__(input_ids, scores)

    def _take(self, tokens: Tensor) -> None:
        if self.logits is not None:
            self._found.append(chosen_log_probs(self.logits, tokens, self._temperature))
        self.logits = None

    def log_probs(self, new: Tensor) -> Tensor:
        """float32 ``[B, new]`` of all tokens that were generated."""
        if len(self._found) < new.shape[1]:
            self._take(new[:, -1])
        if len(self._found) < new.shape[1]:
            raise RuntimeError(
                "this version of transformers does not ask _get_logits_processor for what changes logits"
            )
        # On a GPU transformers may decode a step more before it sees that all sequences have ended.
        return torch.stack(self._found[: new.shape[1]], 1)


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
