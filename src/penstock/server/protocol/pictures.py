"""Pictures among a message's parts, as three APIs write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from penstock.models.vision.opening import is_data
from penstock.server.protocol.common import Body
from penstock.server.protocol.text_part import TextPart
from penstock.server.validation import refusal

IMAGE_PARTS = ("image_url", "input_image")
_DATA = "data:"
_FETCH = "Nothing is fetched here: send the picture itself, as data:image/png;base64,…"


def _check_url(url: str) -> str:
    if not is_data(url):
        raise refusal(kind=f"A picture at {url[:40]!r}", why=_FETCH, shows=True)
    return url


class ImageUrl(Body):
    """Where a picture is."""

    url: str
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"detail": ("auto",)}

    @model_validator(mode="after")
    def _is_here(self) -> ImageUrl:
        _check_url(self.url)
        return self


class ContentPart(TextPart):
    """A part of a message's content: text, or a picture."""

    holds: ClassVar[Mapping[str, str]] = {
        **TextPart.holds,
        **dict.fromkeys(IMAGE_PARTS, "image_url"),
    }
    why: ClassVar[str] = "Text and pictures are read."
    image_url: ImageUrl | str | None = None
    # of an answer's message that is sent back with all that it had beside its text, which says it
    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("function_call", "reasoning", "reasoning_content", "refusal", "role", "tool_calls"), ""
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: x for name, x in TextPart.unsupported.items() if name != "image_url"},
        "detail": ("auto",),
        "file_id": (),
        "uuid": (),
    }

    @model_validator(mode="after")
    def _is_here(self) -> ContentPart:
        if isinstance(self.image_url, str):
            _check_url(self.image_url)
        return self

    @property
    def picture(self) -> str | None:
        """The `data:` URL of the picture that it is."""
        url = self.image_url
        return url.url if isinstance(url, ImageUrl) else url


class ImageSource(Body):
    """Where a block's picture is, in Anthropic's words."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _is_here(self) -> ImageSource:
        if self.type != "base64":
            what = f"A source of type {self.type[:40]!r}"
            raise refusal(kind=what, why="base64 is read.", shows=True)
        if self.data is None or self.media_type is None:
            raise ValueError("a source of type 'base64' has media_type and data")
        if self.url is not None:
            raise ValueError("a source of type 'base64' has no url, but one is given")
        return self

    def part(self) -> ContentPart:
        """The same as a chat's part."""
        url = f"{_DATA}{self.media_type};base64,{self.data}"
        return ContentPart(type="image_url", image_url=ImageUrl(url=url))
