"""Attention over latents (MLA): `ops.mla` has the formulas."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.nn.parameters import Loadable, plain, room_for
from penstock.nn.rope import RotaryTable
from penstock.nn.shared import heads_of
from penstock.nn.spec import AttentionSpec, LatentSpec, NormSpec
from penstock.parallel import Gather, Part, Ranks, Ring
from penstock.quant import Codes, Dense, WeightFormat
from penstock.step import LayerCache, RingStep, Step


class HeadBanks(Loadable):
    """What makes heads' keys and values of a latent: two matrices a head, in the rows' dtype.

    A checkpoint has them in one, [H · (K + V), rank]. Nobody multiplies by that: the upper part
    of each head is stored as what takes a query to the latent, the lower one as it is.
    """

    def __init__(
        self,
        heads: int,
        key_dim: int,
        latent: LatentSpec,
        dtype: torch.dtype,
        own: range | None = None,
    ) -> None:
        """own: the heads that are kept, where ranks share them."""
        super().__init__()
        self.heads = heads
        self.kept = range(heads) if own is None else own
        self.key_dim = key_dim
        self.latent = latent
        self.weight_format = Dense(dtype)

    def expected(self) -> dict[str, tuple[int, ...]]:
        rows = self.heads * (self.key_dim + self.latent.value_dim)
        return {"weight": (rows, self.latent.rank)}

    def shapes(self) -> dict[str, tuple[int, int]]:
        """[N, K] of each head's matrices."""
        rank = self.latent.rank
        return {"key_up": (rank, self.key_dim), "value_up": (self.latent.value_dim, rank)}

    @property
    def nbytes(self) -> int:
        return len(self.kept) * sum(
            self.weight_format.nbytes(n, k) for n, k in self.shapes().values()
        )

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        heads = plain(tensor).unflatten(0, (self.heads, -1))[self.kept.start : self.kept.stop]
        keys, values = heads.split((self.key_dim, self.latent.value_dim), 1)
        self.own("key_up", self._packed(keys.transpose(1, 2)))
        self.own("value_up", self._packed(values))

    def _packed(self, heads: Tensor) -> Tensor:
        pack = self.weight_format.pack
        parts = [pack(head.contiguous(), False)["weight"] for head in heads]
        bank = room_for((len(parts), *parts[0].shape), parts[0])
        for number, part in enumerate(parts):
            bank[number] = part
        return bank


class LatentAttention(nn.Module):
    """norm, queries and latents → write → attend → values; `out` is the caller's last step.

    `q`, or `q_down`, a norm and `q_up`, make queries; `kv` makes latents and the rotated key part.
    """

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        norm: NormSpec,
        formats: Mapping[str, WeightFormat],
        table: RotaryTable | None,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
    ) -> None:
        """dtype: of activations. ranks: share the heads; each makes and keeps the latents."""
        super().__init__()
        assert spec.latent is not None and table is not None
        latent, self.spec, self.latent, self.table = spec.latent, spec, spec.latent, table
        self.gather: Gather | None = None
        heads = q_part = out_part = None
        if ranks is not None:
            shared, _ = heads_of(spec, ranks)
            heads, self.gather = shared.own, Gather(shared.times(latent.value_dim))
            q_part = Part((shared.times(spec.head_dim).own,), spec.num_heads * spec.head_dim)
            out_part = Part.of(ranks.split(hidden))
        if formats["out"].storage.name != "panels":
            raise UnsupportedModelError(
                "Attention over latents (MLA) is built for CPUs only: choose device='cpu'."
            )
        queries, bias = spec.num_heads * spec.head_dim, spec.qkv_bias
        between = NormSpec(norm.kind, latent.norm_eps)
        if latent.query_rank:
            self.q_down = Linear(hidden, latent.query_rank, bias, formats["q_down"])
            self.q_norm = Norm(latent.query_rank, between)
            self.q_up = Linear(latent.query_rank, queries, False, formats["q_up"], part=q_part)
        else:
            self.q = Linear(hidden, queries, False, formats["q"], part=q_part)
        self.kv = Linear(hidden, latent.rank + spec.turning, bias, formats["kv"])
        self.kv_norm = Norm(latent.rank, between)
        key_dim = spec.head_dim - spec.turning
        self.heads = HeadBanks(spec.num_heads, key_dim, latent, dtype, heads)
        self.out = Linear(spec.out_dim, hidden, spec.out_bias, formats["out"], part=out_part)
        self.ring: Ring | None = None

    def forward(self, x: Tensor, before: Norm | None, step: Step, cache: LayerCache) -> Tensor:
        """x [T, D] → what the heads saw [T, H · V], for `out`; writes latents."""
        adapters, rank = step.adapters, self.latent.rank
        if self.latent.query_rank:
            q = self.q_up(self.q_down(x, before, adapters), self.q_norm, adapters)
        else:
            q = self.q(x, before, adapters)
        kv = self.kv(x, before, adapters)
        turns = self.table.cos_sin, self.table.interleaved, step.positions
        spec = self.spec
        q = ops.mla_query(q, self.heads.parameter("key_up"), *turns, rank, spec.sink_reach)
        seen = (
            self._see(q, kv, step, cache)
            if self.ring is None
            else self._see_around(self.ring, q, kv, step, cache)
        )
        values = self.heads.parameter("value_up")
        found = ops.head_linear(seen, values, self.latent.value_dim)
        return found if self.gather is None else self.gather(found)

    def _see(self, q: Tensor, kv: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Weighted sums of latents [T, H · rank]; writes the latents of kv."""
        spec, norm, (latents,) = self.spec, self.kv_norm, cache
        turns = self.table.cos_sin, self.table.interleaved, step.positions
        eps, weight = norm.spec.eps, norm.parameter("weight")
        ops.mla_cache(kv, weight, eps, *turns, step.slots, latents, copies=step.copies)
        return ops.mla_attention(
            q, latents, step.query_start, step.context_len, step.block_table, spec.scale,
            self.latent.rank, spec.window, spec.sink_tokens,
        )  # fmt: skip

    def _see_around(
        self, ring: Ring, q: Tensor, kv: Tensor, step: Step, cache: LayerCache
    ) -> Tensor:
        """The same of this rank's rows, where ranks share sequences."""
        assert isinstance(step, RingStep)
        spec, norm, (latents,) = self.spec, self.kv_norm, cache
        turns = self.table.cos_sin, self.table.interleaved, step.all_positions
        eps, weight = norm.spec.eps, norm.parameter("weight")
        ops.ring_mla_cache(
            kv, weight, eps, *turns, step.slots, latents, step.copies, ring.meeting, step.rows,
            ring.rank, ring.size,
        )  # fmt: skip
        return ops.ring_mla_attention(
            q, latents, step.query_start, step.context_len, step.block_table, spec.scale,
            self.latent.rank, spec.window, ring.meeting, step.rows, ring.rank, ring.size,
        )  # fmt: skip
