"""The decoder layer of EAGLE's heads, run from every place of a text at once.

A head that guesses d tokens ahead of place t reads keys of two kinds: of the places up to t, made
from the target's own features, and of the d guesses before, made from its own. Training and
measuring do this for all places in parallel ("training-time test" of EAGLE-3, Li et al. 2025,
arXiv:2503.01840): step d's row t stands for the guess after t + d, and sees the first step's rows
up to t and the rows t of the steps between.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from recipes.model import MLP, RMSNorm, rotary_table, rotate
from recipes.speculation.target import Target


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The dimensions of a head's layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    context: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads must be a multiple of {self.num_kv_heads} key heads."
            )

    @classmethod
    def of(cls, target: Target, intermediate_size: int | None = None) -> "LayerShape":
        """The target's own, with another intermediate size where one is given."""
        config = target.config
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0
        return cls(
            target.hidden_size,
            intermediate_size or config.intermediate_size,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or target.hidden_size // heads,
            getattr(config, "rms_norm_eps", 1e-5),
            float(theta),
            target.context,
        )

    def config(self, target: Target) -> dict[str, Any]:
        """The part of config.json that says it, in a Llama's words."""
        saved = target.saved_config()
        tokens = {
            key: saved[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if saved.get(key) is not None
        }  # fmt: skip
        return {
            "model_type": "llama",
            "vocab_size": target.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **tokens,
            "torch_dtype": "bfloat16",
        }


@dataclass(slots=True)
class Keys:
    """Keys and values [B, H, T, head_dim] of each step so far."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    """Grouped queries over the first step's rows up to one's own, and one's own of later steps."""

    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], past: Keys) -> Tensor:
        """x [B, T, input], whose row t stands at position t + (steps so far); appends to `past`."""
        batch, length, _ = x.shape
        step = len(past.keys)
        here = tuple(table[step : step + length] for table in rotary)

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), *here)
        group = self.shape.num_heads // self.shape.num_kv_heads
        k = rotate(heads(self.k_proj(x)), *here).repeat_interleave(group, 1)
        v = heads(self.v_proj(x)).repeat_interleave(group, 1)
        past.keys.append(k)
        past.values.append(v)
        if not step:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self._over(q, past, length)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))

    def _over(self, q: Tensor, past: Keys, length: int) -> Tensor:
        first, *later = (key[:, :, :length] for key in past.keys)
        scale = self.shape.head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ first.mT * scale).float().masked_fill(future, -torch.inf)]
        scores += [(q * key).float().sum(-1, keepdim=True) * scale for key in later]
        shares = torch.cat(scores, -1).softmax(-1).to(q.dtype)
        values = [value[:, :, :length] for value in past.values]
        y = shares[..., :length] @ values[0]
        for i, value in enumerate(values[1:]):
            y = y + shares[..., length + i, None] * value
        return y


class HeadLayer(nn.Module):
    """EAGLE's layer: a Llama's without the norm before its attention."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], past: Keys) -> Tensor:
        x = x + self.self_attn(x, rotary, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class FusingLayer(nn.Module):
    """EAGLE-3's: attention reads the token's embedding beside the feature, each normalised."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, embedded: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], past: Keys
    ) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), -1)
        x = x + self.self_attn(both, rotary, past)
        return x + self.mlp(self.post_attention_layernorm(x))


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal matrices of deviation 0.02, the usual start of a Llama."""
    for name, weight in sorted(module.named_parameters()):
        if weight.dim() == 2 and weight.requires_grad:
            with torch.no_grad():
                weight.normal_(0.0, 0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)


def tables(shape: LayerShape, steps: int) -> tuple[Tensor, Tensor]:
    """Rotary tables for rows of the whole context, moved on by `steps`."""
    return rotary_table(shape.context + steps, shape.head_dim, shape.rope_theta)
