"""How long drafts are, in a world whose speed and whose luck are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock.speculate.control import PLAIN_STEPS, Controller, Rate, Record
from penstock.speculate.times import OLD, SURE, StepTimes

Seconds = Callable[[int, int], float]
"""Of a step, by its sequences and its drafts' tokens."""


@dataclass
class World:
    """An engine's steps: each guess is right with a probability of its own, if those before are."""

    most: int
    seconds: Seconds
    right: float
    pass_s: float = 0.0  # of a draft's token, or of all where there are no passes
    by_passes: bool = False
    batch: int = 1
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    lengths: list[int] = field(default_factory=list)  # of the first sequence's drafts
    slowness: float = 1.0  # of everything
    watched: int = 0  # steps whose states must have been kept before one can guess
    output: int = 0  # tokens of a request; 0: it goes on for ever
    catch_up_s: float = 0.0  # that the first drafting of each takes beside its passes
    came: int = 0  # tokens of this one
    behind: bool = False  # whether it hadn't any yet
    look_s: float = 0.0  # that learning from a step with guesses takes
    looks: int = 0  # such steps
    empty: int = 0  # times that it was asked and had no states to guess by

    def __post_init__(self) -> None:
        self.controller = Controller(
            self.most, adaptive=True, by_passes=self.by_passes, watched=self.watched
        )
        self.controller.kept = self.watched  # of the prompt
        self.records = [Record() for _ in range(self.batch)]

    def step(self) -> tuple[int, float]:
        """Tokens and seconds of a step."""
        control, batch = self.controller, self.batch
        spent, chosen, guessed = 0.0, [0] * batch, 0
        may_guess = control.may_guess(batch) and not control.waits()
        if may_guess and control.kept < self.watched:
            self.empty += 1
            control.saw_guesses(found=False)
        elif may_guess:
            control.saw_guesses(found=True)
            room = [self.most] * batch
            if self.by_passes:
                chosen = control.choose(batch, self.records[:batch], room)
                guessed = max(chosen)
                spent = self.pass_s * guessed * self.slowness
            else:
                spent, guessed = self.pass_s * self.slowness, self.most
            if guessed and self.behind:
                spent += self.catch_up_s
                control.saw_catching_up(guessed, spent)
                self.behind = False
            elif guessed:
                control.saw_drafting(guessed, spent)
            if not self.by_passes:
                chosen = control.choose(batch, self.records[:batch], room)
        tokens = 0
        for record, length in zip(self.records, chosen, strict=False):
            seen = length if self.by_passes else guessed  # what comes is held against all of it
            right = 0
            while right < length and self.rng.random() < self.right:
                right += 1
            tokens += right + 1
            tested = min(right + 1, seen)
            also = right == length < seen and self.rng.random() < self.right
            control.saw_guess(record, right + also, tested)
        took = self.seconds(batch, sum(chosen)) * (1 + self.noise * self.rng.random())
        took *= self.slowness
        control.saw_step(batch, sum(chosen), took, spent, tokens - batch)
        if guessed and self.look_s:
            self.looks += 1
            control.saw_look(self.look_s)
            spent += self.look_s
        keeps = control.is_on or control.may_guess(batch)
        control.kept = control.kept + 1 if keeps else 0
        self.lengths.append(chosen[0])
        self.came += tokens
        if self.output and self.came >= self.output:
            self.came, self.behind = 0, True
        return tokens, took + spent

    def speed(self, steps: int) -> float:
        """Tokens per second over some steps."""
        found = [self.step() for _ in range(steps)]
        return sum(n for n, _ in found) / sum(s for _, s in found)

    def ideal(self) -> float:
        """Tokens per second at the best length that doesn't change."""
        return max(
            self.batch * sum(self.right**j for j in range(length + 1))
            / (self.seconds(self.batch, self.batch * length)
               + (self.pass_s * (length if self.by_passes else length > 0)))
            for length in range(self.most + 1)
        )  # fmt: skip

    def plain(self) -> float:
        return self.batch / self.seconds(self.batch, 0)


