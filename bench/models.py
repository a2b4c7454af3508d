"""Models of the suites, on random hidden states: layers of a Llama, of a transformer with biases, of experts, or of a
diffusion transformer (DiT)."""

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import tritonfp8
from bench.contest.peers import COMPILED_VERSIONS
from bench.shapes import Shape
from tritonfp8.layers.moe import Routing, combine, gather

POSITIONS = 8192
# Standard deviation of the weights, times sqrt(hidden). With the usual initial weights (0.02, or 1.28 here at a hidden
# size of 4096) random layers amplify noise so much that it cannot be told from a wrong result. Smaller weights add
# little to the residual stream, equally at every size.
WEIGHT_GAIN = 0.32
# Fields of a LlamaConfig, for the shapes that are of another model with the layers of a Llama.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gemma layers": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256},
    "mistral 12b layers": {"head_dim": 128},
    "phi 3 layers": {"pad_token_id": 0, "eos_token_id": None},
    "qwen3 4b layers": {"head_dim": 128},
}
# The models of transformers that are no Llama: Phi-3 has one layer for q, k and v, and one for gate and up.
FAMILIES: Mapping[str, str] = {"phi 3 layers": "Phi3"}
# Shapes of models with biases, LayerNorm and GELU, and whether their attention is causal.
BIASED: Mapping[str, bool] = {"vit h layers": False, "gpt 2 xl layers": True, "tiny with biases": True}


# Shapes of diffusion transformers.
DIFFUSION = ("dit 1152 blocks", "dit 3072 blocks", "tiny dit blocks")


def with_head(recipe: str) -> dict[str, str]:
    """The recipe for every layer of a Llama: the head is converted only by a pattern that names it.

    Figures were measured with converted heads, as they are in the comparison's other contestants.
    """
    return {"*lm_head": recipe, "*": recipe}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names and bits."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def sums_of(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Two sums of each parameter that trains, or of this rank's part, which tell whether it changed."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach()
            local = (value.to_local() if isinstance(value, DTensor) else value).float().flatten()
            places = torch.arange(local.numel(), device=local.device) % 1009
            found[name] = (local.sum(dtype=torch.float64).item(), (local * places).sum().item())
    return found


def training_step(forward: Any, module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor) -> Callable[[], Any]:
    """A function that gives ``forward(x)`` and the gradients of ``x`` and of the parameters of ``module``, by name."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def step() -> dict[str, torch.Tensor]:
        out = forward(x)
        grad_input, *grads = torch.autograd.grad(out, (x, *parameters.values()), grad_output)
        return {"output": out.detach(), "grad_input": grad_input, **dict(zip(parameters, grads, strict=True))}

    return step


class Layers(nn.Module):
    """The decoder layers of a Llama in sequence, with causal attention.

    The rest of the model is not timed: its final norm is not compiled, and to choose a mask the host waits for the GPU
    in each step. (``bench.distributed.models.attend_causally`` avoids that wait in a whole model.)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers, self.rotary_emb = model.layers, model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [batch, sequence, hidden]``."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        embeddings = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
        return x


