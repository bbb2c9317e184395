"""Drafts in the engine: whatever is guessed, what comes is what would have come without."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from penstock.engine import Engine, RequestOptions
from penstock.engine.request import Sequence, Status
from penstock.sampling import BeamSearchParams, SamplingParams
from penstock.speculate import Computed, Controller, Draft, Wish

from .guessing import Guesser, TreeGuesser, by_the_toy, speculate
from .toy import IS_NAN, check, drain, reference, run_one, toy_engine

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def random_params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "max_tokens": rng.choice([1, 2, *range(7, 31)]),
        "seed": rng.randrange(100),
    }
    for name, values in {
        "top_p": [0.9], "top_k": [5], "min_p": [0.1], "repetition_penalty": [1.3],
        "presence_penalty": [0.5], "frequency_penalty": [0.5], "logprobs": [2],
        "stop_token_ids": [[9, 12]], "min_tokens": [1],
        "logit_bias": [{3: 2.0}], "typical_p": [0.9], "prompt_logprobs": [0],
    }.items():  # fmt: skip
        if rng.random() < 0.15:
            options[name] = rng.choice(values)
    if rng.random() < 0.15:
        options |= {"dry_multiplier": 0.8, "dry_sequence_breakers": []}
    if options["temperature"]:
        options["n"] = rng.choice([1, 1, 1, 3])
    return SamplingParams(**options)


def contents(engine: Engine, sequence: Sequence) -> list[int]:
    """What the toy's cache holds of a sequence."""
    ids: torch.Tensor = engine.runtime.runner.kv[0][0]
    return ids[sequence.blocks].flatten()[: sequence.num_computed].tolist()


LITTLE_ROOM: list[dict[str, Any]] = [
    {},
    {"num_blocks": 16},
    {"num_blocks": 16, "preemption_mode": "swap"},
    {"max_num_batched_tokens": 9, "max_num_seqs": 4},
]


@pytest.mark.parametrize("kind", [Guesser, TreeGuesser])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        *LITTLE_ROOM,
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 65},
        {"enable_prefix_caching": False},
        {"policy": "priority"},
    ],
    ids=str,
)
def test_what_comes_is_what_would_have_come(
    options: dict[str, Any], adaptive: bool, wrong: float, kind: type[Guesser]
) -> None:
    rng = random.Random(f"{options} {adaptive} {wrong}")
    engine = toy_engine(**{"num_blocks": 64, **options})
    speculation = speculate(engine, kind(by_the_toy, wrong), rng.randint(1, 7), adaptive=adaptive)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    done: dict[str, Any] = {}
    while len(asked) < 15 or engine.has_unfinished:
        if len(asked) < 15 and rng.random() < 0.4:
            prompt = [5 + i for i in range(rng.choice([0, 8, 16]))]
            prompt += [rng.randrange(2, 60) for _ in range(rng.randint(1, 12))]
            name, params = str(len(asked)), random_params(rng)
            asked[name] = prompt, params
            wish = RequestOptions(priority=rng.randrange(3) if "policy" in options else 0)
            engine.add_request(name, prompt, params, options=wish)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        check(engine)
        for sequence in engine.scheduler.running:
            assert contents(engine, sequence) == sequence.tokens[: sequence.num_computed]
    for name, (prompt, params) in asked.items():
        want = [reference(prompt, params, index=i) for i in range(params.n)]
        assert [sample.token_ids for sample in done[name].outputs] == want, (name, params)
    counts = speculation.counts
    assert counts.drafts or adaptive  # which may find that none pay where a step takes no time
    if wrong == 0.0 and kind is Guesser and counts.drafts:
        assert counts.accepted_tokens > 0.8 * counts.draft_tokens  # some end within a draft
    assert counts.accepted_tokens == sum(counts.accepted_at)
    assert not speculation._records and engine.pool.num_used == 0


def test_mirostat_has_no_drafts() -> None:
    """How far it cuts depends on how surprising the token before was, not on which it is."""
    params = SamplingParams(mirostat=2, seed=3, max_tokens=20)
    engine, guesser = toy_engine(), Guesser(by_the_toy)
    speculate(engine, guesser)
    assert run_one(engine, PROMPT, params).outputs[0].token_ids == reference(PROMPT, params)
    assert not guesser.limits


def test_a_right_draft_saves_steps() -> None:
    engine = toy_engine()
    speculation = speculate(engine, Guesser(by_the_toy), 4)
    steps = 0
    engine.add_request("it", PROMPT, GREEDY)
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert steps < 24 * 0.7
    stats = engine.stats()
    assert stats["spec_decode_num_draft_tokens"] == stats["spec_decode_num_accepted_tokens"] > 12
    assert stats["spec_decode_num_accepted_tokens_per_pos"] == speculation.counts.accepted_at
    control = speculation.controller
    fresh = speculate(toy_engine(), Guesser(by_the_toy), control.most).stats()
    assert fresh["spec_decode_num_accepted_tokens_per_pos"] == [0] * control.most
    assert stats["generation_tokens"] == 24


