"""What a model's folder says of its pictures: `preprocessor_config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, nearest
from penstock.models.gguf.container import is_gguf
from penstock.models.gguf.projector import Projector
from penstock.models.registry import read_json
from penstock.models.spec import PicturesSpec
from penstock.models.vision.cutters import (
    AnyresCutter,
    CanvasCutter,
    FramedCutter,
    GridCutter,
    LineCutter,
    PieceCutter,
    SquareCutter,
    TileCutter,
)
from penstock.models.vision.pictures import Cutter, Pictures, Scaling
from penstock.nn.spec import GridSpec, VisionSpec

MAY_BE_CHOSEN: dict[str, tuple[str, ...]] = {
    "tiles": ("size", "do_image_splitting"),
    "canvas": ("min_patches", "max_patches", "crop_to_patches"),
    "whole": (),
    "framed": (
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    ),
    "anyres": (),
    "grid": ("min_pixels", "max_pixels", "size"),
    "lines": ("size",),
    "pieces": (
        "min_image_tokens",
        "max_image_tokens",
        "min_tiles",
        "max_tiles",
        "do_image_splitting",
        "use_thumbnail",
    ),
}
"""Of each way to cut, what may be chosen otherwise than a model's processor says it."""
_BICUBIC, _BILINEAR, _LANCZOS = 3, 2, 1
_Colours = tuple[tuple[float, ...], tuple[float, ...]]
"""Means and deviations of three channels."""
_HALF: _Colours = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_CLIP: _Colours = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
_ALWAYS = ("do_resize", "do_rescale", "do_normalize")
_STEPS = (
    *_ALWAYS,
    "do_convert_rgb",
    "do_image_splitting",
    "do_center_crop",
    "do_pad",
    "do_pan_and_scan",
)
"""That are known; tiles are never padded: each is whole."""


def open_pictures(
    folder: Path,
    spec: PicturesSpec,
    vision: VisionSpec | GridSpec,
    placeholder: str,
    instead: Mapping[str, Any] | None = None,
    marks: tuple[str, str] = ("", ""),
) -> Pictures:
    """What a model's folder says of pictures, or its projector in GGUF. Raises ModelError for what
    isn't built.

    instead: of what the folder says of these keys; ConfigError for others than `MAY_BE_CHOSEN`.
    marks: the texts of `spec.marks`.
    """
    given = _chosen(_processor(folder), spec.cut, instead or {})
    said = _Said(folder, given, instead or {})
    said.check_steps()
    cutter: Cutter
    if isinstance(vision, GridSpec):
        of_any_size = {"grid": _grid, "pieces": _pieces, "lines": _lines}[spec.cut]
        cutter, (mean, std) = of_any_size(said, vision, placeholder)
    elif spec.cut == "anyres":
        cutter, (mean, std) = _anyres(said, vision, placeholder, spec.shapes)
    elif spec.cut == "framed":
        cutter, (mean, std) = _framed(said, vision, placeholder, marks)
    else:
        read = {"tiles": _tiles, "canvas": _canvas, "whole": _whole}[spec.cut]
        cutter, (mean, std) = read(said, vision, placeholder)
    scaling = Scaling(
        said.number("rescale_factor", 1 / 255),
        said.colours("image_mean", mean),
        said.colours("image_std", std),
    )
    written_id = spec.token_id
    if spec.marks is not None:
        placeholder, written_id = marks[0], spec.marks[0]
    return Pictures(placeholder, spec.around, spec.token_id, written_id, cutter, scaling)


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
    if cut == "pieces":  # transformers' processors over torch take null for what is usual
        kept = {key: value for key, value in own.items() if value is not None}
    if cut == "canvas":
        kept.pop("crop_to_patches", None)  # transformers' processor crops, whatever the file says
    if "size" in instead:  # the two say the same
        kept = {k: v for k, v in kept.items() if k not in ("min_pixels", "max_pixels")}
    return kept | dict(instead)


