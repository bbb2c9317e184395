"""Pictures as callers give them: bytes, files, data URLs, Pillow's images, arrays."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidPromptError, MissingExtraError, get_extra

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 64_000_000
"""Of a picture; more would take gigabytes to unpack."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def open_picture(given: Any) -> Image:
    """A picture in RGB: upright, what is transparent on white.

    given: a path, a `data:` URL, the bytes of a file, one of Pillow's images, or an array
    [H, W, 3] of bytes. Raises InvalidPromptError for what isn't a picture, or too large a one.
    """
    images = pillow()
    if isinstance(given, images.Image):
        return _rgb(given)
    if isinstance(given, np.ndarray):
        return _rgb(_of_array(given))
    if isinstance(given, str) and given.startswith("data:"):
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
    return _rgb(image)


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


def _rgb(image: Image) -> Image:
    width, height = image.size
    if width * height > MOST_PIXELS or not width * height:
        raise InvalidPromptError(
            f"A picture has {width:,} × {height:,} pixels; from 1 to {MOST_PIXELS:,} can be read. "
            "Make it smaller."
        )
    from PIL import Image as Images
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            seen = image.convert("RGBA")
            image = Images.new("RGBA", seen.size, (255, 255, 255, 255))
            image.alpha_composite(seen)
        return image.convert("RGB")
    except Exception as error:  # of a file that ends too soon, say
        raise InvalidPromptError(f"A picture can't be read: {error}.") from error