class Block(nn.Module):
    """A layer of GPT-2 or of a vision transformer: biases, LayerNorm before each half, one layer for q, k and v."""

    def __init__(self, hidden: int, ffn: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [batch, sequence, hidden]``."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Blocks(nn.Module):
    """Blocks in sequence."""

    def __init__(self, layers: int, *sizes: int, causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(*sizes, causal) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [batch, sequence, hidden]``."""
        for layer in self.layers:
            x = layer(x)
        return x


class DiffusionBlock(nn.Module):
    """A block of a DiT: a vector of each image shifts and scales both LayerNorms, and scales what each half adds."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        # ``convert`` leaves a layer of this name in bf16: its input has a row for each image.
        self.adaln_modulation = nn.Linear(hidden, 6 * hidden)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """``x [batch, sequence, hidden]``, ``condition [batch, hidden]``."""
        modulation = self.adaln_modulation(F.silu(condition))[:, None].chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        y = self.attention_norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(attended.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiffusionBlocks(nn.Module):
    """Blocks of a DiT in sequence, with a random vector for each image, which gets a gradient."""

    def __init__(self, layers: int, *sizes: int, batch: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DiffusionBlock(*sizes) for _ in range(layers))
        self.condition = nn.Parameter(torch.randn(batch, sizes[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [batch, sequence, hidden]``."""
        for layer in self.layers:
            x = layer(x, self.condition)
        return x


def build(shape: Shape, device: torch.device) -> Layers | Blocks | DiffusionBlocks:
    """bf16 layers for a shape of the kind ``model``; every call gives the same weights."""
    if shape.name not in (*BIASED, *DIFFUSION):
        return llama(shape, device)
    layers, hidden, ffn, heads, _, batch, _ = shape.size
    torch.manual_seed(0)
    model: Blocks | DiffusionBlocks
    with torch.device(device):
        if shape.name in DIFFUSION:
            model = DiffusionBlocks(layers, hidden, ffn, heads, batch=batch).bfloat16()
        else:
            model = Blocks(layers, hidden, ffn, heads, causal=BIASED[shape.name]).bfloat16()
    for name, parameter in model.layers.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=WEIGHT_GAIN / math.sqrt(hidden))
        elif "norm" not in name:
            nn.init.zeros_(parameter)
    return model


def inputs(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states for a model of :func:`build`, which need a gradient, and the gradient of the output, in bf16."""
    *_, batch, sequence = shape.size
    hidden = (batch, sequence, shape.size[1])
    x, grad_output = (torch.randn(hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), grad_output


def compile_layers(model: Layers | Blocks | DiffusionBlocks, smoke: bool) -> None:
    """Compile each layer; the layers are alike and share one compiled version. Without Inductor in a smoke test."""
    torch._dynamo.config.recompile_limit = COMPILED_VERSIONS
    for layer in model.layers:
        layer.compile(backend="eager" if smoke else "inductor", fullgraph=True, dynamic=False)


def llama(shape: Shape, device: torch.device) -> Layers:
    """bf16 layers of a Llama, or of a model like it, for a shape of the kind ``model``; every call gives the same
    weights."""
    import transformers

    family = FAMILIES.get(shape.name, "Llama")
    layers, hidden, ffn, heads, kv_heads, _, _ = shape.size
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=POSITIONS,
        initializer_range=WEIGHT_GAIN / math.sqrt(hidden),
        **CONFIGS.get(shape.name, {}),
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Layers(getattr(transformers, f"{family}Model")._from_config(config, dtype=torch.bfloat16))


class TorchExperts(tritonfp8.Float8Experts):
    """The same experts in bf16, with torch's grouped GEMM."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        routing = Routing.of(top_k_index, len(self.down_proj))
        rows = self.multiply(gather(hidden_states, routing), self.gate_up_proj, routing.offsets)
        rows = self.multiply(self.activation(rows), self.down_proj, routing.offsets)
        return combine(rows, routing, top_k_weights, hidden_states.dtype)

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """``rows @ weight[g].T`` for the rows of each expert g."""
        return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)


class LoopedExperts(TorchExperts):
    """The same experts in bf16, one after the other."""

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ends = [0, *offsets.tolist()]
        return torch.cat(
            [F.linear(rows[start:end], w) for (start, end), w in zip(itertools.pairwise(ends), weight, strict=True)]
        )


class Mixture(nn.Module):
    """A router and experts: each token goes to ``top_k`` experts, weighted by a softmax over all."""

    def __init__(self, router: nn.Linear, experts: tritonfp8.Float8Experts, top_k: int) -> None:
        super().__init__()
        self.router, self.experts, self.top_k = router, experts, top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [tokens, hidden]``."""
        weights, index = self.router(x).float().softmax(-1).topk(self.top_k, dim=-1)
        return self.experts(x, index, weights.to(x.dtype))


def mixture(
    shape: Shape, device: torch.device, experts: type[tritonfp8.Float8Experts], recipe: str = "bf16"
) -> Mixture:
    """A bf16 layer for a shape of the kind ``experts``; every call gives the same weights."""
    _, top_k, count, hidden, intermediate = shape.size
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    router = nn.Linear(hidden, count, bias=False, **options)
    return Mixture(router, experts(count, hidden, intermediate, recipe=recipe, **options), top_k)