def line(batch: int, drafted: int) -> float:
    """A token takes as long as any other: a model that fits into a cache."""
    return float(batch + drafted)


def flat(batch: int, drafted: int) -> float:
    """Memory is the bound: more tokens cost next to nothing."""
    return 10.0 + 0.1 * (batch + drafted)


def steep(batch: int, drafted: int) -> float:
    """Products are the bound: twice the tokens, nearly twice the time."""
    return 1.0 + 1.0 * (batch + drafted)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("by_passes", [False, True])
def test_it_finds_a_length_about_as_good_as_the_best(
    right: float, batch: int, by_passes: bool, noise: float
) -> None:
    for seconds, pass_s in ((flat, 0.5), (flat, 2.0), (steep, 0.1)):
        world = World(8, seconds, right, pass_s, by_passes, batch, noise)
        world.speed(150)
        ideal = world.ideal() / (1 + 0.5 * noise)
        assert world.speed(600) > 0.92 * ideal, (seconds, pass_s)


@pytest.mark.parametrize("by_passes", [False, True])
@pytest.mark.parametrize("batch", [1, 16])
def test_wrong_guesses_cost_a_hundredth_or_two(by_passes: bool, batch: int) -> None:
    for seconds in (flat, steep):
        for pass_s in (0.02, 0.5, 5.0):
            world = World(8, seconds, 0.0, pass_s, by_passes, batch)
            world.speed(150)
            assert not world.controller.is_on
            assert world.speed(2000) > 0.975 * world.plain(), (seconds, pass_s)


@pytest.mark.parametrize("output", [2, 3, 6, 20])
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_outputs_too_short_to_catch_up_for(output: int, right: float) -> None:
    """What one takes to read a prompt is more than the guesses for its few tokens bring."""
    world = World(8, flat, right, 0.5, by_passes=True)
    world.output, world.catch_up_s, world.behind = output, 150.0, True
    world.speed(1500)
    assert world.speed(6000) > 0.97 * world.plain()
    world.output, world.behind = 0, False
    world.speed(6000)
    assert world.controller.is_on == (right > 0.5)  # outputs are long again


def test_long_outputs_are_worth_catching_up_for() -> None:
    world = World(8, flat, 0.8, 0.5, by_passes=True)
    world.output, world.catch_up_s, world.behind = 400, 50.0, True
    world.speed(300)
    assert world.speed(2000) > 1.4 * world.plain()


@pytest.mark.parametrize("by_passes", [False, True])
def test_a_batch_is_not_judged_by_another(by_passes: bool) -> None:
    """Drafts pay alone and not beside 63 others, whose looks cost more than one alone may."""

    def seconds(batch: int, drafted: int) -> float:
        return 0.2 + 0.01 * drafted if batch == 1 else 4.0 + 0.2 * drafted

    world = World(8, seconds, 0.9, 0.01, by_passes)
    world.speed(200)
    assert world.controller.is_on
    for _ in range(2):
        world.batch = 64
        world.records = [Record() for _ in range(64)]
        world.right = 0.05
        world.speed(400)
        assert not world.controller.is_on
        world.batch, world.right = 1, 0.9
        world.records = [Record()]
        assert world.speed(200) > 1.5 * world.plain()
        assert world.controller.is_on


@pytest.mark.parametrize("right", [0.05, 0.9])
@pytest.mark.parametrize("by_passes", [False, True])
def test_steps_with_prompts_only(by_passes: bool, right: float) -> None:
    """No plain step is ever measured: guesses that mostly come true are verified all the same."""
    control, record, rng = (
        Controller(4, adaptive=True, by_passes=by_passes),
        Record(),
        random.Random(1),
    )
    drafted = []
    for _ in range(600):
        length = 0
        if control.may_guess(1):
            length = control.choose(1, [record], [4])[0]
        came = 0
        while came < length and rng.random() < right:
            came += 1
        control.saw_guess(record, came, min(came + 1, length))
        control.unlearned += 1
        drafted.append(length)
    assert not any(drafted[:4])
    if right > 0.5:
        assert min(drafted[50:]) >= 2
    else:
        assert 3 <= sum(drafted[100:]) <= 15
    for _ in range(PLAIN_STEPS):  # and where plain ones are measured, these count
        control.saw_step(1, 0, 1.0)
    assert not control.unlearned and control.may_guess(1)


