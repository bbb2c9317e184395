"""How what can't be followed is refused: the place, the reason, the library's words, a way out."""

from __future__ import annotations

from penstock.errors import InvalidSamplingError
from penstock.sampling.structured import StructuredOutputs

_WAYS_OUT = {
    "json": "Change that part of the schema, or leave it out.",
    "json_object": "Change whitespace_pattern, or leave it out.",
    "regex": "Write it in Rust's regex syntax, without look-around and back-references.",
    "choice": "Offer fewer choices, or others.",
    "grammar": "Correct the grammar there, or make it simpler.",
    "structural_tag": "Correct that part of the tag.",
}


class Refusal(Exception):  # noqa: N818 — it becomes an error once its kind is known
    """A reason why something can't be followed, and the place in it."""

    def __init__(self, reason: str, place: str = "", detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place
        self.detail = detail

    def at(self, before: str) -> Refusal:
        """The same, of a part that lies at `before`."""
        return Refusal(self.reason, before + self.place, self.detail)


def as_error(spec: StructuredOutputs, refusal: Refusal) -> InvalidSamplingError:
    """The error that a request gets."""
    place = f" at {refusal.place}" if refusal.place else ""
    detail = f" (llguidance: {refusal.detail})" if refusal.detail else ""
    return InvalidSamplingError(
        f"structured_outputs.{spec.kind} can't be followed{place}: {refusal.reason}{detail}. "
        f"{_WAYS_OUT[spec.kind]}"
    )


def pointer(path: tuple[str | int, ...]) -> str:
    """A place in a JSON document as RFC 6901 writes it; "#" is the whole."""
    return "#" + "".join("/" + str(one).replace("~", "~0").replace("/", "~1") for one in path)