class _Said(NamedTuple):
    """A processor's settings; methods raise UnsupportedModelError for what isn't built,
    ConfigError where it was chosen.
    """

    folder: Path
    given: Mapping[str, Any]
    chosen: Mapping[str, Any]  # of these, what somebody has chosen

    def check_steps(self) -> None:
        """That nothing is done to pictures but what is done here."""
        for key in _ALWAYS:
            if self.given.get(key, True) is not True:
                raise self.unbuilt(key)
        for key, value in self.given.items():
            if key.startswith("do_") and key not in _STEPS and value:
                raise self.unbuilt(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self.given.get(key)
        if found is not None and type(found) is not bool:
            raise self.unbuilt(key)
        return default if found is None else found

    def edge(self, key: str, default: int) -> int:
        """Pixels of the longer edge."""
        given = self.given.get(key)
        edge = given.get("longest_edge") if isinstance(given, Mapping) else given
        edge = default if given is None else edge
        if type(edge) is not int or not 0 < edge <= 1 << 16:
            raise self.unbuilt(key)
        return edge

    def whole_number(self, key: str, default: int, most: int = 1 << 10) -> int:
        """From 1 to `most`."""
        found = self.given.get(key, default)
        if type(found) is not int or not 0 < found <= most:
            raise self.unbuilt(key, f" (1 to {most:,} are)")
        return found

    def bounds(self, low: str, least: int, high: str, most: int) -> tuple[int, int]:
        """Two whole numbers that are in order."""
        if least > most:
            said = f"{low} {least:,} are more than {high} {most:,}"
            if low in self.chosen or high in self.chosen:
                raise ConfigError(f"mm_processor_kwargs: {said}. Choose both.")
            raise UnsupportedModelError(f"{self.folder}: its processor's {said}.")
        return least, most

    def number(self, key: str, default: float) -> float:
        """Finite."""
        return self._number(key, self.given.get(key, default))

    def _number(self, key: str, found: Any) -> float:
        number = isinstance(found, int | float) and not isinstance(found, bool)
        if not number or not math.isfinite(found):
            raise self.unbuilt(key)
        return float(found)

    def colours(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """One number of each channel."""
        given = self.given.get(key, default)
        if not isinstance(given, list | tuple) or len(given) != 3:
            raise self.unbuilt(key)
        found = tuple(self._number(key, value) for value in given)
        if key == "image_std" and 0.0 in found:
            raise self.unbuilt(key)
        return found

    def resample(self, default: int) -> int:
        """By Pillow's number."""
        found = self.given.get("resample", default)
        if type(found) is not int or not 0 <= found <= 5:
            raise self.unbuilt("resample")
        return found

    def edges(self, key: str) -> Mapping[str, Any]:
        """Named edges, {} where none is said."""
        found = self.given.get(key)
        if found is None:
            return {}
        if not isinstance(found, Mapping) or not all(type(x) is int for x in found.values()):
            raise self.unbuilt(key)
        return found

    def unbuilt(self, key: str, but: str = "") -> UnsupportedModelError | ConfigError:
        """The error of what a setting is. but: what it could be."""
        if key in self.chosen:
            return ConfigError(
                f"mm_processor_kwargs: {key} can't be {self.chosen[key]!r:.80} for this kind of "
                f"model{but}."
            )
        return UnsupportedModelError(
            f"{self.folder}: its processor's {key} is {self.given.get(key)!r:.80}, which isn't "
            f"built for this family{but}."
        )


def _tiles(said: _Said, vision: VisionSpec, placeholder: str) -> tuple[Cutter, _Colours]:
    side = said.edge("max_image_size", 364)
    if side != vision.image_size:
        raise UnsupportedModelError(
            f"{said.folder}: its processor cuts tiles of {side} pixels (max_image_size), but its "
            f"tower is of {vision.image_size}. They belong to different models."
        )
    if not said.flag("return_row_col_info", True):
        raise said.unbuilt("return_row_col_info")
    longest, splits = said.edge("size", 4 * 364), said.flag("do_image_splitting", True)
    tokens, how = vision.tokens, said.resample(_LANCZOS)
    return TileCutter(side, longest, how, splits, tokens, placeholder), _HALF


def _canvas(said: _Said, vision: VisionSpec, placeholder: str) -> tuple[Cutter, _Colours]:
    side = vision.image_size
    size = said.edges("size")
    if size and dict(size) != {"height": side, "width": side}:
        raise UnsupportedModelError(
            f"{said.folder}: its processor's size is {dict(size)}, but its tower is of {side} × "
            f"{side} pixels. They belong to different models."
        )
    least, most = said.whole_number("min_patches", 1), said.whole_number("max_patches", 12)
    said.bounds("min_patches", least, "max_patches", most)
    if not said.flag("crop_to_patches", True):
        least = most = 1
    how = said.resample(_BICUBIC)
    return CanvasCutter(side, least, most, how, vision.tokens, placeholder), _CLIP


def _whole(said: _Said, vision: VisionSpec, placeholder: str) -> tuple[Cutter, _Colours]:
    size = vision.image_size
    crops = said.flag("do_center_crop", vision.class_token)
    number = type(said.given.get("size")) is int
    wanted = {"shortest_edge": said.given["size"]} if number else said.edges("size")
    shortest = "shortest_edge" in wanted
    edges = {wanted.get(key, size) for key in ("shortest_edge", "height", "width")}
    crop = said.given.get("crop_size")
    if crops:
        edges |= {crop} if type(crop) is int else set(said.edges("crop_size").values())
    if edges != {size} or shortest != crops:
        raise UnsupportedModelError(
            f"{said.folder}: its processor makes pictures of {dict(wanted)} and cuts them to "
            f"{crop if crops else None}, which isn't built for a tower of {size} × {size} pixels."
        )
    siglip = "Siglip" in str(said.given.get("image_processor_type", ""))
    colours = _HALF if siglip or not vision.class_token else _CLIP
    pads = None
    if said.flag("do_pad", False):
        pads = tuple(int(value * 255) for value in said.colours("image_mean", colours[0]))
    how = said.resample(_BICUBIC)
    return SquareCutter(size, shortest, pads, how, vision.tokens, placeholder), colours


def _anyres(
    said: _Said, vision: VisionSpec, placeholder: str, shapes: tuple[tuple[int, int], ...]
) -> tuple[Cutter, _Colours]:
    side = vision.image_size
    edges = {*said.edges("size").values(), *said.edges("crop_size").values()}
    if edges - {side}:
        raise UnsupportedModelError(
            f"{said.folder}: its processor cuts tiles of {sorted(edges)} pixels, but its tower is "
            f"of {side} × {side}. They belong to different models."
        )
    given = said.given.get("image_grid_pinpoints")
    if given is not None and given != [list(shape) for shape in shapes]:
        raise UnsupportedModelError(
            f"{said.folder}: its processor's image_grid_pinpoints are {given!r:.80}, which "
            "config.json doesn't say. They belong to different models."
        )
    return AnyresCutter(side, vision.side, shapes, said.resample(_BICUBIC), placeholder), _CLIP


def _framed(
    said: _Said, vision: VisionSpec, placeholder: str, marks: tuple[str, str]
) -> tuple[Cutter, _Colours]:
    side = vision.image_size
    size = said.edges("size") or dict.fromkeys(("height", "width"), 224)
    if dict(size) != {"height": side, "width": side}:
        raise UnsupportedModelError(
            f"{said.folder}: its processor makes pictures of {dict(size)}, but its tower is of "
            f"{side} × {side} pixels. They belong to different models."
        )
    around, how = (f"\n\n{marks[0]}", f"{marks[1]}\n\n"), said.resample(_BILINEAR)
    parts = None
    if said.flag("do_pan_and_scan", False):
        kept = {key: value for key, value in said.given.items() if value is not None}
        asked = said._replace(given=kept)  # null is for what is usual
        parts = (
            asked.whole_number("pan_and_scan_min_crop_size", 256, 1 << 16),
            asked.whole_number("pan_and_scan_max_num_crops", 4),
            asked.number("pan_and_scan_min_ratio_to_activate", 1.2),
        )
    return FramedCutter(side, how, vision.tokens, placeholder, around, parts), _HALF


def _grid(said: _Said, vision: GridSpec, placeholder: str) -> tuple[Cutter, _Colours]:
    fold = vision.projector.fold
    own = {"patch_size": vision.patch, "merge_size": fold, "temporal_patch_size": vision.frames}
    for key, value in own.items():
        if said.given.get(key, value) != value:
            raise UnsupportedModelError(
                f"{said.folder}: its processor's {key} is {said.given[key]!r:.80}, its tower's "
                f"{value}. They belong to different models."
            )
    size = said.edges("size")
    if set(size) - {"shortest_edge", "longest_edge"}:
        raise said.unbuilt("size")
    bounds = []
    for key, name, usual in (
        ("min_pixels", "shortest_edge", 56 * 56),
        ("max_pixels", "longest_edge", 28 * 28 * 1280),
    ):
        found = said.given.get(key)
        bounds.append(size.get(name, usual) if found is None else found)
        if type(bounds[-1]) is not int or bounds[-1] <= 0:
            raise said.unbuilt("size" if found is None else key)
    least, most = bounds
    said.bounds("min_pixels", least, "max_pixels", most)
    how = said.resample(_BICUBIC)
    cutter = GridCutter(vision.patch * fold, least, most, how, placeholder)
    return cutter, _HALF if vision.table_side else _CLIP


def _lines(said: _Said, vision: GridSpec, placeholder: str) -> tuple[Cutter, _Colours]:
    size = said.edges("size") or {"longest_edge": 1024}
    edges = size.get("height", 0), size.get("width", 0)
    if set(size) == {"longest_edge"}:
        edges = size["longest_edge"], size["longest_edge"]
    unit = vision.patch * vision.projector.fold
    if min(edges) <= 0 or max(edges) > 1 << 16 or len(size) > 2:
        raise said.unbuilt("size")
    if said.flag("do_center_crop", False):
        raise said.unbuilt("do_center_crop")
    return LineCutter(unit, edges, said.resample(_BICUBIC), placeholder), _CLIP


def _pieces(said: _Said, vision: GridSpec, placeholder: str) -> tuple[Cutter, _Colours]:
    fold, side = vision.projector.fold, said.whole_number("tile_size", 512)
    own = {"encoder_patch_size": vision.patch, "downsample_factor": fold}
    for key, value in own.items():
        if said.given.get(key, value) != value:
            raise UnsupportedModelError(
                f"{said.folder}: its processor's {key} is {said.given[key]!r:.80}, its tower's "
                f"{value}. They belong to different models."
            )
    if side % (vision.patch * fold):
        raise said.unbuilt("tile_size")
    if said.flag("use_image_special_tokens", True) is False:
        raise said.unbuilt("use_image_special_tokens")
    if said.resample(_BILINEAR) != _BILINEAR:
        raise said.unbuilt("resample")
    shapes = 1, said.whole_number("max_tiles", 10)
    if not said.flag("do_image_splitting", True):
        shapes = 1, 1
    if shapes[1] > 1:
        shapes = said.bounds("min_tiles", said.whole_number("min_tiles", 2), "max_tiles", shapes[1])
    least = said.whole_number("min_image_tokens", 64, 1 << 14)
    most = said.whole_number("max_image_tokens", 256, 1 << 14)
    tokens = said.bounds("min_image_tokens", least, "max_image_tokens", most)
    tolerance, whole = said.number("max_pixels_tolerance", 2.0), said.flag("use_thumbnail", True)
    cutter = PieceCutter(side, vision.patch, fold, shapes, tokens, tolerance, whole, placeholder)
    return cutter, _HALF


def _processor(folder: Path) -> Mapping[str, Any]:
    """What `preprocessor_config.json`, or the newer `processor_config.json`, says of pictures; or a
    projector in GGUF.
    """
    if is_gguf(folder):
        return Projector(folder).processor
    newer = folder / "processor_config.json"
    whole = read_json(newer) if newer.is_file() else {}
    found, around = whole.get("image_processor"), "use_image_special_tokens"
    if isinstance(found, dict) and around in whole:  # LFM2-VL's, beside its own
        found = {**found, around: whole[around]}
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