def test_one_looks_as_often_as_that_is_cheap() -> None:
    """Steps of 0.2 ms and guesses that are never right."""
    looks = {}
    for look_s in (1e-5, 1e-4, 1e-3):
        world = World(8, lambda batch, drafted: 1e-4 * (1 + batch + drafted), 0.0, 1e-6)
        world.look_s = look_s
        world.speed(1000)
        world.looks = 0
        assert world.speed(8000) > 0.975 * world.plain()
        looks[look_s] = world.looks
    assert looks[1e-5] > 4 * looks[1e-4] > 12 * looks[1e-3] > 0, looks


@pytest.mark.parametrize("by_passes", [False, True])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_drafting_that_was_held_up_is_not_believed(by_passes: bool, batch: int) -> None:
    """The first, whose kernels are loaded then, or a later one: 400 times as long as the rest."""
    for held_up in ({0}, {40}, {40, 60}):
        world = World(8, flat, 0.9, 0.5, by_passes, batch)
        see = world.controller.saw_drafting
        seen = itertools.count()

        def saw_drafting(passes: int, seconds: float, see=see, seen=seen, at=held_up) -> None:
            see(passes, seconds * (400 if next(seen) in at else 1))

        world.controller.saw_drafting = saw_drafting
        world.speed(100)
        assert next(seen) > max(held_up)
        assert world.controller.is_on
        assert world.speed(200) > 0.92 * world.ideal(), held_up


@pytest.mark.parametrize("by_passes", [False, True])
def test_several_that_were_held_up_are_not_believed_for_good(by_passes: bool) -> None:
    world = World(8, flat, 0.9, 4000 * 0.5, by_passes)
    while world.controller._draftings < 2:
        world.step()
    world.pass_s = 0.5
    world.speed(5000)
    assert world.controller.is_on
    assert world.speed(800) > 0.92 * world.ideal()


@pytest.mark.parametrize("by_passes", [False, True])
@pytest.mark.parametrize("slow", [2, 3])  # of four
def test_what_draftings_cost_is_their_mean(by_passes: bool, slow: int) -> None:
    """Some take long and some don't: whether drafts pay is decided by all of them."""
    world = World(8, flat, 0.3, 0.1, by_passes)
    rng = random.Random(1)
    spent = tokens = 0.0
    for step in range(4000):
        world.pass_s = 20.0 if rng.random() < slow / 4 else 0.1
        count, seconds = world.step()
        if step >= 1000:
            tokens, spent = tokens + count, spent + seconds
    assert tokens / spent > 0.96 * world.plain()


def changing(
    by_passes: bool, pays: bool, batch: int, slowness: dict[int, float], until: int
) -> World:
    """A world after so many steps, slow by other factors from some of them on."""
    seconds, right = (flat, 0.7) if pays else (line, 0.6)
    world = World(8, seconds, right, 0.05 * seconds(batch, 0), by_passes, batch, 0.3)
    for step in range(until):
        world.slowness = slowness.get(step, world.slowness)
        world.step()
    return world


