"""Structures, compiled once and kept: what a request asks for becomes a state of its own."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import BusyError, InvalidSamplingError, RequestError
from penstock.grammar.matcher import build_matcher
from penstock.grammar.probe import check_steps
from penstock.grammar.refusal import Refusal, as_error
from penstock.grammar.source import Source, source_of
from penstock.grammar.state import GrammarState
from penstock.grammar.vocabulary import Vocabulary
from penstock.grammar.worker import Worker
from penstock.sampling.structured import StructuredOutputs
from penstock.tokenizer import Tokenizer, VocabMap

if TYPE_CHECKING:
    import llguidance

_GROWTH: Final = 64
"""What a compiled form takes of memory for each byte of its source, about: 12 of choices, 75 of
schemas with thousands of properties."""
_MEASURED: Final = 4096
"""Of the last compilations, whose times are kept."""

DEADLINE_S: Final = 5.0
"""Of one compilation, for whoever waits. The slowest of 5,707 real schemas takes half of it, on a
machine that does nothing else."""

_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """What the cache has done since it was made."""

    hits: int  # found compiled, refusals that were remembered among them
    misses: int  # compiled
    refused: int  # of the misses
    entries: int
    nbytes: int  # of the entries' sources
    compile_s: tuple[float, ...]  # of the last misses

    def percentile(self, percent: float) -> float | None:
        """Of the seconds that compilations took; None before the first."""
        return float(np.percentile(self.compile_s, percent)) if self.compile_s else None


_Key = tuple[object, ...]


def _key(spec: StructuredOutputs) -> _Key:
    return (spec.kind, spec.text, spec.disable_any_whitespace, spec.whitespace_pattern)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is compiled, or being compiled."""

    future: Future[_Compiled]
    until: float  # the moment up to which it is waited for


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher that is only ever copied, or why there is none."""

    matcher: llguidance.LLMatcher | None
    refusal: str
    nbytes: int


class Grammars:
    """Compiles and keeps structures for one model's vocabulary. Any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        vocab_map: VocabMap | None = None,
        *,
        max_entries: int = 512,
        max_bytes: int = 512 << 20,
        deadline_s: float = DEADLINE_S,
        at_once: int = _AT_ONCE,
    ) -> None:
        """max_entries, max_bytes: kept at most, by an estimate of their memory; those used
        longest ago go first.

        deadline_s: after it a request is refused, while the compilation goes on for the next that
        asks; at_once: compilations, beside some that are late.
        """
        self.vocabulary = Vocabulary(tokenizer, vocab_size, eos_token_ids, vocab_map)
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._deadline_s, self._worker = deadline_s, Worker(at_once, deadline_s)
        self._kept: OrderedDict[_Key, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = self._refused = self._nbytes = 0
        self._times: deque[float] = deque(maxlen=_MEASURED)

    def start(self, spec: StructuredOutputs) -> GrammarState:
        """A fresh state. Raises InvalidSamplingError for what can't be followed."""
        matcher = self._matcher(spec)

        def fresh() -> GrammarState:
            self._forget(_key(spec), matcher)
            return self.start(spec)

        return GrammarState(matcher.deep_copy(), self.vocabulary, fresh=fresh)

    def compile(self, spec: StructuredOutputs) -> None:
        """See that `start` will be fast. Raises InvalidSamplingError for what can't be followed."""
        self._matcher(spec)

    def stats(self) -> GrammarStats:
        """What has been done so far."""
        with self._lock:
            return GrammarStats(
                self._hits,
                self._misses,
                self._refused,
                len(self._kept),
                self._nbytes,
                tuple(self._times),
            )

    def _matcher(self, spec: StructuredOutputs) -> llguidance.LLMatcher:
        key = _key(spec)
        with self._lock:
            entry = self._kept.get(key)
            found = entry is not None
            if entry is None:
                entry = self._kept[key] = _Entry(Future(), time.monotonic() + self._deadline_s)
                self._misses += 1
            else:
                self._hits += 1
            self._kept.move_to_end(key)
        if not found:
            self._begin(key, spec, entry.future)
        try:
            compiled = entry.future.result(max(0.0, entry.until - time.monotonic()))
        except TimeoutError as error:
            raise InvalidSamplingError(
                f"structured_outputs.{spec.kind} takes longer than {self._deadline_s:g} s to "
                "compile. That goes on, so ask again in a while, or make it simpler."
            ) from error
        if compiled.matcher is None:
            raise InvalidSamplingError(compiled.refusal)
        return compiled.matcher

    def _begin(self, key: _Key, spec: StructuredOutputs, future: Future[_Compiled]) -> None:
        """Have it compiled for everyone who waits for this future."""
        try:
            if self._worker.run(lambda: self._fulfil(key, spec, future), self._deadline_s):
                return
            raise BusyError(
                f"structured_outputs.{spec.kind} can't be compiled now, for the compiler is busy: "
                f"{self._worker.num_late} others have taken longer than {self._deadline_s:g} s and "
                "go on. Ask again in a while."
            )
        except BaseException as error:
            self._fail(key, future, error)
            raise

    def _fail(self, key: _Key, future: Future[_Compiled], error: BaseException) -> None:
        """Whoever waits gets it too; the next one tries again."""
        with self._lock:
            self._kept.pop(key, None)
        future.set_exception(error)

    def _fulfil(self, key: _Key, spec: StructuredOutputs, future: Future[_Compiled]) -> None:
        """Compile, and keep what comes of it."""
        start = time.perf_counter()
        try:
            compiled = self._compile(spec)
        except BaseException as error:
            self._fail(key, future, error)
            return
        taken = time.perf_counter() - start
        with self._lock:
            self._times.append(taken)
            self._refused += compiled.matcher is None
            self._nbytes += compiled.nbytes
            future.set_result(compiled)
            self._make_room()

    def _forget(self, key: _Key, matcher: llguidance.LLMatcher) -> None:
        """The next that asks gets a fresh one."""
        with self._lock:
            entry = self._kept.get(key)
            if (
                entry is not None
                and entry.future.done()
                and entry.future.result().matcher is matcher
            ):
                self._nbytes -= self._kept.pop(key).future.result().nbytes

    def _make_room(self) -> None:
        """Let go of what was used longest ago; what is being compiled stays."""
        for key in list(self._kept):
            if len(self._kept) <= self._max_entries and self._nbytes <= self._max_bytes:
                return
            if self._kept[key].future.done():
                self._nbytes -= self._kept.pop(key).future.result().nbytes

    def _compile(self, spec: StructuredOutputs) -> _Compiled:
        nbytes = _GROWTH * len(spec.text.encode("utf-8", "surrogatepass"))
        try:
            return _Compiled(self._build(spec), "", nbytes)
        except Refusal as refusal:
            reason = refusal
        except RecursionError:
            reason = Refusal("its parts lie too deep within each other")
        message = str(as_error(spec, reason))
        return _Compiled(None, message, len(message.encode()) + nbytes)

    def _build(self, spec: StructuredOutputs) -> llguidance.LLMatcher:
        source = source_of(spec, self.vocabulary)
        matcher = self._build_one(source)
        for place, part in source.parts.items():
            self._try(part, place)
        return matcher

    def _try(self, source: Source, place: str) -> None:
        """Raises Refusal where a part would break a text off."""
        matcher = build_matcher(self.vocabulary, source.text, source.fuel)
        if matcher.is_error():
            return  # it may be left out: the whole has been compiled
        try:
            check_steps(GrammarState(matcher, self.vocabulary), self.vocabulary, source.steps)
        except Refusal as refusal:
            raise refusal.at(place) from refusal

    def _build_one(self, source: Source) -> llguidance.LLMatcher:
        """A matcher that has been tried out."""
        matcher = build_matcher(self.vocabulary, source.text, source.fuel)
        if detail := matcher.get_error():
            reason, place, detail = source.explain(detail)
            raise Refusal(reason, place, detail)
        state = GrammarState(matcher.deep_copy(), self.vocabulary)
        bits = np.zeros(self.vocabulary.words, dtype=np.int32)
        try:
            state.fill(bits)
        except RequestError as error:
            raise Refusal(
                "no token of the model can begin it", detail=state.failure or str(error)
            ) from error
        for token in self.vocabulary.eos_token_ids:
            bits[token // 32] &= ~np.int32(1 << token % 32) if token % 32 < 31 else 0x7FFFFFFF
        if bits.any():
            if source.steps:
                check_steps(state, self.vocabulary, source.steps)
            return matcher
        if state.may_end:
            raise Refusal("nothing but the empty text follows it, so nothing would be written")
        raise Refusal("no token of the model can begin it")
