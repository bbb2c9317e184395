"""From a picture to square tiles of pixels, and to the text that stands for it in a prompt.

What comes is what transformers' processors of the same files give, to the bit: Pillow resizes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.errors import (
    ConfigError,
    InvalidPromptError,
    ModelNotFoundError,
    UnsupportedModelError,
    nearest,
)
from penstock.models.registry import read_json
from penstock.models.spec import PicturesSpec
from penstock.nn.spec import GridSpec, VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

IDEFICS_EDGE = 4096
"""Pixels that the longer edge of a picture has at most before it is cut into tiles."""
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC, _LANCZOS = 3, 1
MAY_BE_CHOSEN: dict[str, tuple[str, ...]] = {
    "tiles": ("size", "do_image_splitting"),
    "whole": (),
    "grid": ("min_pixels", "max_pixels", "size"),
}
"""Of each way to cut, what may be chosen otherwise than a model's processor says it."""
_NARROWEST = 200
"""Of Qwen2-VL: one side over the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture as a model's tower takes it."""

    tiles: Tensor  # [n, 3, H, W] uint8
    text: str  # what stands in a prompt for it, each of `tokens` places included
    tokens: int
    key: int  # below 0: of what is in `tiles`, in place of the tokens that stand for it
    grid: tuple[int, int] | None = None  # rows and columns of its tokens, where they have some

    @classmethod
    def of(
        cls,
        tiles: Sequence[np.ndarray],
        text: str,
        tokens: int,
        grid: tuple[int, int] | None = None,
    ) -> Picture:
        """tiles: [H, W, 3] uint8."""
        stacked = np.ascontiguousarray(np.stack(tiles).transpose(0, 3, 1, 2))
        digest = hashlib.sha256(str(stacked.shape).encode() + stacked.tobytes()).digest()
        key = -1 - (int.from_bytes(digest[:8]) >> 1)
        return cls(torch.from_numpy(stacked), text, tokens, key, grid)


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
    token_id: int
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
                "pictures. Write it once for each of them, where it belongs."
            )
        return parts[0] + "".join(
            p.text + rest for p, rest in zip(pictures, parts[1:], strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Tiles:
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
        tiles = [
            image.crop((x * self.side, y * self.side, (x + 1) * self.side, (y + 1) * self.side))
            for y in range(down)
            for x in range(across)
        ]
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
class _Whole:
    """CLIP's and SigLIP's: one square."""

    side: int
    shortest: bool  # this edge gets its length and the middle is cut out; else both are stretched
    pads: tuple[int, ...] | None  # first made square by this colour
    resample: int
    rows: int
    image: str

    def cut(self, image: Image) -> Picture:
        side = self.side
        if self.pads is not None:
            image = _padded(image, self.pads)
        if not self.shortest:
            tile = image.resize((side, side), self.resample)
            return Picture.of([np.asarray(tile)], self.image * self.rows, self.rows)
        width, height = image.size
        if width <= height:
            width, height = side, int(side * height / width)
        else:
            width, height = int(side * width / height), side
        left, top = (width - side) // 2, (height - side) // 2
        # only what is seen of it is made: a line of 1 × 100,000 pixels would fill the memory
        image = _resized_part(image, (width, height), (left, top, left + side, top + side), self)
        return Picture.of([np.asarray(image)], self.image * self.rows, self.rows)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Qwen2-VL's: the whole picture, its sides multiples of a token's, of so many pixels at least
    and at most.
    """

    unit: int
    least: int
    most: int
    resample: int
    image: str

    def cut(self, image: Image) -> Picture:
        width, height = image.size
        if max(width, height) > _NARROWEST * min(width, height):
            raise InvalidPromptError(
                f"A picture of {width} × {height} pixels is too long and narrow: one side is over "
                f"{_NARROWEST} times the other. Cut it into parts."
            )
        width, height = self._rounded(width, height)
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


def _resized_part(
    image: Image, size: tuple[int, int], box: tuple[int, int, int, int], how: _Whole
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
    square = Images.new("RGB", (side, side), colour)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def open_pictures(
    folder: Path,
    spec: PicturesSpec,
    vision: VisionSpec | GridSpec,
    placeholder: str,
    instead: Mapping[str, Any] | None = None,
) -> Pictures:
    """What a model's folder says of pictures. Raises ModelError for what isn't built.

    instead: of what the folder says of these keys; ConfigError for others than `MAY_BE_CHOSEN`.
    """
    given = _chosen(_processor(folder), spec.cut, instead or {})
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if given.get(key, True) is not True:
            raise _unbuilt(folder, key, given[key])
    if isinstance(vision, GridSpec):
        cutter, mean, std = _grid(folder, given, vision, placeholder)
    else:
        read = _tiles if spec.cut == "tiles" else _whole
        size = vision.side * vision.patch
        cutter, mean, std = read(folder, given, vision, placeholder, size)
    factor = given.get("rescale_factor", 1 / 255)
    scaling = Scaling(
        _number(folder, "rescale_factor", factor),
        _colours(folder, "image_mean", given.get("image_mean", mean)),
        _colours(folder, "image_std", given.get("image_std", std)),
    )
    return Pictures(placeholder, spec.around, spec.token_id, cutter, scaling)


def _chosen(own: Mapping[str, Any], cut: str, instead: Mapping[str, Any]) -> Mapping[str, Any]:
    """A processor's settings, with those that somebody chose."""
    may = MAY_BE_CHOSEN[cut]
    unknown = [key for key in instead if key not in may]
    if unknown:
        are = f"may say {', '.join(may)}" if may else "have nothing to say"
        raise ConfigError(
            f"mm_processor_kwargs of this kind of model {are}, not {unknown[0]!r}."
            f"{nearest(str(unknown[0]), may)}"
        )
    kept = dict(own)
    if "size" in instead:  # the two say the same
        kept = {key: value for key, value in own.items() if key not in ("min_pixels", "max_pixels")}
    return kept | dict(instead)


_Chosen = tuple[Cutter, tuple[float, ...], tuple[float, ...]]
"""And the means and deviations that are the kind's own."""


def _tiles(
    folder: Path, given: Mapping[str, Any], vision: VisionSpec, placeholder: str, size: int
) -> _Chosen:
    side = _edge(folder, "max_image_size", given.get("max_image_size", {"longest_edge": 364}))
    if side != size:
        raise UnsupportedModelError(
            f"{folder}: its processor cuts tiles of {side} pixels (max_image_size), but its tower "
            f"has positions for {size}. They belong to different models."
        )
    longest = _edge(folder, "size", given.get("size", {"longest_edge": 4 * 364}))
    splits = given.get("do_image_splitting", True) is True
    resample = _resample(folder, given, _LANCZOS)
    return _Tiles(side, longest, resample, splits, vision.tokens, placeholder), _HALF, _HALF


def _whole(
    folder: Path, given: Mapping[str, Any], vision: VisionSpec, placeholder: str, size: int
) -> _Chosen:
    crops = given.get("do_center_crop", vision.class_token) is True
    wanted, crop = given.get("size", {}), given.get("crop_size", size)
    if isinstance(wanted, int):
        wanted = {"shortest_edge": wanted}
    shortest = "shortest_edge" in wanted
    edges = {wanted.get(key, size) for key in ("shortest_edge", "height", "width")}
    if crops:
        edges |= set(crop.values()) if isinstance(crop, Mapping) else {crop}
    if edges != {size} or shortest != crops:
        raise UnsupportedModelError(
            f"{folder}: its processor makes pictures of {wanted} and cuts them to "
            f"{crop if crops else None}, which isn't built for a tower of {size} × {size} pixels."
        )
    mean, std = (_CLIP_MEAN, _CLIP_STD) if vision.class_token else (_HALF, _HALF)
    pads = None
    if given.get("do_pad", False) is True:
        own = _colours(folder, "image_mean", given.get("image_mean", mean))
        pads = tuple(int(value * 255) for value in own)
    resample = _resample(folder, given, _BICUBIC)
    return _Whole(size, shortest, pads, resample, vision.tokens, placeholder), mean, std


def _grid(folder: Path, given: Mapping[str, Any], vision: GridSpec, placeholder: str) -> _Chosen:
    fold = vision.projector.fold
    own = {"patch_size": vision.patch, "merge_size": fold, "temporal_patch_size": vision.frames}
    for key, value in own.items():
        if given.get(key, value) != value:
            raise UnsupportedModelError(
                f"{folder}: its processor's {key} is {given[key]!r}, its tower's {value}. They "
                "belong to different models."
            )
    size = given.get("size") or {}
    least = given.get("min_pixels") or size.get("shortest_edge", 56 * 56)
    most = given.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)
    if type(least) is not int or type(most) is not int or not 0 < least <= most:
        raise _unbuilt(folder, "size", {"min_pixels": least, "max_pixels": most})
    resample = _resample(folder, given, _BICUBIC)
    cutter = _Grid(vision.patch * fold, least, most, resample, placeholder)
    return cutter, *((_HALF, _HALF) if vision.table_side else (_CLIP_MEAN, _CLIP_STD))


def _processor(folder: Path) -> Mapping[str, Any]:
    """What `preprocessor_config.json`, or the newer `processor_config.json`, says of pictures."""
    newer = folder / "processor_config.json"
    found = read_json(newer).get("image_processor") if newer.is_file() else None
    if found is None:
        file = folder / "preprocessor_config.json"
        if not file.is_file():
            raise ModelNotFoundError(
                f"{folder} has no preprocessor_config.json, which says how this model's pictures "
                "are cut. Download it with the model."
            )
        found = read_json(file)
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"{newer}: image_processor must be an object: {found!r:.80}")
    return found


def _edge(folder: Path, key: str, given: Any) -> int:
    edge = given.get("longest_edge") if isinstance(given, Mapping) else given
    if type(edge) is not int or not 0 < edge <= 1 << 16:
        raise _unbuilt(folder, key, given)
    return edge


def _number(folder: Path, key: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise _unbuilt(folder, key, given)
    return float(given)


def _colours(folder: Path, key: str, given: Any) -> tuple[float, ...]:
    if not isinstance(given, list | tuple) or len(given) != 3:
        raise _unbuilt(folder, key, given)
    found = tuple(_number(folder, key, value) for value in given)
    if key == "image_std" and 0.0 in found:
        raise _unbuilt(folder, key, given)
    return found


def _resample(folder: Path, given: Mapping[str, Any], default: int) -> int:
    found = given.get("resample", default)
    if type(found) is not int or not 0 <= found <= 5:
        raise _unbuilt(folder, "resample", found)
    return found


def _unbuilt(folder: Path, key: str, given: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{folder}: its processor's {key} is {given!r:.80}, which isn't built for this family."
    )