CHANGES: dict[str, tuple[dict[int, float], int]] = {
    "first step": ({0: 50.0, 1: 1.0}, 400),
    "first steps": ({0: 10.0, 6: 1.0}, 400),
    "a step": ({600: 50.0, 601: 1.0}, 1000),
    "a while": ({600: 5.0, 630: 1.0}, 2200),
    "slower": ({600: 3.0}, 1600),
    "faster": ({600: 1.0 / 3.0}, 1600),
}
"""Steps from which on everything is slower by a factor, and when it should have been noticed."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize(("by_passes", "batch"), [(False, 1), (True, 1), (True, 4)])
def test_it_notices_that_the_machine_was_slow(
    by_passes: bool, batch: int, pays: bool, change: str
) -> None:
    """Neither drafts that don't pay nor plain steps go on for good: plain steps that were held up
    make drafts look cheap, and there are none while there are drafts.
    """
    world = changing(by_passes, pays, batch, *CHANGES[change])
    ideal = world.ideal() if pays else world.plain()
    least = 0.88 if pays else 0.97
    assert world.speed(800) * world.slowness * 1.15 > least * ideal
    assert world.controller.is_on == pays


@pytest.mark.parametrize("by_passes", [False, True])
def test_plain_steps_are_measured_anew_while_drafts_go_on(by_passes: bool) -> None:
    world = World(8, flat, 0.9, 0.2, by_passes)
    world.speed(500)
    world.lengths.clear()
    world.speed(3000)
    assert 9 <= world.lengths.count(0) <= 30  # a hundredth of the steps


def test_steps_with_sequences_without_drafts_are_kept_apart() -> None:
    control = Controller(4, adaptive=True, by_passes=False)
    for mixed, seconds in ((True, 30.0), (False, 1.0)):
        control.mixed = mixed
        for _ in range(PLAIN_STEPS):
            assert not control.may_guess(1)
            control.saw_step(1, 0, seconds)
    assert control.times.plain(1) == (1.0, PLAIN_STEPS)
    assert control.times.plain(1, mixed=True) == (30.0, PLAIN_STEPS)


def test_guesses_that_are_compared_leave_drafts_their_trials() -> None:
    """They take more than may be spent: drafts are verified all the same."""
    world = World(8, line, 0.6, 0.05)
    world.speed(400)
    assert not world.controller.is_on
    world.lengths.clear()
    assert world.speed(6000) > 0.985 * world.plain()
    assert sum(map(bool, world.lengths)) >= 3


def test_it_is_off_where_steps_get_longer_than_they_save() -> None:
    world = World(8, line, 0.7, 0.0)
    world.speed(200)
    assert world.speed(500) > 0.98 * world.plain()
    assert sum(world.lengths[-500:]) < 25


@pytest.mark.parametrize("by_passes", [False, True])
@pytest.mark.parametrize("watched", [0, 1, 48])
def test_it_comes_back_when_guesses_get_right(by_passes: bool, watched: int) -> None:
    world = World(8, flat, 0.0, 0.05, by_passes, watched=watched)
    world.speed(1000)
    assert not world.controller.is_on and world.empty == 0
    world.right = 0.95
    world.speed(1500)
    assert world.controller.is_on and world.empty == 0
    assert world.speed(300) > 0.9 * world.ideal()


def test_the_lucky_sequence_has_the_longer_draft() -> None:
    control = Controller(8, adaptive=True, by_passes=True)
    lucky, unlucky = Record(), Record()
    for drafted in range(17):
        control.saw_step(2, 0, 10.0)
        control.saw_step(2, drafted, 10.0 + 0.3 * drafted)
    for _ in range(30):
        control.saw_guess(lucky, 4, 4)
        control.saw_guess(unlucky, 0, 1)
    control.saw_drafting(4, 0.4)
    lengths = control.choose(2, [lucky, unlucky], [8, 8])
    assert lengths[0] >= 6 and lengths[1] == 0


def test_without_adapting_drafts_are_as_long_as_they_may() -> None:
    control = Controller(5, adaptive=False, by_passes=False)
    assert control.may_guess(3)
    assert control.choose(3, [Record()] * 3, [9, 2, 5]) == [5, 2, 5]


@pytest.mark.parametrize("adaptive", [False, True])
def test_no_drafts_in_a_step_of_more_sequences(adaptive: bool) -> None:
    control = Controller(4, adaptive=adaptive, by_passes=False, most_sequences=2)
    for batch in (1, 2, 3):
        for _ in range(PLAIN_STEPS):
            control.saw_step(batch, 0, 0.01)
    assert [control.may_guess(batch) for batch in (1, 2, 3)] == [True, True, False]


def test_plain_steps_are_measured_first() -> None:
    control = Controller(4, adaptive=True, by_passes=False)
    for _ in range(PLAIN_STEPS):
        assert not control.may_guess(1)
        control.saw_step(1, 0, 0.01)
    assert control.may_guess(1) and not control.may_guess(2)


def seen(times: StepTimes, drafted: int, seconds: float, count: int = SURE) -> None:
    for _ in range(count):
        times.see(2, drafted, seconds)


def test_times_grow_with_the_drafts() -> None:
    times = StepTimes()
    seen(times, 0, 1.0)
    assert times.seconds(2, 2) == pytest.approx([1.0, 1.03, 1.06])  # assumed
    seen(times, 4, 3.0)
    assert times.seconds(2, 6) == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    seen(times, 2, 0.5)  # held up less: a longer step can't be faster than a shorter one
    assert np.all(np.diff(times.seconds(2, 6)) >= 0)
    seen(times, 0, 1.0, 50)
    times.see(2, 0, 1000.0)  # interrupted
    assert times.plain(2)[0] < 1.1
    assert times.plain(3) == (0.0, 0)


def test_the_first_times_are_not_those_of_steps_that_were_held_up() -> None:
    times = StepTimes()
    for seconds in (50.0, 20.0, 1.1, 1.2):
        times.see(2, 0, seconds)
    assert 1.1 <= times.plain(2)[0] < 1.2
    seen(times, 0, 1.2, 30)
    for _ in range(SURE - 1):
        times.see(2, 0, 6.0)
    assert times.plain(2)[0] < 1.4
    times.see(2, 0, 6.0)  # it is no accident
    assert times.plain(2)[0] == 6.0
    times.see(2, 0, 1.2)  # nor can this be one
    assert times.plain(2)[0] == 1.2


def test_what_was_slow_long_ago_is_not_held_against_longer_drafts() -> None:
    times = StepTimes()
    seen(times, 0, 1.0)
    for drafted in (2, 4, 6):
        seen(times, drafted, 9.0)
    times.see(2, 4, 1.2)
    found = times.seconds(2, 8)
    assert found[2] <= found[4] == pytest.approx(1.2)
    assert found[6] == pytest.approx(9.0)
    for _ in range(OLD):
        times.see(2, 0, 1.0)
        times.see(2, 4, 1.2)
    assert times.seconds(2, 8)[6] == pytest.approx(1.3)  # as the others make one expect


def test_what_was_slow_once_is_tried_again() -> None:
    times = StepTimes()
    seen(times, 0, 1.0)
    seen(times, 2, 1.2)
    times.see(2, 8, 50.0)
    assert times.seconds(2, 8)[8] == pytest.approx(1.8)  # as the others make one expect
    seen(times, 8, 50.0, SURE - 1)
    assert times.seconds(2, 8)[8] == pytest.approx(50.0)
    times.see(2, 6, 1.1)  # but fast once is believed
    assert times.seconds(2, 6)[6] == pytest.approx(1.2, abs=0.05)


def test_rates_forget() -> None:
    rate = Rate()
    assert rate.after(0.6, 4.0) == 0.6
    for _ in range(200):
        rate.see(1, 1, 0.9)
    assert rate.after(0.0, 4.0) == pytest.approx(10 / 14, abs=1e-3)
    record = Record()
    record.see(2, 3, 1.0)  # right, right, wrong
    assert (record.first.hits, record.first.trials) == (1, 1)
    assert (record.later.hits, record.later.trials) == (1, 2)
    record.see(0, 0, 1.0)  # nothing came
    assert record.first.trials == 1


# ── trees ────────────────────────────────────────────────────────────────────────────────────────

PROMISED = [0.8, 0.5, 0.3, 0.15, 0.1, 0.05]
"""Chances of a tree's guesses, in the order in which it holds them."""