def test_each_request_knows_of_its_own_drafts() -> None:
    engine = toy_engine()
    speculation = speculate(engine, Guesser(by_the_toy, wrong=0.2), 4)
    for name in "ab":
        engine.add_request(name, [*PROMPT, ord(name) - 90], GREEDY)
    own = [output.metrics.drafts for output in drain(engine).values()]
    whole = speculation.counts
    assert min(counts.accepted_tokens for counts in own) > 0
    for field in ("drafts", "draft_tokens", "accepted_tokens"):
        assert sum(getattr(counts, field) for counts in own) == getattr(whole, field)


def test_log_probabilities_are_those_of_plain_steps() -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20, logprobs=4, n=2)
    plain = run_one(toy_engine(), PROMPT, params)
    engine = toy_engine()
    speculate(engine, Guesser(by_the_toy, 0.3), 5)
    assert [s.logprobs for s in run_one(engine, PROMPT, params).outputs] == [
        s.logprobs for s in plain.outputs
    ]


def test_no_draft_goes_beyond_the_end() -> None:
    engine = toy_engine()
    guesser = Guesser(by_the_toy)
    speculate(engine, guesser, 60)
    run_one(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=10))
    assert max(guesser.limits) == 8  # the first is there, and the last comes without a guess
    guesser.limits.clear()
    run_one(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=None))  # until 64
    assert max(guesser.limits) == 64 - 3 - 1 - 1


def test_other_requests_come_first() -> None:
    """Whoever waits for blocks isn't kept waiting by places for drafts."""
    engine = toy_engine(num_blocks=28)
    guesser = Guesser(by_the_toy)
    speculate(engine, guesser, 16)
    engine.add_request("long", PROMPT, SamplingParams(temperature=0.0, max_tokens=56))
    for _ in range(3):
        engine.step()
    assert max(guesser.limits) == 16
    engine.add_request("big", list(range(2, 50)), SamplingParams(temperature=0.0, max_tokens=2))
    engine.step()
    big = engine.requests["big"].sequences[0]
    assert big.status is Status.RUNNING
    drain(engine)


def test_drafts_leave_prompts_their_tokens() -> None:
    """Two sequences that could fill every step take an eighth of one in which a prompt comes."""
    engine = toy_engine(num_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)
    speculation = speculate(engine, Guesser(by_the_toy), 12)
    for name in "ab":
        engine.add_request(name, PROMPT, SamplingParams(seed=ord(name), max_tokens=58))
    for _ in range(3):
        engine.step()
    engine.add_request("new", list(range(2, 50)), SamplingParams(temperature=0.0, max_tokens=2))
    drafts = speculation.counts.draft_tokens
    for _ in range(4):
        engine.step()
        check(engine)
    new = engine.requests["new"].sequences[0]
    assert new.num_output == 1  # 48 tokens, 12 a step
    assert speculation.counts.draft_tokens > drafts  # and those that decode had theirs
    done = drain(engine)
    for name in "ab":
        params = SamplingParams(seed=ord(name), max_tokens=58)
        assert done[name].outputs[0].token_ids == reference(PROMPT, params)


def test_steps_without_drafts_are_timed_apart() -> None:
    """How long those take that can't have drafts says nothing about the others."""
    engine = toy_engine()
    times = speculate(engine, Guesser(by_the_toy), 4, adaptive=True).controller.times

    def same(_: Any, logits: torch.Tensor) -> None:
        """Takes its time."""

    slow = SamplingParams(temperature=0.0, max_tokens=8, logits_processors=[same])
    for params in (slow, SamplingParams(mirostat=2, seed=1, max_tokens=8)):
        run_one(engine, PROMPT, params)
    assert times.plain(1)[1] == 0 and times.plain(1, mixed=True)[1] > 0
    run_one(engine, PROMPT, GREEDY)
    assert times.plain(1)[1] > 0


class Reader(Guesser):
    """Guesses by the states of so many steps before, as a head does."""

    def __init__(self, wants: int) -> None:
        super().__init__(by_the_toy, by_passes=True)
        self.wants = wants
        self.seen = [0]  # positions in a row whose states it has seen, up to the last one
        self.found: list[bool] = []  # whether it could guess

    def saw(self, computed: Seq[Computed]) -> None:
        for one in computed:
            first, count = one.first, len(one.rows)
            self.seen = (self.seen if self.seen[-1] == first else []) + [
                *range(first + 1, first + count + 1)
            ]

    def _draft(self, wish: Wish) -> Draft:
        last = len(wish.tokens) - 1
        known = self.seen[-1] == last and len(self.seen) >= min(self.wants, last)
        self.found.append(known)
        return super()._draft(wish) if known else Draft(wish.sampling)


