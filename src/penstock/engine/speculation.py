"""Speculation in the engine: who gets a draft, what becomes of it, and what it leaves behind.

Two points of a step. Before scheduling, `propose` gives sequences drafts; a scheduled one brings
1 + len(draft) tokens, and the sampler draws one for each of those rows. After it, `right` says how
many guesses were drawn as well: these the sequence goes on with, and the token drawn after them.
What the others have left in the cache is written again before anything reads it, and blocks
that hold nothing else are given back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from penstock.cache import most_recent_blocks
from penstock.config import EngineConfig
from penstock.engine.plan import Part, Plan
from penstock.engine.proposers import proposer_of
from penstock.engine.request import Sequence, Status
from penstock.engine.scheduler import Scheduler
from penstock.errors import ConfigError
from penstock.roofline import StepRecord
from penstock.runtime import Runtime
from penstock.speculate import (
    ROOT,
    Computed,
    Controller,
    Draft,
    DraftCounts,
    Learner,
    Proposer,
    Record,
    StateReader,
    Wish,
    followed,
)

logger = logging.getLogger("penstock")


class Speculation:
    """One engine's guesses."""

    def __init__(self, proposer: Proposer, controller: Controller, scheduler: Scheduler) -> None:
        self.proposer = proposer
        self.controller = controller
        self.counts = DraftCounts()
        self.broken: Exception | None = None  # why there are no guesses any more
        self.draft_s = 0.0  # what guessing took in this step; nothing where nobody was asked to
        self._settle_s = 0.0  # and what comparing guesses with what came did
        self._watch_s = 0.0  # and what keeping states did, while drafts are off
        self._unpaid_s = 0.0  # the same, of steps with prompts too, since one was learned from
        self._scheduler = scheduler
        self._records: dict[Sequence, dict[int, Record]] = {}  # by kind of draft
        # of this step, whether verified or not
        self._guesses: dict[Sequence, _Guess] = {}
        self.on_verified: Callable[[Sequence, Draft, list[int], Seq[int]], None] | None = None
        """Is told of each draft with what was right of it, and what was drawn for its rows."""
        self._came_true: dict[Sequence, list[int]] = {}  # of this step: places of guesses
        self._reserved: list[Sequence] = []
        self._right = 0  # guesses of this step that came true
        self._rest = 0  # steps that come without guesses, and aren't learned from
        self._rests = False  # whether this is one of them
        self._expects = False  # whether its guesses are only those that callers expect

    @property
    def proposer(self) -> Proposer:
        """Who guesses; another one may take its place between steps."""
        return self._proposer

    @proposer.setter
    def proposer(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._reader = proposer if isinstance(proposer, StateReader) else None
        self._learner = proposer if isinstance(proposer, Learner) else None

    @classmethod
    def of(cls, config: EngineConfig, runtime: Runtime, scheduler: Scheduler) -> Speculation | None:
        """What a configuration asks for; None where it doesn't."""
        asked = config.speculative
        if asked is None:
            return None
        proposer = proposer_of(config, runtime)
        most = asked.num_speculative_tokens
        assert most is not None  # the configuration has filled it in
        controller = Controller(
            most,
            adaptive=asked.adaptive,
            by_passes=proposer.by_passes,
            tree_tokens=asked.most_tokens,
            most_sequences=asked.disable_by_batch_size,
            watched=proposer.wants if isinstance(proposer, StateReader) else 0,
        )
        if asked.width > 1:
            _check_trees(runtime)
        if runtime.runner.recent is not None:
            _check_recent(config, runtime, most)
            runtime.runner.recent.unsure = most
        return cls(proposer, controller, scheduler)

    def stats(self) -> dict[str, Any]:
        """Counters, under the names that the engine's have."""
        counts = self.counts
        return {
            "spec_decode_num_drafts": counts.drafts,
            "spec_decode_num_draft_tokens": counts.draft_tokens,
            "spec_decode_num_accepted_tokens": counts.accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": counts.per_position(self.controller.most),
            "spec_decode_on": self.broken is None and self.controller.is_on,
        }

    # ── before scheduling ────────────────────────────────────────────────────────────────────

    def propose(self) -> None:
        """Give drafts to sequences that decode."""
        self.draft_s, self._settle_s, self._watch_s, self._right = 0.0, 0.0, 0.0, 0
        self._rests, self._expects = self._rest > 0, False
        if self._rests:
            self._rest -= 1
            if not any(s.expected is not None for s in self._scheduler.running):
                return
        if self.broken is not None:
            return
        start = time.perf_counter()
        decoding = [s for s in self._scheduler.running if s.is_decoding]
        # what comes next may depend on more than the tokens
        able = [
            s
            for s in decoding
            if not (s.mates or (p := s.request.params).mirostat or p.logits_processors)
        ]
        self.controller.mixed = len(able) < len(decoding)
        if not able:
            self.controller.drop_look()
            return
        try:
            if (
                self._rests
                or not self.controller.may_guess(len(decoding))
                or self.controller.waits()
            ):
                able = self._expecting(able, len(decoding))
                if not able:
                    return
            self._propose(able, len(decoding), start)
        except Exception as error:  # guesses may fail, but not the requests
            self._give_up(error)
            for sequence in able:
                sequence.draft = None
        self.draft_s = time.perf_counter() - start

    def _expecting(self, able: list[Sequence], batch: int) -> list[Sequence]:
        """Those whose callers have said what comes next: they needn't wait for a look."""
        found = [s for s in able if s.expected is not None and s.expected.is_due(s.tokens)]
        if not found or not self.controller.may_guess(batch, expected=True):
            return []
        self._rests, self._expects = False, True
        return found

    def _give_up(self, error: Exception) -> None:
        if self.broken is None:
            logger.error("Speculation has failed and is off from here on.", exc_info=error)
            self.broken = error

    def _propose(self, able: list[Sequence], batch: int, start: float) -> None:
        """Give drafts to those that are `able` to have them, of `batch` that decode."""
        room = {s: most for s in able if (most := self._room(s)) > 0}
        self._reserved = list(room)
        control = self.controller
        if room and control.by_passes:
            records = [self._record(s, 0) for s in room]
            wanted = control.choose(batch, records, list(room.values()))
            room = dict(zip(room, wanted, strict=True))
        wishes = {s: _wish(s, most) for s, most in room.items() if most}
        if not wishes:
            control.saw_guesses(found=False)
            return
        drafts = self.proposer.propose(list(wishes.values()))
        found = {s: draft for s, draft in zip(wishes, drafts, strict=True) if draft.tokens}
        control.saw_guesses(bool(found))
        passes = max(wish.limit for wish in wishes.values())
        if found or self._reader is None:  # or it hadn't seen what it guesses by
            # a guess that was right is one to catch up
            catches_up = self.proposer.last_caught_up > len(wishes)
            see = control.saw_catching_up if catches_up else control.saw_drafting
            see(passes, time.perf_counter() - start)
        if not found:
            return
        self._guesses = {s: _Guess.of(len(s.tokens), d) for s, d in found.items()}
        lengths = [len(draft) for draft in found.values()]
        chances = [draft.chances for draft in found.values()]
        if not control.by_passes:
            kinds = [draft.kind for draft in found.values()]
            records = [self._record(s, draft.kind) for s, draft in found.items()]
            lengths = control.choose(batch, records, lengths, kinds, chances)
        elif any(chances):
            lengths = control.cut(batch, chances)
        for (sequence, draft), length in zip(found.items(), lengths, strict=True):
            if sequence.expected is not None and draft.is_expected:
                sequence.expected.judge(control.is_on)
            sequence.draft = draft
            if sequence.shorten_draft(length) and draft.parents is not None:
                self._scheduler.reservations.reserve_ways(sequence)

    def _room(self, sequence: Sequence) -> int:
        """How many tokens its draft may have; their places in the cache are reserved."""
        most = min(self._scheduler.tokens_left(sequence) - 1, self.controller.most)
        return self._scheduler.reservations.reserve(sequence, most) if most > 0 else 0

    def _record(self, sequence: Sequence, kind: int) -> Record:
        return self._records.setdefault(sequence, {}).setdefault(kind, Record())

    def part(self, plan: Plan) -> None:
        """Have the block in which ways through a tree part copied for each of them."""
        if not self._guesses:
            return
        for sequence, _ in plan.parts:
            if sequence.ways:
                plan.copies += self._scheduler.reservations.ways_to_copy(sequence)

    # ── after sampling ───────────────────────────────────────────────────────────────────────

    def right(self, sequence: Sequence, drawn: Seq[int]) -> list[int]:
        """The guesses of its draft that are what was drawn, one after another; the sequence goes on
        with what was computed on their way.

        drawn: for its last token's row, and that of each guess.
        """
        draft, sequence.draft = sequence.draft, None
        assert draft is not None  # the caller looked
        right = followed(draft.tokens, draft.parents, lambda place, _: drawn[place + 1])
        if right and draft.parents is not None:
            ways = draft.ways
            way = next(at for at, way in enumerate(ways) if way[: len(right)] == right)
            self._scheduler.reservations.adopt(sequence, way)
        metrics = sequence.request.metrics
        for counts in (self.counts, metrics.drafts, *([metrics.predicted] * draft.is_expected)):
            counts.count(len(draft), len(right), draft.depth)
        self._right += len(right)
        self._came_true[sequence] = right
        if self.on_verified is not None:
            self.on_verified(sequence, draft, right, drawn)
        return right

    def computed(self, parts: Seq[Part], firsts: Seq[int]) -> None:
        """A step's tokens were applied. firsts: where in each sequence its part began."""
        if self._reader is None or self.broken is not None:
            return
        control = self.controller
        if self._rest > 0 or not (control.is_on or control.may_guess(len(parts))):
            control.kept = 0
            return  # nobody will ask for these states
        control.kept += 1
        start = time.perf_counter()
        found, row = [], 0
        for (sequence, count), first in zip(parts, firsts, strict=True):
            rows = list(range(row, row + count))
            if sequence in self._came_true:
                rows = [row, *(row + 1 + place for place in self._came_true[sequence])]
            row += count
            if sequence.status is Status.RUNNING and not sequence.mates:  # they have no drafts
                found.append(Computed(sequence, sequence.tokens, sequence.blocks, first, rows))
        try:
            self._reader.saw(found)
        except Exception as error:  # guesses may fail, but not the requests
            self._give_up(error)
        if not control.is_on:
            self._watch_s = time.perf_counter() - start
            self._unpaid_s += self._watch_s

    def settle(self) -> None:
        """Compare what was guessed with what has come, and give back what was reserved."""
        if not self._reserved:
            return
        start = time.perf_counter()
        for sequence, guess in self._guesses.items():
            right, tested = guess.compare(sequence.tokens[guess.start :])
            ended = sequence not in self._records
            record = Record() if ended else self._record(sequence, guess.kind)
            self.controller.saw_guess(record, right, tested, guess.kind)
            if guess.chances is not None and tested:
                self.controller.saw_tree(guess.chances, right)
        self._guesses.clear()
        self._came_true.clear()
        for sequence in self._reserved:
            self._scheduler.reservations.trim(sequence)
        self._reserved = []
        self._settle_s = time.perf_counter() - start

    def saw_step(self, record: StepRecord) -> None:
        """Learn from a step's time."""
        if self._rests:
            return
        start = time.perf_counter()
        size = record.size
        forced = size.tokens - size.drafted - len(size.contexts)  # by grammars, beside the last
        if size.is_prefill or forced:
            self.controller.unlearned += 1
            return
        batch, draft_s = len(size.contexts), record.draft_s + self._settle_s
        seconds = record.seconds - draft_s - self._watch_s
        unpaid_s, self._unpaid_s = self._unpaid_s, 0.0
        self.controller.saw_step(
            batch, size.drafted, seconds, draft_s, self._right, unpaid_s, expected=self._expects
        )
        self._rest = self._rest or self.controller.rest(batch)  # whose steps were counted once
        if draft_s:
            self.controller.saw_look(time.perf_counter() - start)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._records.pop(sequence, None)
        try:
            if self._learner is not None and not sequence.mates:
                salt, prompt = sequence.request.salt, sequence.sampling.num_prompt
                self._learner.ended(sequence, sequence.tokens, prompt, salt)
            self.proposer.forget(sequence)
        except Exception as error:  # whatever it is, the sequence must end
            self._give_up(error)


@dataclass(frozen=True, slots=True)
class _Guess:
    """What was guessed, as it was before any of it was left out."""

    start: int  # the place of the first token
    tokens: list[int]
    parents: list[int] | None
    chances: list[float] | None
    kind: int

    @classmethod
    def of(cls, start: int, draft: Draft) -> _Guess:
        """Of a draft that hasn't been settled: that changes its lists."""
        return cls(start, list(draft.tokens), draft.parents, draft.chances, draft.kind)

    def compare(self, came: Seq[int]) -> tuple[int, int]:
        """How many of the tokens that came were guessed, and how many were guessed at."""
        right = followed(
            self.tokens, self.parents, lambda _, count: came[count] if count < len(came) else ROOT
        )
        parents = range(ROOT, len(self.tokens) - 1) if self.parents is None else self.parents
        goes_on = (right[-1] if right else ROOT) in parents
        return len(right), len(right) + (goes_on and len(right) < len(came))


def _check_trees(runtime: Runtime) -> None:
    """Raises ConfigError where steps can't take drafts that are trees."""
    why = None
    if runtime.layout.recent_window:
        why = "the recent tokens of kv_cache_dtype='kivi' are one sequence's"
    elif runtime.runner.is_packaged:
        why = "a compiled package takes sequences only"
    if why is not None:
        raise ConfigError(f"Drafts can't be trees here: {why}. Set tree_width=1.")


def _check_recent(config: EngineConfig, runtime: Runtime, most: int) -> None:
    """Raises ConfigError for a cache with a window that wasn't made for so long guesses."""
    layout, limits = runtime.layout, config.scheduler
    needed = most_recent_blocks(
        layout.recent_window + most,
        layout.block_size,
        runtime.model.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )
    if needed > layout.max_recent_blocks:
        raise ConfigError(
            f"With num_speculative_tokens={most} a cache of kv_cache_dtype='kivi' needs {needed} "
            f"places for recent blocks, and this one was made with {layout.max_recent_blocks}. "
            "Load the runtime with this speculative_config."
        )


def _wish(sequence: Sequence, most: int) -> Wish:
    salt = sequence.request.salt
    return Wish(
        sequence, sequence.tokens, sequence.sampling, sequence.blocks, most, salt, sequence.expected
    )
