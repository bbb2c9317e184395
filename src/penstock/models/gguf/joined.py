"""Matrices that a file has in parts and a checkpoint in one."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.models.gguf.container import TensorInfo
from penstock.ops.panels import COLUMNS
from penstock.quant import Codes, Scheme
from penstock.quant.codes import mixture


class Stacked:
    """Matrices one under the other, and perhaps their rows in another order.

    Raises WeightsError for parts of different widths.
    """

    def __init__(self, parts: tuple[TensorInfo, ...], order: Tensor | None = None) -> None:
        self.parts = parts
        for part in parts:
            if len(part.shape) != 2 or part.shape[1] != parts[0].shape[-1]:
                raise wrong(part, f"{parts[0].shape[-1]} columns")
        self._order = order

    @property
    def stored_as(self) -> str:
        """The block types of all."""
        return " and ".join(dict.fromkeys(part.block.name for part in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        """[rows of all, columns]."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def scheme(self) -> Scheme | None:
        """What holds all parts: the scheme that they have, or a mixture of K-quants."""
        schemes = [part.block.scheme for part in self.parts]
        found = {scheme for scheme in schemes if scheme is not None}
        if None in schemes:
            return None
        if len(found) == 1:
            return schemes[0]
        whole = all(part.shape[0] % COLUMNS == 0 for part in self.parts)
        return mixture(found) if whole and all(scheme.is_k for scheme in found) else None

    def read(self) -> Tensor | Codes:
        """As a checkpoint has it."""
        if self.scheme is not None:
            codes = [part.block.to_codes(part.data, part.shape) for part in self.parts]
            stacked = Codes.stack(codes)
            return stacked if self._order is None else stacked.rows(self._order)
        values = [part.block.tensor(part.data, part.shape) for part in self.parts]
        if len({part.dtype for part in values}) > 1:
            values = [part.float() for part in values]
        whole = torch.cat(values)
        return whole if self._order is None else whole[self._order]


class HeadPair:
    """Heads' matrices from latents to keys, each transposed, and to values: `kv_b_proj` apart.

    Raises WeightsError for shapes that don't belong together.
    """

    def __init__(self, keys_up: TensorInfo, values_up: TensorInfo) -> None:
        self.keys_up, self.values_up = keys_up, values_up
        k, v = keys_up.shape, values_up.shape
        if not len(k) == len(v) == 3 or (k[0], k[1]) != (v[0], v[2]):
            raise WeightsError(
                f"{keys_up.name} {list(k)} and {values_up.name} {list(v)} aren't matrices of the "
                "same heads over the same latents."
            )

    @property
    def parts(self) -> tuple[TensorInfo, TensorInfo]:
        """Both, keys first."""
        return self.keys_up, self.values_up

    @property
    def stored_as(self) -> str:
        """The block types of both."""
        return " and ".join(dict.fromkeys(part.block.name for part in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        """[H · (K + V), rank]."""
        heads, rank, keys = self.keys_up.shape
        return heads * (keys + self.values_up.shape[1]), rank

    @property
    def scheme(self) -> None:
        """None: its values are read."""

    def read(self) -> Tensor:
        """As a checkpoint has it, head by head."""
        parts = [each.block.tensor(each.data, each.shape) for each in self.parts]
        if parts[0].dtype is not parts[1].dtype:
            parts = [part.float() for part in parts]
        return torch.cat((parts[0].transpose(1, 2), parts[1]), 1).flatten(0, 1)


def wrong(tensor: TensorInfo, wanted: str) -> WeightsError:
    """For a shape that doesn't belong to the others."""
    return WeightsError(f"{tensor.name} has the shape {list(tensor.shape)}, not {wanted}.")
