"""Pictures as a model's tower takes them, and the text that stands for them in a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.errors import InvalidPromptError

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture as a model's tower takes it."""

    tiles: tuple[Tensor, ...]  # [3, H, W] uint8 each
    text: str  # what stands in a prompt for it, each of `tokens` places included
    tokens: int
    key: int  # below 0: of what is in `tiles`, in place of the tokens that stand for it
    grid: tuple[int, int] | None = None  # rows and columns of its tokens, where they have some
    order: Tensor | None = None  # [tokens] int64: which of its tiles' rows each has, where they
    # aren't all in turn; one behind those: the row that ends a line

    @classmethod
    def of(
        cls,
        tiles: Sequence[np.ndarray],
        text: str,
        tokens: int,
        grid: tuple[int, int] | None = None,
        order: np.ndarray | None = None,
    ) -> Picture:
        """tiles: [H, W, 3] uint8."""
        planes = [np.ascontiguousarray(tile.transpose(2, 0, 1)) for tile in tiles]
        digest = hashlib.sha256(str([plane.shape for plane in planes]).encode())
        for plane in planes:
            digest.update(plane.tobytes())
        rows = None if order is None else torch.from_numpy(order)
        if order is not None:
            digest.update(order.tobytes())
        key = -1 - (int.from_bytes(digest.digest()[:8]) >> 1)
        return cls(tuple(map(torch.from_numpy, planes)), text, tokens, key, grid, rows)


class Cutter(Protocol):
    """How a family's pictures are cut, and what stands for them."""

    def cut(self, image: Image) -> Picture:
        """A picture of RGB."""
        ...


@dataclass(frozen=True, slots=True)
class Scaling:
    """From bytes to what a tower takes: (x · factor − mean) / std, of each channel."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, tile: Tensor) -> Tensor:
        """tile [3, S, S] uint8 → float32."""
        x = (tile.numpy().astype(np.float64) * self.factor).astype(np.float32)
        mean, std = (np.array(v, np.float32)[:, None, None] for v in (self.mean, self.std))
        return torch.from_numpy((x - mean) / std)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Of one model: pictures in, tiles and texts out."""

    placeholder: str  # what a chat template writes for a picture …
    around: tuple[str, str]  # … between these
    token_id: int  # of each place that a row of a picture takes
    written_id: int  # of the placeholder
    cutter: Cutter
    scaling: Scaling

    @property
    def written(self) -> str:
        """What stands for a picture in a text that nobody's template has written."""
        return self.around[0] + self.placeholder + self.around[1]

    def expand(self, text: str, pictures: Sequence[Picture]) -> str:
        """A prompt with what stands for its pictures, in turn, in place of placeholders.

        Raises InvalidPromptError where they aren't as many.
        """
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(pictures):
            raise InvalidPromptError(
                f"The prompt has {len(parts) - 1} × {self.placeholder} for {len(pictures)} "
                f"pictures. Write {self.written} for each of them, where it belongs."
            )
        return parts[0] + "".join(
            p.text + rest for p, rest in zip(pictures, parts[1:], strict=True)
        )
