"""Pictures as callers give them: bytes, files, data URLs, Pillow's images, arrays."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidPromptError, MissingExtraError, get_extra

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 64_000_000
"""Of a picture; more would take gigabytes to unpack."""
MOST_EDGE = 65_535
"""Pixels of a side, as of a JPEG; to resize a longer one would take gigabytes."""
MOST_OF_ALL = 256_000_000
"""Pixels of a request's pictures together: a file of some bytes may have millions."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def open_pictures_of(given: Sequence[Any]) -> Iterator[Image]:
    """A request's pictures as `open_picture` gives them, one at a time.

    All are looked at before the first is unpacked: InvalidPromptError where together they are too
    large.
    """
    found = [_opened(one) for one in given]
    pixels = sum(image.size[0] * image.size[1] for image in found)
    if pixels > MOST_OF_ALL:
        raise InvalidPromptError(
            f"{len(found)} pictures have {pixels:,} pixels together; at most {MOST_OF_ALL:,} of a "
            "request are unpacked. Make them smaller, or send fewer."
        )
    return (_rgb(image) for image in found)


def open_picture(given: Any) -> Image:
    """A picture in RGB: upright, what is transparent on white.

    given: a path, a `data:` URL, the bytes of a file, one of Pillow's images, or an array
    [H, W, 3] of bytes. Raises InvalidPromptError for what isn't a picture, or too large a one.
    """
    return _rgb(_opened(given))


def _opened(given: Any) -> Image:
    """A picture whose size is known and allowed; a file's isn't unpacked yet."""
    images = pillow()
    if isinstance(given, images.Image):
        return _checked(given)
    if isinstance(given, np.ndarray):
        return _checked(_of_array(given))
    if isinstance(given, str) and is_data(given):
        given = data_url(given)
    elif isinstance(given, str | Path):
        given = _file(given)
    if not isinstance(given, bytes | bytearray):
        raise InvalidPromptError(
            f"A picture must be a file, a data: URL, bytes, an image of Pillow's or an array, not "
            f"{type(given).__name__}."
        )
    try:
        image = images.open(io.BytesIO(given), formats=_FORMATS)
    except images.UnidentifiedImageError as error:
        raise InvalidPromptError(
            f"{len(given):,} bytes aren't a picture that is read: {', '.join(_FORMATS)}."
        ) from error
    except Exception as error:  # whatever a broken file makes a decoder raise
        raise InvalidPromptError(f"A picture can't be read: {error}.") from error
    return _checked(image)


def is_data(url: str) -> bool:
    """Whether a URL holds what it stands for."""
    return url[:5].lower() == "data:"


def pillow() -> Any:
    """Pillow's module of images. Raises MissingExtraError where it isn't installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(f"Reading pictures needs Pillow; {get_extra('vision')}.") from error
    return Image


def data_url(url: str) -> bytes:
    """The bytes of a `data:` URL in base64."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidPromptError(
            f"A picture's data: URL must look like data:image/png;base64,…, not {url[:40]!r}."
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidPromptError(f"A picture's data: URL isn't base64: {error}.") from error


def _file(given: str | Path) -> bytes:
    name = str(given)
    if name.startswith(("http:", "https:")):
        raise InvalidPromptError(
            f"A picture at {name[:60]!r} isn't fetched. Download it, and give its file, or a data: "
            "URL."
        )
    try:
        return Path(name.removeprefix("file://")).read_bytes()
    except (OSError, ValueError) as error:  # or a NUL in its name
        raise InvalidPromptError(f"A picture can't be read: {error}.") from error


def _of_array(given: np.ndarray) -> Image:
    if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3 or 0 in given.shape:
        raise InvalidPromptError(
            f"A picture's array must be uint8 [height, width, 3], not {given.dtype} "
            f"{list(given.shape)}."
        )
    found: Image = pillow().fromarray(given)
    return found


def _checked(image: Image) -> Image:
    width, height = image.size
    if width * height > MOST_PIXELS or not width * height:
        raise InvalidPromptError(
            f"A picture has {width:,} × {height:,} pixels; from 1 to {MOST_PIXELS:,} can be read. "
            "Make it smaller."
        )
    if max(width, height) > MOST_EDGE:
        raise InvalidPromptError(
            f"A picture has {width:,} × {height:,} pixels; a side has at most {MOST_EDGE:,}. Make "
            "it smaller, or cut it into parts."
        )
    return image


def _rgb(image: Image) -> Image:
    from PIL import Image as Images
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow's own conversion cuts off what is over 255
            image = Images.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
        if image.has_transparency_data:
            seen = image.convert("RGBA")
            image = Images.new("RGBA", seen.size, (255, 255, 255, 255))
            image.alpha_composite(seen)
        if image.mode not in ("I", "F"):
            return image.convert("RGB")
    except Exception as error:  # of a file that ends too soon, say
        raise InvalidPromptError(f"A picture can't be read: {error}.") from error
    raise InvalidPromptError(
        f"A picture's pixels are numbers of 32 bits ({image.mode}), whose black and white nobody "
        "says. Save it with 8 or 16 bits a channel."
    )
