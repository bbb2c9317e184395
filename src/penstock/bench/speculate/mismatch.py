"""Whether a draft model's folder is one for its target: the same tokens, the same template.

Nothing is loaded but tokenizers. A draft with other tokens is refused when an engine starts; one
with another template runs, and guesses the text of another conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.bench.finding import Finding
from penstock.errors import ChatTemplateError, TokenizerError
from penstock.models.sources import open_tokenizer
from penstock.tokenizer import Tokenizer

CONVERSATION: Final[tuple[dict[str, str], ...]] = (
    {"role": "user", "content": "Tell me a story about a cat."},
    {"role": "assistant", "content": "A cat saw a bird. The bird flew away."},
    {"role": "user", "content": "And then? Tell me more of the cat and the bird."},
)
"""What templates are compared on: two turns, the last one to be answered."""

_TEXTS: Final = (
    "Once upon a time there was a cat.",
    "  Ünïcode, 3.14 and\n\n\tcode(x) == {'a': [1, 2]} ",
)

_AROUND: Final = 20
"""Characters that are shown of a text from where it differs."""


def folder_findings(target: Path, draft: Path) -> list[Finding]:
    """What doesn't fit of two models' tokenizers and templates."""
    try:
        own, other = open_tokenizer(target), open_tokenizer(draft)
    except (TokenizerError, OSError) as error:
        return [
            Finding("tokenizer", "hint", f"The tokenizers can't be compared: {error}")
        ]  # which an engine that needs them refuses
    return [*token_findings(own, other), *template_findings(own, other)]


def token_findings(target: Tokenizer, draft: Tokenizer) -> list[Finding]:
    """Ids that are other tokens, or texts that are other ids."""
    size = max(target.vocab_size, draft.vocab_size)
    differing = [i for i in range(size) if target.id_to_token(i) != draft.id_to_token(i)]
    if differing:
        first = differing[0]
        return [
            Finding(
                "tokenizer",
                "mismatch",
                f"{len(differing):,} of {size:,} ids are other tokens to the draft model, from id "
                f"{first} on: {draft.id_to_token(first)!r} there, {target.id_to_token(first)!r} "
                "here. Choose a draft of the target's family.",
            )
        ]
    for text in _TEXTS:
        ours, theirs = target.encode(text), draft.encode(text)
        if ours != theirs:
            at = _differ_at(ours, theirs)
            return [
                Finding(
                    "tokenizer",
                    "mismatch",
                    f"Ids mean the same, but the draft model was given texts cut otherwise: "
                    f"{text!r} differs from token {at} on, {theirs[at : at + 4]} there and "
                    f"{ours[at : at + 4]} here. Guesses follow the target's tokens, which the "
                    "draft may never have seen so. Choose a draft with the same tokenizer.",
                )
            ]
    return []


def template_findings(target: Tokenizer, draft: Tokenizer) -> list[Finding]:
    """Whether both templates write the same conversation alike."""
    texts = [rendered(one) for one in (target, draft)]
    ours, theirs = texts
    if ours == theirs or ours is None:
        return []
    if theirs is None:
        words = (
            "The target has a chat template and the draft model has none: it may not have been "
            "trained on conversations, or on others. Choose a draft of the same kind."
        )
        return [Finding("template", "mismatch", words)]
    at = _differ_at(ours, theirs)
    words = (
        f"The chat templates differ from character {at} of a conversation on: the draft model's "
        f"writes {theirs[at : at + _AROUND]!r}, the target's {ours[at : at + _AROUND]!r} behind "
        f"{ours[max(at - _AROUND, 0) : at]!r}. The draft was trained on other turns than it is "
        "given. Choose a draft of the target's family, or train it on the target's template."
    )
    return [Finding("template", "mismatch", words)]


def rendered(tokenizer: Tokenizer) -> str | None:
    """The conversation by a folder's own template; None where it has none or fails."""
    if tokenizer.chat_template is None:
        return None
    try:
        return tokenizer.apply_chat_template(CONVERSATION)
    except ChatTemplateError as error:
        return f"an error: {error}"


def _differ_at(one: Sequence[object], other: Sequence[object]) -> int:
    """The first place where two sequences aren't the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
