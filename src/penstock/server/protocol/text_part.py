"""A part of a message's content that is text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from penstock.server.protocol.common import Body, CacheControl
from penstock.server.validation import refusal

TEXT_PARTS = ("text", "input_text", "output_text")


class TextPart(Body):
    """A part of a message's content.

    holds: kinds of parts that are read, and which of the fields each has; why: what is said of
    others.
    """

    holds: ClassVar[Mapping[str, str]] = dict.fromkeys(TEXT_PARTS, "text")
    why: ClassVar[str] = "Only text is read."
    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    logprobs: list[Any] | None = None  # of an earlier answer that is sent back: nothing to read
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
        (
            "image_url", "input_audio", "file", "video_url", "audio_url", "image", "annotations",
            "citations",
        ), ()
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        """Before its fields, which are another kind's."""
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in cls.holds:
            raise refusal(kind=f"Content of type {kind[:40]!r}", why=cls.why)
        return data

    @model_validator(mode="after")
    def _has_its_own(self) -> Self:
        own = self.holds[self.type]
        if getattr(self, own) is None:
            raise ValueError(f"a part of type {self.type!r} has no {own}")
        for name in self.holds.values():
            if name != own and getattr(self, name) is not None:
                raise ValueError(f"a part of type {self.type!r} has no {name}, but one is given")
        return self

    def read(self) -> str:
        """Its text."""
        return self.text or ""
