"""Keys and values in fewer dimensions: bases that a text's queries, keys and heads hardly leave.

A score is q·k, of rotated heads. Of all matrices A and B of R columns, (Aᵀ·q)·(Bᵀ·k) is nearest to
it on the text where Xᵀ·A·Bᵀ·Y has the R largest singular values of Xᵀ·Y; X·Xᵀ and Y·Yᵀ are the
second moments of queries and of keys. The same holds of what a head sees and the weights that read
it: those two go into the weights, of values and of what reads them.
Sources: Saxena et al. 2024, arXiv:2408.05646 (Eigen Attention); Singhania et al. 2024,
arXiv:2406.02542 (Loki: keys that are rotated are of few dimensions).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.low_rank import BASES, KEY
from penstock.models.over import Over
from penstock.nn.attention import Attention
from penstock.ops.attention import gather_keys
from penstock.pipeline.parts import Parts
from penstock.pipeline.probe import Probe
from penstock.pipeline.prune.choose import Report
from penstock.pipeline.stream import BLOCK
from penstock.quant import Codes

_DAMPING = 1e-6
"""Of a second moment's mean diagonal, added to it: dimensions that the text never uses."""


@dataclass(slots=True)
class Moments:
    """Of one layer: second moments [key heads, D, D], added up over heads that share one."""

    queries: Tensor
    keys: Tensor
    seen: Tensor


@dataclass(frozen=True, slots=True)
class LayerBases:
    """Of one layer, each [key heads, D, R] float32."""

    queries: Tensor
    keys: Tensor
    values: Tensor  # Bᵀ·v is what is kept of a value v
    read: Tensor  # A, times that, is what the weights behind read

    @property
    def of_scores(self) -> Tensor:
        """As `ops.rotary_cache` takes them."""
        return torch.stack((self.queries, self.keys))


def choose_bases(parts: Parts, probe: Probe, rank: int, report: Report) -> list[LayerBases]:
    """Of all layers, by the text of a probe of these parts."""
    found = []
    for i, own in enumerate(_moments(probe, report)):
        a = parts.spec.decoder.layers[i].attention
        out = parts.matrix(f"layers.{i}.attention.out")  # [hidden, H · D]
        heads = out.unflatten(1, (a.num_kv_heads, -1, a.head_dim)).double()
        readers = torch.einsum("cghd,cghe->gde", heads, heads)
        queries, keys = _nearest(own.queries, own.keys, rank)
        read, values = _nearest(readers, own.seen, rank)
        found.append(LayerBases(queries, keys, values, read))
    return found


@torch.inference_mode()
def _moments(probe: Probe, report: Report) -> list[Moments]:
    layers = probe.decoder.layers
    found: list[Moments | None] = [None] * probe.num_layers

    def add(number: int, at: int, residual: Tensor) -> None:
        layer = layers[at]
        attention = layer.attention
        assert isinstance(attention, Attention)
        step, cache = probe.steps[number][0], probe.cache(at)
        qkv = attention.qkv(residual, layer.attention_norm, None)
        q = attention.turn(qkv, step, cache)
        keys = [
            gather_keys(cache[0], table[: -(-int(length) // BLOCK)], int(length), q.shape[2])
            for table, length in zip(step.block_table, step.context_len, strict=True)
        ]
        count = attention.spec.num_kv_heads
        heads = q.unflatten(1, (count, -1)), torch.cat(keys).unsqueeze(2)
        seen = attention.see(q, step, cache).view(q.shape).unflatten(1, (count, -1))
        moments = [_moment(x) for x in (*heads, seen)]
        own = found[at]
        if own is not None:
            moments = [
                m + n for m, n in zip(moments, (own.queries, own.keys, own.seen), strict=True)
            ]
        found[at] = Moments(*moments)

    for number in range(len(probe.steps)):
        probe.run(number, range(probe.num_layers), before=add)
        report("watching heads", number + 1, len(probe.steps))
    return [each for each in found if each is not None]


def _moment(heads: Tensor) -> Tensor:
    """x [T, G, H, D] → Σ x·xᵀ over tokens and the heads of each group, [G, D, D]."""
    x = heads.double()
    return torch.einsum("tghd,tghe->gde", x, x)


class Ranked(Over):
    """`parts` whose keys and values are kept in these layers' bases."""

    def __init__(self, parts: Parts, bases: list[LayerBases]) -> None:
        super().__init__(parts.source)
        rank = bases[0].queries.shape[2]
        self._config = {**parts.source.config, KEY: rank}
        self._own: dict[str, Tensor] = {}
        dtype = parts.source.dtype()
        for i, own in enumerate(bases):
            a = parts.spec.decoder.layers[i].attention
            self._own[BASES.format(i=i)] = own.of_scores
            q, k, _ = a.qkv_columns
            for of in ("weight", "bias"):
                target = f"layers.{i}.attention.qkv.{of}"
                names = parts.names.get(target)
                if names is None:
                    continue
                whole = torch.cat([parts.read(name) for name in names])
                values = whole[q + k :].unflatten(0, (a.num_kv_heads, a.head_dim))
                values = torch.einsum("gdr,gd...->gr...", own.values, values).flatten(0, 1)
                self._own |= _split(names, parts, torch.cat((whole[: q + k], values)), dtype)
            (out,) = parts.names[f"layers.{i}.attention.out.weight"]
            heads = parts.read(out).unflatten(1, (a.num_kv_heads, -1, a.head_dim))
            read = torch.einsum("cghd,gdr->cghr", heads, own.read)
            self._own[out] = read.flatten(1).to(dtype)

    @property
    def config(self) -> dict[str, Any]:
        """That of the base, with the dimensions that are kept."""
        return self._config

    def files(self) -> list[Path]:
        """None: what tells one choice from another isn't in files."""
        raise ConfigError(f"Bases of {self.path} are in memory alone: write them to a folder.")

    def names(self) -> list[str]:
        """Those of the base and the bases', sorted."""
        return sorted({*super().names(), *self._own})

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        own = self._own.get(name)
        return super().shape(name) if own is None else tuple(own.shape)

    def scheme(self, name: str) -> None:
        """None is quantized."""

    def read(self, name: str) -> Tensor | Codes:
        """A tensor."""
        own = self._own.get(name)
        return super().read(name) if own is None else own


def _split(
    names: tuple[str, ...], parts: Parts, whole: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Rows of queries, keys and values by the checkpoint's names, the last of which has fewer."""
    rows = [parts.source.shape(name)[0] for name in names[:-1]]
    split = whole.split([*rows, len(whole) - sum(rows)])
    return {name: part.to(dtype) for name, part in zip(names, split, strict=True)}


def _nearest(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B [G, D, R] by which (Aᵀ·x)·(Bᵀ·y) is nearest to x·y, where x has the second moment
    `left` [G, D, D] and y has `right`; each has the root of the singular values.
    """
    x, y = _root(left), _root(right)
    u, s, v = torch.linalg.svd(x.mT @ y)
    root = s[:, None, :rank].sqrt()
    a = torch.linalg.solve_triangular(x.mT, u[..., :rank] * root, upper=True)
    b = torch.linalg.solve_triangular(y.mT, v.mT[..., :rank] * root, upper=True)
    return a.float(), b.float()


def _root(moment: Tensor) -> Tensor:
    """L of L·Lᵀ = the moment, damped."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
    damp = (_DAMPING * mean)[:, None, None] * torch.eye(moment.shape[-1], dtype=moment.dtype)
    root: Tensor = torch.linalg.cholesky(moment + damp)
    return root