@dataclass
class Forest:
    """Steps of one sequence whose trees promise PROMISED and keep a share of it."""

    seconds: Seconds
    kept: float
    pass_s: float = 0.02
    by_passes: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = Controller(
            3, adaptive=True, by_passes=self.by_passes, tree_tokens=len(PROMISED)
        )
        self.record = Record()

    def step(self) -> tuple[int, float]:
        control, spent, chosen, right = self.controller, 0.0, 0, 0
        if control.may_guess(1):
            depth = 3
            if self.by_passes:
                (depth,) = control.choose(1, [self.record], [3])
            spent = self.pass_s * (depth if self.by_passes else 1)
            if depth:
                control.saw_drafting(depth, spent)
                # as many of them on one way as they promise in the mean
                mean = self.kept * sum(PROMISED)
                deepest = sum(self.rng.random() < mean / 3 for _ in range(3))
                if self.by_passes:
                    (chosen,) = control.cut(1, [PROMISED])
                else:
                    sizes = control.choose(1, [self.record], [len(PROMISED)], (), [PROMISED])
                    (chosen,) = sizes
                right = round(deepest * sum(PROMISED[:chosen]) / sum(PROMISED))
                control.saw_guess(self.record, min(deepest, depth), min(deepest + 1, depth))
                control.saw_tree(PROMISED, deepest)
        took = self.seconds(1, chosen)
        control.saw_step(1, chosen, took, spent, right)
        self.sizes.append(chosen)
        return right + 1, took + spent

    def speed(self, steps: int) -> float:
        found = [self.step() for _ in range(steps)]
        return sum(n for n, _ in found) / sum(s for _, s in found)


