"""Self-attention of one layer over a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm, TurnedNorm
from penstock.nn.parameters import Loadable, Vector, as_float32, plain
from penstock.nn.rope import RotaryTable
from penstock.nn.shared import attends_apart, heads_of, own_attention, own_qkv
from penstock.nn.spec import AttentionSpec, NormSpec
from penstock.parallel import Gather, Part, Ranks, Ring
from penstock.quant import Codes, WeightFormat
from penstock.step import LayerCache, RingStep, Runs, Step

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


class Bases(Loadable):
    """Bases of queries and of keys, in which those have fewer dimensions (`ops.rotary_cache`)."""

    def __init__(self, spec: AttentionSpec, own: range | None = None) -> None:
        """own: the key heads that are kept, where ranks share them."""
        super().__init__()
        self.shape = (2, spec.num_kv_heads, spec.head_dim, spec.kv_rank)
        self.kept = range(spec.num_kv_heads) if own is None else own

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape}

    @property
    def nbytes(self) -> int:
        return super().nbytes // self.shape[1] * len(self.kept)

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        self.own(name, as_float32(plain(tensor)[:, self.kept.start : self.kept.stop]))


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
        formats: Mapping[str, WeightFormat],
        table: RotaryTable | None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        qkv, out = formats["qkv"], formats["out"]
        self.spec = own = spec
        self.gather: Gather | None = None
        qkv_part = out_part = heads = kept = None
        if ranks is not None:
            self.spec = own = own_attention(spec, ranks)
            if attends_apart(spec):
                queries, kept = heads_of(spec, ranks)
                heads, self.gather = queries.own, Gather(queries.times(spec.kept_dim))
            qkv_part, out_part = own_qkv(spec, ranks), Part.of(ranks.split(hidden))
        q_size, k_size, _ = columns = own.qkv_columns
        self.qkv = Linear(hidden, sum(columns), spec.qkv_bias, qkv, part=qkv_part)
        self.gate: Linear | None = None
        if spec.gated:
            self.gate = Linear(hidden, spec.out_dim, spec.qkv_bias, formats["gate"])
        self.out = Linear(spec.out_dim, hidden, spec.out_bias, out, part=out_part)
        self.table = table
        self.eps = norm.eps
        full = spec.qk_norm == "full"
        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            kind = TurnedNorm if spec.qk_norm == "turned" else Norm
            self.q_norm = kind(q_size if full else spec.head_dim, norm)
            if spec.reads is None:
                self.k_norm = kind(k_size if full else spec.head_dim, norm)
        if (spec.value_norm or spec.parts < 3) and qkv.storage.name != "panels":
            raise UnsupportedModelError(
                "Normed values, keys that are values too, and keys and values of other layers are "
                "built for CPUs only: choose device='cpu'."
            )
        self.sinks = Vector(spec.num_heads, heads) if spec.sinks else None
        self.bases = None
        if spec.kv_rank:
            if qkv.storage.name != "panels":
                raise UnsupportedModelError(
                    "Keys and values of fewer dimensions (kv_rank) are built for CPUs only: choose "
                    "device='cpu'."
                )
            self.bases = Bases(spec, kept)
        self.ring: Ring | None = None

    def forward(self, x: Tensor, before: Norm | None, step: Step, cache: LayerCache) -> Tensor:
        """x [T, D] → what the heads saw [T, `out_dim`], for `out`; writes keys and values."""
        seen = self.attend(self.qkv(x, before, step.adapters), step, cache)
        if self.gate is not None:
            ops.gate_by_(seen, self.gate(x, before, step.adapters))
        return seen

    def attend(self, qkv: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """The same of queries, keys and values [T, `qkv_columns`], made by whoever."""
        if self.ring is not None:
            return self._attend_around(self.ring, qkv, step, cache)
        return self.see(self.turn(qkv, step, cache), step, cache)

    def turn(self, qkv: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Queries, normalised and rotated, as `see` takes them; writes keys and values."""
        spec = self.spec
        key_cache, value_cache, *beside = cache
        return ops.rotary_cache(
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
            sink_reach=spec.sink_reach,
            bases=None if self.bases is None else self.bases.parameter("weight"),
            norm_values=spec.value_norm,
            parts=spec.parts,
        )

    def see(self, q: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """What these queries see, [T, `out_dim`]."""
        spec = self.spec
        key_cache, value_cache, *beside = cache
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
        if step.runs is not None:
            self._see_both_ways(q, seen, step.runs, cache)
        return seen if self.gather is None else self.gather(seen)

    def _see_both_ways(self, q: Tensor, seen: Tensor, runs: Runs, cache: LayerCache) -> None:
        """Put what a step's runs see in the place of what they would see of those before them."""
        spec = self.spec
        key_cache, value_cache, *beside = cache
        found = ops.paged_attention(
            q.index_select(0, runs.rows),
            key_cache,
            value_cache,
            runs.query_start,
            runs.context_len,
            runs.block_table,
            spec.scale,
            spec.window,
            spec.softcap,
            None if self.sinks is None else self.sinks.parameter("weight"),
            **_named(beside),
            causal=False,
        )
        seen.index_copy_(0, runs.rows, found)

    def _attend_around(self, ring: Ring, qkv: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """The same of this rank's rows, where ranks share sequences."""
        assert isinstance(step, RingStep)
        spec = self.spec
        key_cache, value_cache, *scales = cache
        key_scale, value_scale = scales or (None, None)
        return ops.ring_attention(
            qkv,
            spec.num_heads,
            None if self.q_norm is None else self.q_norm.parameter("weight"),
            None if self.k_norm is None else self.k_norm.parameter("weight"),
            self.eps,
            None if self.table is None else self.table.cos_sin,
            self.table is not None and self.table.interleaved,
            step.all_positions,
            step.slots,
            key_cache,
            value_cache,
            key_scale,
            value_scale,
            step.query_start,
            step.context_len,
            step.block_table,
            spec.scale,
            spec.window,
            spec.softcap,
            None if self.sinks is None else self.sinks.parameter("weight"),
            step.copies,
            ring.meeting,
            step.rows,
            ring.rank,
            ring.size,
            None if self.bases is None else self.bases.parameter("weight"),
        )