@pytest.mark.parametrize("wants", [1, 30])
def test_states_are_kept_before_drafts_are_tried_again(wants: int) -> None:
    """While drafts are off nobody keeps states; a try that is due waits for them, and once only."""
    engine, reader = toy_engine(), Reader(wants)
    speculation = speculate(engine, reader, 2, adaptive=True)
    control = speculation.controller = Controller(2, adaptive=True, by_passes=True, watched=wants)
    engine.add_request(
        "a", PROMPT, SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    )
    for _ in range(2):
        control.saw_drafting(1, 1e-4)
    for step in range(110):
        due = step % 55 >= 15
        for verdict in control._verdicts.values():
            verdict.is_on = False
        plain, _ = control.times.plain(1)
        control._budget_s = 20.0 * plain if due else -1.0
        asked = len(reader.found)
        engine.step()
        if not due and control.kept == 0:
            assert len(reader.found) == asked
    assert len(reader.found) >= 2 and all(reader.found)


def test_beams_and_guided_samples_have_no_drafts() -> None:
    engine = toy_engine()
    guesser = Guesser(by_the_toy)
    speculate(engine, guesser)
    engine.add_request("beams", PROMPT, BeamSearchParams(beam_width=3, max_tokens=8))
    guided = SamplingParams(temperature=0.0, max_tokens=8, guidance_scale=1.5)
    engine.add_request("guided", PROMPT, guided)
    engine.add_request("plain", PROMPT, GREEDY)
    done = drain(engine)
    alone = toy_engine()
    alone.add_request("beams", PROMPT, BeamSearchParams(beam_width=3, max_tokens=8))
    alone.add_request("guided", PROMPT, guided)
    for name, output in drain(alone).items():
        assert [s.token_ids for s in done[name].outputs] == [s.token_ids for s in output.outputs]
    assert done["plain"].outputs[0].token_ids == reference(PROMPT, GREEDY)
    assert set(guesser.forgotten) and guesser.limits


class Fails(Guesser):
    def propose(self, wishes: Any) -> list[Draft]:
        if len(self.limits) > 3:
            raise ValueError("no idea")
        return super().propose(wishes)


def test_a_proposer_that_fails_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine()
    speculation = speculate(engine, Fails(by_the_toy), 2)
    assert run_one(engine, PROMPT, GREEDY).outputs[0].token_ids == reference(PROMPT, GREEDY)
    assert isinstance(speculation.broken, ValueError) and "no idea" in caplog.text
    assert engine.stats()["spec_decode_on"] is False


class FailsToForget(Guesser):
    def forget(self, key: object) -> None:
        raise MemoryError("no room for its past")


def test_a_proposer_that_cannot_forget_holds_nobody_up() -> None:
    engine = toy_engine()
    speculation = speculate(engine, FailsToForget(by_the_toy), 2)
    for name in "ab":
        engine.add_request(name, PROMPT, GREEDY)
    done = drain(engine)
    assert all(done[name].outputs[0].token_ids == reference(PROMPT, GREEDY) for name in "ab")
    assert isinstance(speculation.broken, MemoryError) and engine.pool.num_used == 0


def test_a_request_that_breaks_leaves_the_others_their_drafts() -> None:
    engine = toy_engine()
    speculate(engine, Guesser(by_the_toy), 3)
    engine.add_request("fine", PROMPT, GREEDY)
    for _ in range(3):
        engine.step()
    engine.add_request("broken", [4, IS_NAN], GREEDY)
    done = drain(engine)
    assert done["broken"].error is not None
    assert done["fine"].outputs[0].token_ids == reference(PROMPT, GREEDY)


def test_aborted_between_steps() -> None:
    engine = toy_engine()
    speculation = speculate(engine, Guesser(by_the_toy), 3)
    engine.add_request("it", PROMPT, GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort("it")
    engine.step()
    check(engine)
    assert engine.pool.num_used == 0 and not speculation._records


class Sees(TreeGuesser):
    """Whose states are shown to it, and what is forgotten."""

    def __init__(self) -> None:
        super().__init__(by_the_toy)


def test_who_gets_no_drafts_is_not_shown() -> None:
    """Guided samples and their shadows, beams: nobody would forget them."""
    engine, guesser = toy_engine(max_num_seqs=8), Sees()
    speculate(engine, guesser)
    guided = SamplingParams(temperature=0.7, seed=1, max_tokens=6, guidance_scale=2.0)
    engine.add_request("guided", PROMPT, guided)
    engine.add_request("beams", PROMPT, BeamSearchParams(beam_width=2, max_tokens=6))
    engine.add_request("plain", PROMPT, SamplingParams(temperature=0, max_tokens=6))
    drain(engine)
    assert guesser.seen and set(guesser.seen) <= set(guesser.forgotten)
