"""How families cut pictures: into tiles, to one square, or to a grid of any shape.

What comes is what transformers' processors of the same settings give, to the bit: Pillow resizes,
or torch where there is no processor over Pillow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.errors import InvalidPromptError
from penstock.models.vision.opening import MOST_PIXELS
from penstock.models.vision.pictures import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

IDEFICS_EDGE = 4096
"""Pixels that the longer edge of a picture has at most before it is cut into tiles."""
_NARROWEST = 200
"""Of Qwen2-VL and LFM2-VL: one side over the other."""


@dataclass(frozen=True, slots=True)
class TileCutter:
    """Idefics3's and SmolVLM's: a grid of tiles, and the whole picture as one more."""

    side: int  # pixels of a tile
    longest: int  # pixels of the longer edge, before it is a multiple of `side`
    resample: int
    splits: bool
    rows: int  # of a tile, in the decoder
    image: str

    def cut(self, image: Image) -> Picture:
        width, height = self._rescaled(*image.size)
        image = image.resize((width, height), self.resample)
        if not self.splits:
            return self._of([image.resize((self.side, self.side), self.resample)], 0, 0)
        width, height = self._multiples(width, height)
        image = image.resize((width, height), self.resample)
        down, across = height // self.side, width // self.side
        if down == across == 1:
            return self._of([image], 0, 0)
        tiles = _cut_up(image, self.side)
        tiles.append(image.resize((self.side, self.side), self.resample))
        return self._of(tiles, down, across)

    def _rescaled(self, width: int, height: int) -> tuple[int, int]:
        """The longer edge as long as is asked, the other one even."""
        ratio = width / height
        if width >= height:
            width, height = self.longest, int(self.longest / ratio)
            height += height % 2
        else:
            width, height = int(self.longest * ratio), self.longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio, most = width / height, IDEFICS_EDGE
        if width >= height and width > most:
            width, height = most, int(most / ratio)
        elif height > width and height > most:
            width, height = int(most * ratio), most
        return max(width, 1), max(height, 1)

    def _multiples(self, width: int, height: int) -> tuple[int, int]:
        """Both edges as multiples of a tile's."""
        ratio, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        return max(width, side), max(height, side)

    def _of(self, tiles: list[Image], down: int, across: int) -> Picture:
        places, around = self.image * self.rows, "<fake_token_around_image>"
        text = ""
        for y in range(down):
            for x in range(across):
                text += f"{around}<row_{y + 1}_col_{x + 1}>{places}"
            text += "\n"
        text += "\n" * bool(down) + f"{around}<global-img>{places}{around}"
        return Picture.of([np.asarray(tile) for tile in tiles], text, len(tiles) * self.rows)


@dataclass(frozen=True, slots=True)
class CanvasCutter:
    """InternVL's: tiles in the shape nearest to the picture's, and the whole as one more."""

    side: int  # pixels of a tile
    least: int
    most: int  # tiles; 1: the whole alone
    resample: int
    rows: int  # of a tile, in the decoder
    image: str

    def cut(self, image: Image) -> Picture:
        side = self.side
        across, down = (1, 1)
        if self.most > 1:
            across, down = _nearest_shape(*image.size, self.side, self.least, self.most)
        canvas = image.resize((across * side, down * side), self.resample)
        tiles = _cut_up(canvas, side)
        if len(tiles) > 1:
            tiles.append(image.resize((side, side), self.resample))
        tokens = len(tiles) * self.rows
        text = f"<img>{self.image * tokens}</img>"
        return Picture.of([np.asarray(tile) for tile in tiles], text, tokens)