@pytest.mark.parametrize("by_passes", [False, True])
def test_a_tree_is_as_large_as_it_pays(by_passes: bool) -> None:
    cheap = Forest(flat, 1.0, by_passes=by_passes)
    cheap.speed(300)
    assert np.mean(cheap.sizes[-100:]) > 5.5
    dear = Forest(lambda b, n: 1.0 + 0.25 * n, 1.0, by_passes=by_passes)
    dear.speed(300)
    assert 1 <= np.mean(dear.sizes[-100:]) < 4  # guesses below 0.25 don't pay


@pytest.mark.parametrize("by_passes", [False, True])
def test_promises_that_are_not_kept_are_seen(by_passes: bool) -> None:
    """Trees that never come true: no more than three hundredths of the time go to them."""
    for seconds in (flat, lambda b, n: 1.0 + 0.1 * n):
        forest = Forest(seconds, 0.0, by_passes=by_passes)
        forest.speed(300)
        assert not forest.controller.is_on
        assert forest.speed(2000) > 0.97 / seconds(1, 0)
        forest.kept = 1.0
        forest.speed(2000)
        assert forest.controller.is_on


def test_trees_of_several_share_what_pays() -> None:
    """The guesses of the most promise are taken, whosever they are."""
    control = Controller(2, adaptive=True, by_passes=False, tree_tokens=4)
    for _ in range(PLAIN_STEPS):
        control.saw_step(2, 0, 1.0)
    for n in (1, 2, 4, 8):
        for _ in range(5):
            control.saw_step(2, n, 1.0 + 0.2 * n)
    trees = [[0.9, 0.8, 0.1, 0.05], [0.3, 0.05, 0.02, 0.01]]
    assert control.choose(2, [Record(), Record()], [4, 4], (), trees) == [2, 0]
    assert control.cut(2, trees) == [2, 0]


def test_trees_that_are_not_kept_to_what_pays() -> None:
    control = Controller(2, adaptive=False, by_passes=True, tree_tokens=4)
    assert control.choose(1, [Record()], [5]) == [2]
    assert control.cut(1, [[0.5, 0.2, 0.1]]) == [3]


def test_what_luck_has_won_pays_for_no_lasting_loss() -> None:
    """Guesses that are right for a quarter of the time, and cost about what they bring."""
    world = World(3, lambda batch, drafted: 0.03 * (batch + 0.25 * drafted), 0.0, pass_s=0.0045)
    tokens = seconds = 0.0
    for step in range(8000):
        world.right = 0.9 if step % 60 < 15 else 0.1
        brought, took = world.step()
        tokens, seconds = tokens + brought, seconds + took
    assert tokens / seconds > 0.985 * world.plain()
