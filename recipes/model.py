"""A Llama to train: small, readable, with Hugging Face's names.

Source: Touvron et al. 2023, arXiv:2302.13971; grouped queries: Ainslie et al. 2023,
arXiv:2305.13245. A test holds it to transformers' LlamaForCausalLM.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from recipes.attention import attend
from recipes.tokenizer import generation_config, save_tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model."""

    vocab_size: int = 8192
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    context: int = 1024  # tokens
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.hidden_size % 64:
            raise ConfigError(
                f"{self.num_heads} query heads must be a multiple of {self.num_kv_heads} key "
                f"heads, and hidden_size {self.hidden_size} of 64."
            )

    def config(self) -> dict[str, Any]:
        """config.json in Hugging Face's form."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }

    @classmethod
    def read(cls, folder: Path) -> "Shape":
        """The shape that a model's config.json names."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(
            config["vocab_size"],
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["max_position_embeddings"],
            config["rope_theta"],
            config["rms_norm_eps"],
        )

    def flops_per_token(self, length: int) -> float:
        """FLOPs of one token forward: products with weights, and attention over length / 2 keys."""
        attended = 2 * 2 * self.num_heads * self.head_dim * length / 2
        return 2 * self.num_weights() + self.num_layers * attended

    def num_weights(self) -> int:
        """Weights in matrices; the embedding counts once, as the head."""
        d, heads, keys = self.hidden_size, self.num_heads, self.num_kv_heads
        attention = d * self.head_dim * (2 * heads + 2 * keys)
        layer = attention + 3 * d * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * d


SHAPES = {
    "base": Shape(),
    "small": Shape(
        hidden_size=256, intermediate_size=704, num_heads=4, num_kv_heads=2, head_dim=64,
    ),
    "draft": Shape(
        hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=32,
    ),
    "tiny": Shape(
        hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=32,
    ),
}  # fmt: skip
"""15.7 M, 8.0 M, 1.3 M weights, and the tests' shape."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def rotary_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) [length, head_dim], each half repeated."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of x [B, H, T, head_dim]."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """x [B, T, D]; mask [B, 1, T, T], or None for plain causal attention."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), *rotary)
        k = rotate(heads(self.k_proj(x)), *rotary)
        v = heads(self.v_proj(x))
        y = attend(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention, then MLP, each normalised before and dropped out after."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rotary, mask))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """What checkpoints name `model`."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """Logits of a Llama whose head is its embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, dropout)
        cos, sin = rotary_table(shape.context, shape.head_dim, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialise(self, seed: int) -> "Llama":
        """Normal weights of deviation 0.02, smaller where they add to the residual stream."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / (2 * self.shape.num_layers) ** 0.5 if deep else 0.02
                with torch.no_grad():
                    weight.normal_(0.0, scale, generator=generator)
        return self

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T].

        documents [B, T]: tokens see only those of the same number; None: all before them.
        """
        length = tokens.shape[1]
        mask = None
        if documents is not None:
            same = documents[:, :, None] == documents[:, None, :]
            order = torch.arange(length, device=tokens.device)
            mask = (same & (order[:, None] >= order[None, :]))[:, None]
        rotary = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, rotary, mask)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def shape_named(size: str) -> Shape:
    """One of SHAPES. Raises ConfigError for another name."""
    if size not in SHAPES:
        raise ConfigError(f"--size {size} isn't a shape: choose {', '.join(SHAPES)}.")
    return SHAPES[size]


def load(folder: Path, dropout: float = 0.0) -> Llama:
    """A model from a folder in Hugging Face's layout, in float32."""
    model = Llama(Shape.read(folder), dropout)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


def save_model(
    state: dict[str, Tensor], shape: Shape, tokenizer_json: str, folder: Path, chat: bool
) -> None:
    """Write a folder that every engine reads, weights in bfloat16.

    The weights come last and under a temporary name first: a folder that has them is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer_json, folder, shape.context)
    for name, found in (
        ("config.json", shape.config()),
        ("generation_config.json", generation_config(chat)),
    ):
        (folder / name).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    write_weights(state, folder / "model.safetensors")


def write_weights(state: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors, floating-point ones in bfloat16, first under a temporary name."""
    tensors = {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in state.items()
    }
    partial = file.with_name(f"{file.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for its own user only
    partial.replace(file)