@dataclass(frozen=True, slots=True)
class PieceCutter:
    """LFM2-VL's: a small picture as it is, its sides multiples of a token's; a large one in tiles,
    in the shape nearest to its own, and the whole, made small, as one more.
    """

    side: int  # pixels of a tile
    patch: int  # of a patch's side
    fold: int  # patches of a token's side
    shapes: tuple[int, int]  # tiles of a picture that is cut: at least, at most; (1, 1): none is
    tokens: tuple[int, int]  # of a picture that isn't, and of the whole one: at least, at most
    tolerance: float  # a picture is cut that would have so many times more
    whole: bool  # tiles come with the whole picture
    image: str

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.fold

    @property
    def most_tokens(self) -> int:
        """Of what goes through the tower at once: of a tile, or of a picture, of which the longest
        are one token wide, or have their sides rounded up.
        """
        least, most = self.tokens
        wide = math.isqrt(_NARROWEST * most)
        sides = math.sqrt(least * _NARROWEST), math.sqrt(least / _NARROWEST)
        rounded = math.ceil((sides[0] + 1) * (sides[1] + 1))
        return max(most, wide, rounded, (self.side // self.unit) ** 2)

    def cut(self, image: Image) -> Picture:
        _check_narrow(*image.size)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        parts: list[tuple[str, np.ndarray]] = []  # what is written before a piece, and the piece
        if self.shapes[1] > 1 and self._is_large(*image.size):
            across, down = _nearest_shape(*image.size, self.side, *self.shapes)
            marks = [f"<|img_row_{y + 1}_col_{x + 1}|>" for y in range(down) for x in range(across)]
            tiles = self._tiles(pixels, across, down)
            parts += zip(marks if len(tiles) > 1 else [""], tiles, strict=True)
        if not parts or (self.whole and len(parts) > 1):
            mark = "<|img_thumbnail|>" if parts else ""
            parts.append((mark, _scaled(pixels, *self._whole(*image.size))))
        counts = [piece.shape[0] * piece.shape[1] // self.unit**2 for _, piece in parts]
        text = "".join(
            mark + self.image * count for (mark, _), count in zip(parts, counts, strict=True)
        )
        pieces = [piece for _, piece in parts]
        return Picture.of(pieces, f"<|image_start|>{text}<|image_end|>", sum(counts))

    def _tiles(self, pixels: torch.Tensor, across: int, down: int) -> list[np.ndarray]:
        side = self.side
        canvas = _scaled(pixels, down * side, across * side)
        rows = canvas.reshape(down, side, across, side, 3).swapaxes(1, 2)
        return list(rows.reshape(-1, side, side, 3))

    def _is_large(self, width: int, height: int) -> bool:
        unit = self.unit
        sides = (max(self.patch, round(x / unit) * unit) for x in (width, height))
        return math.prod(sides) > self.tokens[1] * unit**2 * self.tolerance

    def _whole(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) of a picture, or of the small one beside tiles."""
        unit = self.unit
        least, most = (count * unit**2 for count in self.tokens)
        found = [max(unit, round(x / unit) * unit) for x in (height, width)]
        if math.prod(found) > most:
            by = math.sqrt(height * width / most)
            found = [max(unit, math.floor(x / by / unit) * unit) for x in (height, width)]
        elif math.prod(found) < least:
            by = math.sqrt(least / (height * width))
            found = [math.ceil(x * by / unit) * unit for x in (height, width)]
        return found[0], found[1]


@dataclass(frozen=True, slots=True)
class SquareCutter:
    """CLIP's and SigLIP's: one square."""

    side: int
    shortest: bool  # this edge gets its length and the middle is cut out; else both are stretched
    pads: tuple[int, ...] | None  # first made square by this colour
    resample: int
    rows: int
    image: str

    def cut(self, image: Image) -> Picture:
        side, text = self.side, self.image * self.rows
        if self.pads is not None:
            image = _padded(image, self.pads)
        if not self.shortest:
            tile = image.resize((side, side), self.resample)
            return Picture.of([np.asarray(tile)], text, self.rows)
        width, height = image.size
        if width <= height:
            width, height = side, int(side * height / width)
        else:
            width, height = int(side * width / height), side
        left, top = (width - side) // 2, (height - side) // 2
        # only what is seen of it is made: a line of 1 × 100,000 pixels would fill the memory
        image = _resized_part(image, (width, height), (left, top, left + side, top + side), self)
        return Picture.of([np.asarray(image)], text, self.rows)


@dataclass(frozen=True, slots=True)
class FramedCutter:
    """Gemma 3's: one square, between marks; of a long picture, if asked for, parts as well (pan and
    scan).
    """

    side: int
    resample: int
    rows: int  # of a square, in the decoder
    image: str
    around: tuple[str, str]  # what stands before a square's rows and after them
    parts: tuple[int, int, float] | None = None  # pixels of a part's side at least, parts at most,
    # and how long a picture is at least; None: it has no parts

    def cut(self, image: Image) -> Picture:
        parts = self._parts(image)
        squares = [one.resize((self.side, self.side), self.resample) for one in (image, *parts)]
        text = frame = (self.image * self.rows).join(self.around)
        if parts:
            text = f"Here is the original image {frame} and here are some crops to help you see "
            text += "better " + " ".join([frame] * len(parts))
        return Picture.of([np.asarray(x) for x in squares], text, len(squares) * self.rows)

    def _parts(self, image: Image) -> list[Image]:
        """Side by side along the longer edge."""
        if self.parts is None:
            return []
        (width, height), (least, most, ratio) = image.size, self.parts
        long, short = max(width, height), min(width, height)
        if long / short < ratio:
            return []
        count = min(max(2, min(long // least, math.floor(long / short + 0.5))), most)
        step = math.ceil(long / count)
        if min(step, short) < least:
            return []
        cuts = [(at, min(at + step, long)) for at in range(0, step * count, step)]
        if width >= height:
            return [image.crop((a, 0, b, height)) for a, b in cuts]
        return [image.crop((0, a, width, b)) for a, b in cuts]


@dataclass(frozen=True, slots=True)
class GridCutter:
    """Qwen2-VL's: the whole picture, its sides multiples of a token's, of so many pixels at least
    and at most.
    """

    unit: int
    least: int
    most: int
    resample: int
    image: str

    @property
    def most_tokens(self) -> int:
        """Of a picture."""
        return self.most // self.unit**2

    def cut(self, image: Image) -> Picture:
        _check_narrow(*image.size)
        width, height = self._rounded(*image.size)
        tile = image.resize((width, height), self.resample)
        grid = height // self.unit, width // self.unit
        tokens = grid[0] * grid[1]
        return Picture.of([np.asarray(tile)], self.image * tokens, tokens, grid)

    def _rounded(self, width: int, height: int) -> tuple[int, int]:
        unit = self.unit
        found = [round(edge / unit) * unit for edge in (width, height)]
        if found[0] * found[1] > self.most:
            by = math.sqrt(height * width / self.most)
            found = [max(unit, math.floor(x / by / unit) * unit) for x in (width, height)]
        elif found[0] * found[1] < self.least:
            by = math.sqrt(self.least / (height * width))
            found = [math.ceil(x * by / unit) * unit for x in (width, height)]
        return found[0], found[1]


@dataclass(frozen=True, slots=True)
class LineCutter:
    """Pixtral's: the whole picture, made small where an edge is too long, its sides multiples of a
    token's; marks say where rows end.
    """

    unit: int
    edges: tuple[int, int]  # height and width, at most
    resample: int
    image: str

    @property
    def most_tokens(self) -> int:
        """Of a picture."""
        return math.prod(-(-edge // self.unit) for edge in self.edges)

    def cut(self, image: Image) -> Picture:
        width, height = image.size
        ratio = max(height / self.edges[0], width / self.edges[1])
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if not width or not height:
            raise InvalidPromptError(
                f"A picture of {image.size[0]} × {image.size[1]} pixels is too long and narrow: "
                "made as small as this model's are, one side is shorter than a pixel. Cut it into "
                "parts."
            )
        high, wide = -(-height // self.unit), -(-width // self.unit)
        tile = image.resize((wide * self.unit, high * self.unit), self.resample)
        text = "[IMG_BREAK]".join([self.image * wide] * high) + "[IMG_END]"
        return Picture.of([np.asarray(tile)], text, high * wide)


@dataclass(frozen=True, slots=True)
class AnyresCutter:
    """LLaVA-NeXT's: the whole picture as one square, and then as large as it fits in one of some
    shapes, cut into tiles; of those the margins are left out again, and a row ends each line.
    """

    side: int  # pixels of a tile
    patches: int  # of a tile's side
    shapes: tuple[tuple[int, int], ...]  # height and width, multiples of `side`
    resample: int
    image: str

    def cut(self, image: Image) -> Picture:
        width, height = image.size
        high, wide = self._shape(width, height)
        by = min(wide / width, high / height)
        fits_wide = wide / width < high / height
        size = min(math.ceil(width * by), wide), min(math.ceil(height * by), high)
        size = (wide, size[1]) if fits_wide else (size[0], high)
        canvas = image.resize(size, self.resample)
        canvas = _in_the_middle(canvas, wide, high)
        tiles = [image.resize((self.side, self.side), self.resample), *_cut_up(canvas, self.side)]
        order = self._order(width, height, high // self.side, wide // self.side)
        text = self.image * len(order)
        return Picture.of([np.asarray(x) for x in tiles], text, len(order), order=order)

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        """The one in which most of a picture's pixels are kept, of those the least; the first."""
        best, most, least = (0, 0), 0, math.inf
        for high, wide in self.shapes:
            by = min(wide / width, high / height)
            kept = min(int(width * by) * int(height * by), width * height)
            left = high * wide - kept
            if kept > most or (kept == most and left < least):
                best, most, least = (high, wide), kept, left
        if not most:
            raise InvalidPromptError(
                f"A picture of {width} × {height} pixels is too long and narrow: made as small as "
                "this model's are, one side is shorter than a pixel. Cut it into parts."
            )
        return best

    def _order(self, width: int, height: int, down: int, across: int) -> np.ndarray:
        """[tokens] int64 as `Picture.order`, of down × across tiles."""
        side = self.patches
        high, wide = down * side, across * side
        top = left = 0
        if width / height > wide / high:
            top = (high - int(round(height * (wide / width), 7))) // 2
        else:
            left = (wide - int(round(width * (high / height), 7))) // 2
        y, x = np.arange(top, high - top)[:, None], np.arange(left, wide - left)
        tile = 1 + y // side * across + x // side
        lines = tile * side**2 + y % side * side + x % side
        ends = np.full((len(lines), 1), (1 + down * across) * side**2)
        lines = np.concatenate((lines, ends), axis=1)
        return np.concatenate((np.arange(side**2), lines.ravel())).astype(np.int64)


def _in_the_middle(image: Image, width: int, height: int) -> Image:
    """Of so much black."""
    from PIL import Image as Images

    found = Images.new("RGB", (width, height))
    found.paste(image, ((width - image.size[0]) // 2, (height - image.size[1]) // 2))
    return found


def _check_narrow(width: int, height: int) -> None:
    if max(width, height) > _NARROWEST * min(width, height):
        raise InvalidPromptError(
            f"A picture of {width} × {height} pixels is too long and narrow: one side is over "
            f"{_NARROWEST} times the other. Cut it into parts."
        )


def _nearest_shape(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(across, down) of `least` to `most` tiles of `side` pixels: of shapes that are as near, the
    larger one as long as the picture has more than half its pixels.
    """
    counts = range(1, most + 1)
    shapes = [(x, y) for x in counts for y in counts if least <= x * y <= most]
    best, nearest = (1, 1), math.inf
    for x, y in sorted(shapes, key=math.prod):
        away = abs(width / height - x / y)
        fills = width * height > 0.5 * side**2 * x * y
        if away < nearest or (away == nearest and fills):
            best, nearest = (x, y), away
    return best


def _scaled(pixels: torch.Tensor, height: int, width: int) -> np.ndarray:
    """pixels [3, H, W] uint8 → [height, width, 3], as transformers' processors over torch do."""
    found = torch.nn.functional.interpolate(
        pixels[None], size=(height, width), mode="bilinear", antialias=True
    )
    return found[0].permute(1, 2, 0).numpy()


def _cut_up(image: Image, side: int) -> list[Image]:
    """Tiles, row by row, of an image whose edges are multiples of `side`."""
    width, height = image.size
    return [
        image.crop((x, y, x + side, y + side))
        for y in range(0, height, side)
        for x in range(0, width, side)
    ]


def _resized_part(
    image: Image, size: tuple[int, int], box: tuple[int, int, int, int], how: SquareCutter
) -> Image:
    """`box` of the image resized to `size`."""
    most = 64 * how.side**2
    if size[0] * size[1] > most:
        raise InvalidPromptError(
            f"A picture of {image.size[0]} × {image.size[1]} pixels is too long and narrow: its "
            f"shorter edge becomes {how.side} pixels. Cut it into parts."
        )
    return image.resize(size, how.resample).crop(box)


def _padded(image: Image, colour: tuple[int, ...]) -> Image:
    from PIL import Image as Images

    width, height = image.size
    side = max(width, height)
    if side**2 > MOST_PIXELS:
        raise InvalidPromptError(
            f"A picture of {width:,} × {height:,} pixels is too long: it is made square first, and "
            f"a square has at most {MOST_PIXELS:,} pixels. Make it smaller."
        )
    square = Images.new("RGB", (side, side), colour)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square
