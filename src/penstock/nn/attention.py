"""Self-attention of one layer over a paged cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock import ops
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.nn.parameters import Vector
from penstock.nn.rope import RotaryTable
from penstock.nn.shared import attends_apart, heads_of, own_attention, own_qkv
from penstock.nn.spec import AttentionSpec, NormSpec
from penstock.parallel import Gather, Part, Ranks
from penstock.quant import WeightFormat
from penstock.step import LayerCache, Step

_BESIDE = (
    "key_scale",
    "value_scale",
    "recent_keys",
    "recent_values",
    "recent_slots",
    "recent_window",
)
"""What a layer's cache may have beside keys and values, as `ops.paged_attention` calls it."""


def _named(beside: list[Tensor]) -> dict[str, Any]:
    return dict(zip(_BESIDE, beside, strict=False))


class Attention(nn.Module):
    """norm and qkv → norm, rotate, write → attend; `out` is the caller's last step.

    ranks: of a step that several processes compute: each has some heads, their queries, keys and
    values, and what those saw is put together for `out`.
    """

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        norm: NormSpec,
        qkv: WeightFormat,
        out: WeightFormat,
        table: RotaryTable | None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.spec = own = spec
        self.gather: Gather | None = None
        qkv_part = out_part = heads = None
        if ranks is not None:
            self.spec = own = own_attention(spec, ranks)
            if attends_apart(spec):
                queries, _ = heads_of(spec, ranks)
                heads, self.gather = queries.own, Gather(queries.times(spec.head_dim))
            qkv_part, out_part = own_qkv(spec, ranks), Part.of(ranks.split(hidden))
        self.q_size = own.num_heads * spec.head_dim
        self.kv_size = own.num_kv_heads * spec.head_dim
        columns = self.q_size + 2 * self.kv_size
        self.qkv = Linear(hidden, columns, spec.qkv_bias, qkv, part=qkv_part)
        seen = spec.num_heads * spec.head_dim
        self.out = Linear(seen, hidden, spec.out_bias, out, part=out_part)
        self.table = table
        self.eps = norm.eps
        full = spec.qk_norm == "full"
        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            self.q_norm = Norm(self.q_size if full else spec.head_dim, norm)
            self.k_norm = Norm(self.kv_size if full else spec.head_dim, norm)
        self.sinks = Vector(spec.num_heads, heads) if spec.sinks else None

    def forward(self, x: Tensor, before: Norm | None, step: Step, cache: LayerCache) -> Tensor:
        """x [T, D] → what the heads saw [T, H · Dh], for `out`; writes keys and values."""
        return self.attend(self.qkv(x, before, step.adapters), step, cache)

    def attend(self, qkv: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """The same of queries, keys and values [T, (H + 2 · Hkv) · Dh], made by whoever."""
        spec = self.spec
        key_cache, value_cache, *beside = cache
        q = ops.rotary_cache(
            qkv,
            spec.num_heads,
            None if self.q_norm is None else self.q_norm.parameter("weight"),
            None if self.k_norm is None else self.k_norm.parameter("weight"),
            self.eps,
            None if self.table is None else self.table.cos_sin,
            self.table is not None and self.table.interleaved,
            step.positions,
            step.slots,
            key_cache,
            value_cache,
            *beside,
            copies=step.copies,
            sink_reach=spec.reach if spec.sink_tokens else 0,
        )
        seen = ops.paged_attention(
            q,
            key_cache,
            value_cache,
            step.query_start,
            step.context_len,
            step.block_table,
            spec.scale,
            spec.window,
            spec.softcap,
            None if self.sinks is None else self.sinks.parameter("weight"),
            **_named(beside),
            causal=spec.causal,
            sink_tokens=spec.sink_tokens,
        )
        return seen if self.gather is None else self.gather(seen)
