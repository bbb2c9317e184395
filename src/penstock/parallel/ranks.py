"""Who computes which columns, where the processes of one step (ranks) share its matrices.

Every matrix is divided by columns of its products, none by the values that a product adds up. So no
sum is ever taken over ranks: a column is computed by one of them, from all of a row, in the order
that one process takes, and what is put together is equal to one process's by `==`. Shoeybi et al.
2019 (arXiv:1909.08053, Megatron-LM) divide every second matrix the other way and add: half as many
meetings, but sums whose order depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.ops.panels import COLUMNS
from penstock.parallel.stages import Stage


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """This process's place among those that compute a step together."""

    rank: int
    size: int
    meeting: Tensor  # ops.ranks: memory of all of them
    whole_experts: bool = False  # of mixtures each has some experts, else some columns of all
    stage: Stage | None = None  # which layers these ranks have; None: all

    def split(self, count: int, unit: int = COLUMNS) -> Share:
        """`count` columns in parts of whole units, as equal as can be; the last may be shorter.

        Fewer units than ranks: parts of single columns. Raises UnsupportedModelError where some
        would have none.
        """
        if count < self.size:
            raise UnsupportedModelError(
                f"{count} columns or experts are too few for {self.size} ranks. Lower "
                "tensor_parallel_size."
            )
        unit = unit if -(-count // unit) >= self.size else 1
        units = -(-count // unit)
        bounds = [min(rank * units // self.size * unit, count) for rank in range(self.size + 1)]
        return Share(self, tuple(bounds))

    def heads(self, heads: int, kv_heads: int) -> tuple[Share, range]:
        """Query heads of all ranks, and this one's key heads: those that its queries read.

        Fewer key heads than ranks: several have the same one. Raises UnsupportedModelError.
        """
        if kv_heads >= self.size:
            ends = [rank * kv_heads // self.size for rank in range(self.size + 1)]
            group = heads // kv_heads
            return Share(self, tuple(end * group for end in ends)), range(
                ends[self.rank], ends[self.rank + 1]
            )
        if self.size % kv_heads or heads % self.size:
            raise UnsupportedModelError(
                f"{heads} heads over {kv_heads} key heads can't be shared among {self.size} ranks: "
                f"tensor_parallel_size may be {', '.join(map(str, _sizes(heads, kv_heads)))}."
            )
        own = self.rank * kv_heads // self.size
        bounds = tuple(rank * heads // self.size for rank in range(self.size + 1))
        return Share(self, bounds), range(own, own + 1)


def _sizes(heads: int, kv_heads: int) -> list[int]:
    """How many ranks can share so many heads."""
    return [n for n in range(1, heads + 1)
            if n <= kv_heads or (n % kv_heads == 0 and heads % n == 0)]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What each rank has of some columns: rank r those from bounds[r] to bounds[r + 1]."""

    ranks: Ranks
    bounds: tuple[int, ...]

    @property
    def own(self) -> range:
        """This rank's."""
        return range(*self.bounds[self.ranks.rank : self.ranks.rank + 2])

    def times(self, width: int) -> Share:
        """The same where each of them is `width` columns."""
        return Share(self.ranks, tuple(bound * width for bound in self.bounds))

    @property
    def ends(self) -> Tensor:
        """As operators take them."""
        return torch.tensor(self.bounds, dtype=torch.int32)


class Gather:
    """Puts together what each rank has computed of rows."""

    def __init__(self, share: Share, reader: int = -1) -> None:
        """reader: the only rank that needs them; −1: all do."""
        self.share = share
        self.reader = reader
        self._ends = share.ends  # one tensor, which a plan knows by its identity

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's columns [T, own] → all [T, N]."""
        ranks = self.share.ranks
        return ops.gather_columns(x, ranks.meeting, self._ends, ranks.rank, self.reader)

    def rows(
        self,
        tokens: Tensor,
        packed: Mapping[str, Tensor],
        dim: int,
        scale: float,
        levels: int,
    ) -> Tensor:
        """Rows [T, dim] of a matrix that ranks share by its rows, in all of them; packed: this
        rank's, in a format whose codes stand for `levels`.
        """
        ranks = self.share.ranks
        return ops.gather_embedding(
            tokens,
            packed["weight"],
            dim,
            scale,
            packed.get("scale"),
            packed.get("zero"),
            levels,
            packed.get("outer"),
            ranks.meeting,
            self._ends,
            ranks.rank,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank has of a matrix: some of its rows, which are columns of its products."""

    rows: tuple[range, ...]  # of a gated one: of each half
    whole: int  # rows of the matrix, or of each half
    gather: Gather | None = None  # of the products; None: whoever reads them needs no others

    @classmethod
    def of(cls, share: Share, reader: int = -1) -> Part:
        """A rank's share of all columns, that are put together."""
        return cls((share.own,), share.bounds[-1], Gather(share, reader))

    @property
    def size(self) -> int:
        """Rows that the rank has, of each half."""
        return sum(len(rows) for rows in self.rows)

    def index(self, gated: bool = False) -> Tensor:
        """[own] int64: which rows of the matrix, gate above up where gated."""
        own = torch.cat([torch.arange(r.start, r.stop) for r in self.rows])
        return torch.cat([own, own + self.whole]) if gated else own
