"""What is new in a request's samples since they were last looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.engine import CompletionOutput, RequestOutput
from penstock.sampling import TokenLogprobs
from penstock.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class Delta:
    """New text and tokens of one sample."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class _Seen:
    characters: int = 0
    tokens: int = 0
    finished: bool = False


@dataclass(slots=True)
class Reader:
    """Turns outputs, each of which holds everything so far, into deltas."""

    first_index: int = 0  # of the samples
    _seen: dict[int, _Seen] = field(default_factory=dict)

    @property
    def started(self) -> bool:
        """Whether anything was read."""
        return bool(self._seen)

    def read(self, output: RequestOutput) -> Iterator[Delta]:
        """The samples that have something new, or have ended."""
        for sample in output.outputs:
            seen = self._seen.get(sample.index)
            if seen is None:
                seen = self._seen[sample.index] = _Seen()
            count = len(sample.token_ids)
            if seen.finished or (count == seen.tokens and sample.finish_reason is None):
                continue
            text = sample.text
            yield Delta(
                self.first_index + sample.index,
                text[seen.characters :],
                sample.token_ids[seen.tokens :],
                None if sample.logprobs is None else sample.logprobs[seen.tokens :],
                sample.finish_reason,
                sample.stop_reason,
            )
            seen.characters, seen.tokens = len(text), count
            seen.finished = sample.finish_reason is not None


def whole(sample: CompletionOutput, first_index: int = 0) -> Delta:
    """All of a sample that has ended."""
    return Delta(
        first_index + sample.index,
        sample.text,
        sample.token_ids,
        sample.logprobs,
        sample.finish_reason,
        sample.stop_reason,
    )


class TokenNames:
    """How log-probabilities name their tokens."""

    def __init__(
        self, tokenizer: Tokenizer | None, as_ids: bool, shows_special: bool = False
    ) -> None:
        """shows_special: whether an answer's text has its special tokens."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._shows_special = shows_special

    def name(self, token: int) -> str:
        """As text, or `token_id:17`."""
        return f"token_id:{token}" if self._as_ids else self._text(token)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def count(self, text: str) -> int:
        """How many tokens a text has; 0 without a tokenizer."""
        if self._tokenizer is None:
            return 0
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def width(self, ids: Iterable[int]) -> int:
        """Characters that tokens have in an answer's text."""
        return sum(self._width(token, None, 0) for token in ids)

    def _width(self, token: int, text: str | None, at: int) -> int:
        """Characters of one token in an answer's text, or in `text` from `at` on."""
        shown = self._text(token)
        if self._tokenizer is None or token not in self._tokenizer.special_ids:
            return len(shown)
        there = self._shows_special if text is None else text.startswith(shown, at)
        return len(shown) if there else 0

    def data(self, token: int) -> list[int] | None:
        """Its bytes."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))

    def chat(self, entries: list[TokenLogprobs], top: int) -> dict[str, Any]:
        """As chat completions write them."""
        return {"content": [self._position(entry, top) for entry in entries], "refusal": None}

    def _position(self, entry: TokenLogprobs, top: int) -> dict[str, Any]:
        items = [self._token(token, found.logprob) for token, found in entry.items()]
        best = sorted(entry, key=lambda token: entry[token].rank)[:top]
        return {
            **items[0],
            "top_logprobs": [self._token(token, entry[token].logprob) for token in best],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token), "logprob": finite(logprob), "bytes": self.data(token)}

    def legacy(
        self,
        ids: list[int],
        entries: list[TokenLogprobs | None],
        top: int,
        offset: int,
        text: str | None = None,
    ) -> dict[str, Any]:
        """As completions write them; `offset` of the first token in the answer's text.

        text: of a prompt, where these are its tokens; it may lack the special ones.
        """
        offsets = []
        for token in ids:
            offsets.append(offset)
            offset += self._width(token, text, offset)
        chosen: list[float | None] = []
        best: list[dict[str, float] | None] = []
        for token, entry in zip(ids, entries, strict=True):
            if entry is None:  # a prompt's first token has nothing before it
                chosen.append(None)
                best.append(None)
                continue
            own = finite(entry[token].logprob)
            chosen.append(own)
            ranked = sorted(entry, key=lambda x: entry[x].rank)[:top]
            shown = {self.name(x): finite(entry[x].logprob) for x in ranked}
            if token not in ranked:  # it is always among them, as one more
                shown.setdefault(self.name(token), own)
            best.append(shown)
        return {
            "tokens": [self.name(token) for token in ids],
            "token_logprobs": chosen,
            "top_logprobs": best,
            "text_offset": offsets,
        }


def prompt_logprobs(entries: list[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """As vLLM writes them: by token id."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token, found in entry.items()
        }
        for entry in entries
    ]


def finite(logprob: float) -> float:
    """A log-probability that JSON can write."""
    return max(logprob, LOWEST_LOGPROB)
