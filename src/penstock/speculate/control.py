"""How long drafts should be: as long as they are predicted to pay.

A step of B sequences whose drafts hold n tokens in all gives B + Σ P(the first j of draft i are
right) tokens, and takes t(B, n) seconds, and drafting's. Both are measured: how often a guess was
what came, and what steps took. `Controller.choose` takes the guesses in the order of what they
promise, as many as make tokens per second the most; none, where none makes them more than a plain
step does. Then the best of them are tried now and then, for a hundredth of the time, to see whether
they would pay by now; and where guesses cost nothing but their verification, they are made all the
same and compared with what comes.
Source: Leviathan, Kalman & Matias 2023, arXiv:2211.17192, section 3.4, for one sequence and one
rate; the gain of each further token against its cost: Liu et al. 2024, arXiv:2406.14066.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul

import numpy as np

from penstock.speculate.times import ENOUGH, StepTimes, class_of

FIRST, LATER = 0.6, 0.8
"""How often guesses are right before any was seen: a draft's first token, each one after it."""

MEMORY = 0.95
"""Of what was seen before, after each further draft of a sequence."""

LONG_MEMORY = 0.995
"""The same of all sequences together."""

TRUST = 4.0
"""Guesses' worth of trust in what all sequences showed, against one sequence's own."""

MARGIN = 1.02
"""Speculation must be predicted to be faster than plain steps by this factor."""

BUDGET = 0.01
"""The share of the time that may be spent on finding out whether speculation would pay."""

LOOK_S = 1e-4
"""What such a step takes after its end, where it is learned from; until that was measured."""

SAVINGS = 20.0
"""As many steps' time at most is kept for that."""

WON = 0.5
"""The share of the time that guesses have saved which may be spent on looking for more of them."""

PLAIN_STEPS = 3
"""Plain steps that are measured before the first draft, at each size of batch."""

MOST_REST = 64
"""Steps in a row, at most, that aren't looked at while drafts are off."""

UNLEARNED = 8
"""Steps in a row, with prompts or forced tokens, after which one doesn't wait for plain ones."""

LIKELY = 0.5
"""Where nothing is known of times, guesses that come true as often as that are verified."""

BELIEVED = 128.0
"""Tokens' worth of belief that what one takes to catch up with requests is spread over many."""

LONG_GONE = 0.999
"""Of that and of these tokens, after each further step."""

MOST_MISSES = 64
"""Steps in a row, at most, in which a look that has states to guess by finds no guess."""

SURE = 2
"""Draftings that must have been measured before one believes that they take long."""

HELD_UP, RECENT = 1.5, 8
"""A drafting that takes longer than all of the last ones may have been held up: it counts as so
many times the usual one at most, unless one of so many before it took that long too."""


@dataclass(slots=True)
class Rate:
    """How often something was so, the past weighing less and less."""

    hits: float = 0.0
    trials: float = 0.0

    def see(self, hits: int, trials: int, memory: float) -> None:
        self.hits = self.hits * memory + hits
        self.trials = self.trials * memory + trials

    def after(self, prior: float, weight: float) -> float:
        """The rate, where before anything was seen it was `prior`, as if seen `weight` times."""
        return (self.hits + prior * weight) / (self.trials + weight)


@dataclass(slots=True)
class Record:
    """What became of guesses: a draft's first tokens, and later ones whose elder was right."""

    first: Rate = field(default_factory=Rate)
    later: Rate = field(default_factory=Rate)

    def see(self, right: int, tested: int, memory: float) -> None:
        """Of a draft, the first `tested` tokens were tested, of which the first `right` came."""
        if not tested:
            return
        self.first.see(min(right, 1), 1, memory)
        if right:
            tried = min(right + 1, tested) - 1
            self.later.see(right - 1, tried, memory)


@dataclass(slots=True)
class _Verdict:
    """What was last predicted for batches that are taken for alike."""

    is_on: bool = True  # whether drafts pay
    price_s: float = 0.0  # of the next look at whether guesses would pay


@dataclass(frozen=True, slots=True)
class _Choice:
    """Drafts of some lengths, as fast as they are predicted to be."""

    speed: float  # tokens per second
    seconds: float  # that the step takes, and the passes before it
    loss: float  # seconds that plain steps would have spared
    lengths: list[int]


class Controller:
    """Decides how many of the guesses are verified, or made at all."""

    def __init__(
        self,
        most: int,
        *,
        adaptive: bool,
        by_passes: bool,
        tree_tokens: int | None = None,
        most_sequences: int | None = None,
        watched: int = 0,
    ) -> None:
        """most: tokens one after another in a draft; by_passes: whether each of them takes a pass
        of a model; tree_tokens: in a draft that is a tree; most_sequences: in a step with more of
        them there are no drafts; watched: while drafts are off, steps whose states are kept before
        one is tried (`StateReader.wants`).
        """
        self.most = most
        self.tree_tokens = tree_tokens or most
        self.most_sequences = most_sequences
        self.adaptive = adaptive
        self.by_passes = by_passes
        self.times = StepTimes()
        self.overall: defaultdict[int, Record] = defaultdict(Record)  # by kind of draft
        self.promises = Rate()  # of trees: tokens that came, for each that was promised
        self.pass_s = 0.0  # one token of a draft, or, without passes, all of them
        self._draftings = 0
        self._recent: deque[float] = deque(maxlen=RECENT)  # what they took
        self._look_s = LOOK_S
        self._budget_s = 0.0  # for drafts that are tried
        self._looks_s = 0.0  # for guesses that are only compared, where they take no passes
        self._share = 1.0 if by_passes else 0.5  # or looking would use up what trying needs
        self._caught_up_s = 0.0  # what one took to catch up with sequences …
        self._tokens = BELIEVED  # … while so many tokens came
        self._verdicts: dict[tuple[int, bool], _Verdict] = {}
        self._verdict = _Verdict()  # on batches like the last one
        self._watched = watched
        self.kept = 0  # steps in a row, up to the last one, whose states were; told from outside
        self._misses: int | None = None  # of the look that is due; None: none is
        self.unlearned = 0  # steps in a row whose times say nothing; told from outside
        self.mixed = False  # whether the step has sequences that can't have drafts; set before it

    @property
    def is_on(self) -> bool:
        """Whether drafts were last predicted to pay, in such batches."""
        return self._verdict.is_on

    # ── before a step ────────────────────────────────────────────────────────────────────────

    def may_guess(self, batch: int, *, expected: bool = False) -> bool:
        """Whether to guess at all, before a step of `batch` sequences.

        expected: by what callers have said will come.
        """
        if self.most_sequences is not None and batch > self.most_sequences:
            return False
        if not self.adaptive:
            return True
        plain, seen = self.times.plain(batch, mixed=self.mixed)
        self._judge(batch)
        if seen < PLAIN_STEPS:
            return self.unlearned >= UNLEARNED
        return expected or self._looks(plain) or self._missing(plain) <= 0.0

    def _judge(self, batch: int) -> None:
        """Go by what was predicted for batches like this one."""
        key = (class_of(batch), self.mixed)
        found = self._verdicts.get(key)
        if found is None:
            found = self._verdicts[key] = _Verdict()
        self._verdict = found

    def _looks(self, plain: float) -> bool:
        """Whether one guesses without having saved up for it."""
        if self.is_on or self._misses is not None:
            return True
        # what may be owed to find out how long drafting takes
        return self._draftings < SURE and self._budget_s > -SAVINGS / 2 * self._share * plain

    def _missing(self, plain: float) -> float:
        """What still has to be saved up for a look."""
        price = min(self._verdict.price_s, self._most_s(plain))
        return price - (self._budget_s if self.by_passes else self._looks_s)

    def _most_s(self, plain: float) -> float:
        """What a look may cost: never more than can be saved up, or a few that were held up would
        be believed for good.
        """
        return 0.9 * SAVINGS * self._share * plain

    def waits(self) -> bool:
        """Whether a look that is due waits for states: asked where one may guess."""
        if self.is_on or self._draftings < SURE or not self._watched:
            return False
        self._misses = self._misses or 0
        return self.kept < self._watched

    def choose(
        self,
        batch: int,
        records: Sequence[Record],
        room: Sequence[int],
        kinds: Sequence[int] = (),
        chances: Sequence[Sequence[float] | None] = (),
    ) -> list[int]:
        """How long the draft of each of some sequences should be, up to its `room`.

        batch: the sequences of the step, those included. records: of each one's own drafts of that
        kind. kinds: of the drafts, where they aren't all of kind 0. chances: of each one's guesses,
        where they are trees that have been made; then lengths are numbers of guesses.
        """
        if not any(chances):
            room = [min(most, self.most) for most in room]
        if not self.adaptive:
            return list(room)
        if self.times.plain(batch, mixed=self.mixed)[1] < PLAIN_STEPS:
            return self._likely(records, room, kinds, chances)
        gains = self._gains(records, room, kinds, chances)
        seconds = self._seconds(batch, sum(room), made=any(chances))
        best = self._best_alone if len(room) == 1 else self._best
        choice = best(batch, gains, seconds, self.pass_s if self.by_passes else 0.0)
        speed = choice.speed
        if self.by_passes:  # each token bears its share of what it took to catch up
            speed /= 1.0 + speed * self._caught_up_s / self._tokens
        elif choice.seconds:  # what guessing takes is spent, but will be again
            speed *= choice.seconds / (choice.seconds + self.pass_s)
        verdict, most = self._verdict, self._most_s(seconds[0])
        verdict.is_on = speed > MARGIN * batch / seconds[0]
        price = min(max(choice.loss, BUDGET * seconds[0]) + self._look_s, most)
        verdict.price_s = price if self.by_passes else min(self.pass_s + self._look_s, most)
        if verdict.is_on or self._misses is not None or price <= self._budget_s:
            return choice.lengths
        lengths = [0] * len(room)
        if self._draftings < SURE and self.by_passes:  # the least that tells how long one takes
            lengths[room.index(max(room))] = min(max(room), 1)
        return lengths

    def _gains(
        self,
        records: Sequence[Record],
        room: Sequence[int],
        kinds: Sequence[int],
        chances: Sequence[Sequence[float] | None],
    ) -> list[list[float]]:
        """What each guess of each draft brings, `choose` tells of what."""
        rates = self._rates(records, kinds or [0] * len(records))
        return [
            self._expected(tree) if tree else _declining(first, later, most)
            for tree, (first, later), most in zip(
                chances or [None] * len(room), rates, room, strict=True
            )
        ]

    def _likely(
        self,
        records: Sequence[Record],
        room: Sequence[int],
        kinds: Sequence[int],
        chances: Sequence[Sequence[float] | None],
    ) -> list[int]:
        """Lengths where nothing is known of times: guesses that come more often than not.

        A step with prompts takes long with or without them. Now and then the first is tried.
        """
        gains = self._gains(records, room, kinds, chances)
        lengths = [sum(gain >= LIKELY for gain in of_draft) for of_draft in gains]
        if not any(lengths) and self.unlearned % MOST_REST == 0:
            return [min(most, 1) for most in room]
        return lengths

    def cut(self, batch: int, chances: Sequence[Sequence[float] | None]) -> list[int]:
        """How much of trees that passes have made is to be verified: what they cost is spent."""
        gains = [self._expected(tree or ()) for tree in chances]
        if not self.adaptive:
            return [len(tree) for tree in gains]
        if self.times.plain(batch, mixed=self.mixed)[1] < PLAIN_STEPS:
            return [sum(gain >= LIKELY for gain in tree) for tree in gains]
        seconds = self._seconds(batch, sum(map(len, gains)), made=True)
        best = self._best_alone if len(gains) == 1 else self._best
        return best(batch, gains, seconds, 0.0).lengths

    def _seconds(self, batch: int, most: int, *, made: bool) -> list[float]:
        """Of steps with drafts of 0 … `most` tokens; or so deep, where trees will be made."""
        if made or self.tree_tokens == self.most:
            return self.times.seconds(batch, most, mixed=self.mixed)
        each = self.tree_tokens / self.most
        seconds = self.times.seconds(batch, math.ceil(most * each), mixed=self.mixed)
        return [seconds[math.ceil(depth * each)] for depth in range(most + 1)]

    def _expected(self, chances: Sequence[float]) -> list[float]:
        """The tokens that guesses of such chances bring: as many as such guesses have brought."""
        kept = self.promises.after(1.0, TRUST)
        return [min(chance * kept, 1.0) for chance in chances]

    def _best_alone(
        self, batch: int, gains: list[list[float]], seconds: list[float], pass_s: float
    ) -> _Choice:
        """The fastest length of one draft."""
        promised, found = float(batch), _Choice(0.0, 0.0, 0.0, [0])
        for length, gain in enumerate(gains[0], 1):
            promised += gain
            took = seconds[length] + pass_s * length
            if promised / took > found.speed:
                loss = took - promised * seconds[0] / batch
                found = _Choice(promised / took, took, loss, [length])
        return found

    def _best(
        self, batch: int, promises: list[list[float]], seconds: list[float], pass_s: float
    ) -> _Choice:
        """The fastest lengths of several: guesses by their promise, for each depth of passes."""
        deepest = max(map(len, promises))
        gains = np.array([[*row, *[0.0] * (deepest - len(row))] for row in promises])
        times = np.array(seconds)
        found = _Choice(0.0, 0.0, 0.0, [0] * len(gains))
        for passes in range(1, deepest + 1) if pass_s else [deepest]:
            within = gains[:, :passes]
            order = np.argsort(-within, axis=None, kind="stable")[: np.count_nonzero(within)]
            promised = batch + np.cumsum(within.ravel()[order])
            took = times[1 : len(order) + 1] + pass_s * passes
            at = int(np.argmax(promised / took))
            speed = float(promised[at] / took[at])
            if speed > found.speed:
                rows = order[: at + 1] // passes
                loss = float(took[at] - promised[at] * times[0] / batch)
                lengths: list[int] = np.bincount(rows, minlength=len(gains)).tolist()
                found = _Choice(speed, float(took[at]), loss, lengths)
        return found

    def _rates(self, records: Sequence[Record], kinds: Sequence[int]) -> list[tuple[float, float]]:
        """How often each one's first guess is right, and each later one."""
        found = []
        for record, kind in zip(records, kinds, strict=True):
            of_all = self.overall[kind]
            first = record.first.after(of_all.first.after(FIRST, TRUST), TRUST)
            later = record.later.after(of_all.later.after(LATER, TRUST), TRUST)
            found.append((first, later))
        return found

    # ── after it ─────────────────────────────────────────────────────────────────────────────

    def saw_step(
        self,
        batch: int,
        drafted: int,
        seconds: float,
        draft_s: float = 0.0,
        right: int = 0,
        watch_s: float = 0.0,
        *,
        expected: bool = False,
    ) -> None:
        """A decoding step took `seconds` and drafting `draft_s`; `right` guesses came true.

        watch_s: what keeping states took while drafts are off, which isn't in `seconds`. expected:
        guesses were those of callers alone, which are no look at others'.
        """
        if not self.adaptive:
            return
        self.unlearned = 0
        self._judge(batch)
        plain = self.times.see(batch, drafted, seconds, mixed=self.mixed)
        self._saw_tokens(batch + right, plain)
        saved = BUDGET * self._share * plain
        bound = SAVINGS / BUDGET * saved
        budget_s, looks_s = self._budget_s + saved, self._looks_s + saved
        self._budget_s = budget_s if budget_s < bound else bound
        self._looks_s = looks_s if looks_s < bound else bound
        if drafted:
            won = right * plain / batch - (seconds - plain) - draft_s - self._look_s
            self._credit(WON * self._share * won, bound)
        self._budget_s = max(self._budget_s - watch_s, -bound)
        if self.is_on or not (drafted or draft_s):
            return
        tried = (seconds - plain + self._look_s if drafted else 0.0) - right * plain / batch
        if self.by_passes:
            tried += draft_s + (0.0 if drafted else self._look_s)
        elif not expected:
            self._looks_s = max(self._looks_s - draft_s - self._look_s, -bound)
        self._budget_s = max(self._budget_s - max(tried, 0.0), -bound)

    def _saw_tokens(self, count: int, plain: float) -> None:
        """So many came: what catching up took is borne by those that come while drafts are on."""
        if self.is_on:
            self._tokens = BELIEVED + (self._tokens - BELIEVED) * LONG_GONE + count
            self._caught_up_s *= LONG_GONE
        else:  # or they would be on again before the last requests' loss is made up for
            self._caught_up_s = max(self._caught_up_s - BUDGET * plain, 0.0)

    def _credit(self, won: float, bound: float) -> None:
        """What drafts have won may be spent; what they have lost while they are on, no longer."""
        if won > 0.0:
            self._budget_s = min(self._budget_s + won, bound)
            self._looks_s = min(self._looks_s + won, bound)
        elif self.is_on:
            self._budget_s = max(self._budget_s + won, min(self._budget_s, 0.0))
            self._looks_s = max(self._looks_s + won, min(self._looks_s, 0.0))

    def rest(self, batch: int) -> int:
        """After a step, how many steps like it there is nothing to guess in, nor to learn from.

        Drafts are off, and what the next try or look costs takes so many to be saved up. Where a
        step takes a third of a millisecond, looking at each would cost as much as trying may. What
        these steps save is counted now.
        """
        plain, seen = self.times.plain(batch, mixed=self.mixed)
        saved = BUDGET * self._share * plain
        if seen < ENOUGH or not saved or self._looks(plain):
            return 0
        steps = min(int(self._missing(plain) / saved), MOST_REST)
        if steps < 1:
            return 0
        self._budget_s = min(self._budget_s + steps * saved, SAVINGS / BUDGET * saved)
        self._looks_s = min(self._looks_s + steps * saved, SAVINGS / BUDGET * saved)
        self._caught_up_s = max(self._caught_up_s - steps * BUDGET * plain, 0.0)
        return steps

    def drop_look(self) -> None:
        """Nobody is there who could have drafts: a look that is due waits for no states."""
        self._misses = None

    def saw_guesses(self, found: bool) -> None:
        """Somebody was asked to guess, and whether there were guesses; if not, a look goes on."""
        if self._misses is not None:
            self._misses += 1
            if found or self._misses > MOST_MISSES:
                self._misses = None

    def saw_drafting(self, passes: int, seconds: float) -> None:
        """Drafts of up to so many tokens took `seconds`."""
        each = seconds / max(passes, 1) if self.by_passes else seconds
        self._draftings += 1
        if self._draftings <= SURE:  # the first may have had kernels to load or memory to fetch
            self.pass_s = min(each, self.pass_s or each)
            self._verdict.is_on = True  # until `choose` knows better
        else:
            most = max(HELD_UP * self.pass_s, *self._recent)
            self.pass_s += 0.2 * (min(each, most) - self.pass_s)
        self._recent.append(each)

    def saw_catching_up(self, passes: int, seconds: float) -> None:
        """The same of drafts whose sequences had to be read first."""
        if self.is_on:  # else they are a look's, and paid for
            self._caught_up_s += max(seconds - passes * self.pass_s, 0.0)

    def saw_look(self, seconds: float) -> None:
        """Learning from a step with guesses took so long, which `saw_step` wasn't told."""
        self._look_s += 0.2 * (min(seconds, HELD_UP * self._look_s) - self._look_s)

    def saw_guess(self, record: Record, right: int, tested: int, kind: int = 0) -> None:
        """Of a sequence's draft, `tested` tokens were tested and the first `right` of them came."""
        record.see(right, tested, MEMORY)
        self.overall[kind].see(right, tested, LONG_MEMORY)

    def saw_tree(self, chances: Sequence[float], right: int) -> None:
        """Of a tree's guesses, which had such chances, so many came."""
        self.promises.hits = self.promises.hits * LONG_MEMORY + right
        self.promises.trials = self.promises.trials * LONG_MEMORY + sum(chances)


def _declining(first: float, later: float, count: int) -> list[float]:
    """What each guess of a draft brings, where each takes those before it to be right."""
    return list(accumulate(repeat(later, count - 1), mul, initial=first)) if count else []
