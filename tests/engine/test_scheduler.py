"""Which sequences take part in a step: budget, order, chunks, rows, blocks, who gives way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine import Engine, RequestOptions
from penstock.engine.request import Status
from penstock.errors import ConfigError, OutOfCacheError, RequestError
from penstock.sampling import SamplingParams

from .toy import BLOCK, Toy, check, drain, reference, toy_engine


def greedy(max_tokens: int | None = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def drawn(n: int, max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(n=n, seed=1, max_tokens=max_tokens)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 60 for i in range(length)]


def parts(engine: Engine) -> list[tuple[str, int]]:
    """Take one step; (request, tokens) of each sequence in it."""
    seen: list[tuple[str, int]] = []
    schedule = engine.scheduler.schedule

    def noted() -> object:
        plan = schedule()
        seen.extend((s.request.request_id, n) for s, n in plan.parts)
        return plan

    engine.scheduler.schedule = noted  # type: ignore[method-assign, assignment]
    engine.step()
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    check(engine)
    return seen


def test_a_prompt_comes_in_chunks_of_the_budget() -> None:
    engine = toy_engine(max_num_batched_tokens=10)
    engine.add_request("a", prompt(25), greedy())
    assert [parts(engine) for _ in range(4)] == [[("a", 10)], [("a", 10)], [("a", 5)], [("a", 1)]]


def test_decoding_goes_first_and_prompts_share_the_rest() -> None:
    engine = toy_engine(max_num_batched_tokens=10)
    engine.add_request("a", prompt(3), greedy())
    assert parts(engine) == [("a", 3)]
    engine.add_request("b", prompt(12, 1), greedy())
    engine.add_request("c", prompt(8, 2), greedy())
    assert parts(engine) == [("a", 1), ("b", 9)]
    assert parts(engine) == [("a", 1), ("b", 3), ("c", 6)]
    assert parts(engine) == [("a", 1), ("b", 1), ("c", 2)]
    assert parts(engine) == [("a", 1), ("b", 1), ("c", 1)]


def test_a_long_prompt_holds_nobody_up() -> None:
    """While 60 tokens come in threes, whoever decodes gets a token every step."""
    engine = toy_engine(max_num_batched_tokens=8, max_num_seqs=8)
    for name in "abcde":
        engine.add_request(name, prompt(1), greedy(40))
    parts(engine)
    engine.add_request("long", prompt(60, 1), greedy(3))
    for _ in range(20):
        assert parts(engine) == [*((name, 1) for name in "abcde"), ("long", 3)]
    assert [name for name, _ in parts(engine)] == [*"abcde", "long"]


def test_without_chunks_a_prompt_waits_until_it_fits() -> None:
    engine = toy_engine(max_model_len=20, max_num_batched_tokens=20, enable_chunked_prefill=False)
    engine.add_request("a", prompt(4), greedy(3))
    parts(engine)
    engine.add_request("b", prompt(19, 1), greedy(1))
    engine.add_request("c", prompt(1, 2), greedy(1))  # would fit beside both, but isn't first
    assert parts(engine) == [("a", 1), ("b", 19)]
    engine.add_request("d", prompt(19, 3), greedy(1))
    assert parts(engine) == [("a", 1), ("c", 1)]
    assert parts(engine) == [("d", 19)]
    assert not engine.has_unfinished


def test_without_chunks_the_model_length_must_fit_the_budget() -> None:
    """Else a prompt beyond the budget would wait for ever, whoever chose the length."""
    with pytest.raises(ConfigError, match=r"max_model_len \(64\) must fit.* \(63\)"):
        toy_engine(max_model_len=64, max_num_batched_tokens=63, enable_chunked_prefill=False)


def test_the_cache_must_hold_one_sequence() -> None:
    """Else it would give way to itself for ever."""
    with pytest.raises(
        OutOfCacheError, match="needs 16 blocks of 4 tokens, but the cache holds 15"
    ):
        toy_engine(num_blocks=15, max_model_len=64)
    engine = toy_engine(num_blocks=16, max_model_len=64)
    engine.add_request("a", prompt(1), greedy(None))
    assert len(drain(engine)["a"].outputs[0].token_ids) == 63


def test_first_come_first_served() -> None:
    engine = toy_engine(max_num_seqs=2)
    for i in range(6):
        engine.add_request(str(i), prompt(5, i), greedy(3))
    order = []
    while engine.has_unfinished:
        order += [output.request_id for output in engine.step()]
    assert order == list("012345")


def test_a_freed_row_is_filled_in_the_next_step() -> None:
    engine = toy_engine(max_num_seqs=2)
    for name, count in (("a", 2), ("b", 5), ("c", 2)):
        engine.add_request(name, prompt(3, ord(name)), greedy(count))
    assert parts(engine) == [("a", 3), ("b", 3)]
    assert parts(engine) == [("a", 1), ("b", 1)]
    assert parts(engine) == [("b", 1), ("c", 3)]


def test_samples_reserve_their_rows() -> None:
    engine = toy_engine(max_num_seqs=4)
    engine.add_request("a", prompt(3), drawn(3, 3))
    engine.add_request("b", prompt(3, 1), drawn(2, 3))
    engine.add_request("c", prompt(3, 2), greedy(3))  # there is a row, but b was first
    assert parts(engine) == [("a", 3)]
    assert parts(engine) == [("a", 1)] * 3
    assert parts(engine) == [("a", 1)] * 3
    assert parts(engine) == [("b", 3), ("c", 3)]


def test_more_samples_than_rows_are_refused() -> None:
    engine = toy_engine(max_num_seqs=4)
    with pytest.raises(RequestError, match=r"n=5 samples can't run at once: max_num_seqs is 4"):
        engine.add_request("a", prompt(3), drawn(5))
    assert not engine.has_unfinished
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_latest_arrival_gives_way(mode: str) -> None:
    engine = toy_engine(
        num_blocks=8, max_model_len=32, max_num_batched_tokens=32, preemption_mode=mode
    )
    for name in "abc":
        engine.add_request(name, prompt(8, ord(name)), greedy(20))
    done = drain(engine)
    assert engine.stats()[f"preemptions_{mode}"] == engine.scheduler.num_preemptions > 0
    assert done["a"].metrics.preemptions == 0
    for name in "abc":
        assert done[name].outputs[0].token_ids == reference(prompt(8, ord(name)), greedy(20))


def test_a_preempted_sequence_keeps_its_place() -> None:
    """b gives way to a; c, who came later, doesn't overtake b though it would fit."""
    engine = toy_engine(num_blocks=8, max_model_len=32, enable_prefix_caching=False)
    engine.add_request("a", prompt(8), greedy(20))
    engine.add_request("b", prompt(15, 1), greedy(10))
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.add_request("c", prompt(2, 2), greedy(2))
    done = {}
    while not done:  # a is the only one that runs
        done = {o.request_id: o for o in engine.step()}
        assert [s.request.request_id for s in engine.scheduler.waiting] == ["b", "c"]
    assert list(done) == ["a"]
    assert parts(engine)[0][0] == "b"
    assert list(drain(engine)) == ["c", "b"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_while_its_prompt_comes_in(mode: str) -> None:
    """All samples of a request that hasn't forked yet go back together."""
    engine = toy_engine(
        num_blocks=9, max_model_len=36, max_num_batched_tokens=8, max_num_seqs=6,
        enable_prefix_caching=False, preemption_mode=mode,
    )  # fmt: skip
    engine.add_request("a", prompt(7), greedy(25))
    engine.add_request("b", prompt(30, 1), drawn(3, 4))
    statuses = []
    done = {}
    while engine.has_unfinished:
        done |= {o.request_id: o for o in engine.step()}
        check(engine)
        if "b" in engine.requests:
            statuses.append([s.status for s in engine.requests["b"].sequences])
    fork, run, wait = Status.FORKING, Status.RUNNING, Status.WAITING
    assert [run, fork, fork] in statuses
    gone = wait if mode == "recompute" else Status.SWAPPED
    back = statuses.index([gone, wait, wait], statuses.index([run, fork, fork]))
    again = fork if mode == "recompute" else run  # its prompt lacked one chunk only
    assert [run, again, again] in statuses[back:]
    for sample in done["b"].outputs:
        want = reference(prompt(30, 1), drawn(3, 4), index=sample.index, max_model_len=36)
        assert sample.token_ids == want


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_after_the_fork(mode: str) -> None:
    """Samples give way one by one, the last first, and come back to the same tokens.

    They do even where they could be swapped: if all of them went, they would come back to the same.
    """
    engine = toy_engine(num_blocks=8, max_model_len=32, preemption_mode=mode)
    engine.add_request("a", prompt(6), drawn(4, 22))
    done = drain(engine)["a"]
    assert done.metrics.preemptions == engine.stats()["preemptions_recompute"] > 0
    for sample in done.outputs:
        want = reference(prompt(6), drawn(4, 22), index=sample.index, max_model_len=32)
        assert sample.token_ids == want
    assert engine.pool.num_used == 0


def test_samples_store_their_prompt_once() -> None:
    """22 tokens are 5 full blocks and half of a sixth, which 8 samples then copy to write in."""
    engine = toy_engine(max_num_seqs=8)
    engine.add_request("a", prompt(22), drawn(8))
    engine.step()
    assert engine.pool.num_used == 6
    assert all(engine.pool.count(b) == 8 for b in engine.requests["a"].sequences[0].blocks)
    engine.step()
    assert engine.pool.num_used == 5 + 8
    drain(engine)
    assert engine.pool.num_used == 0


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    engine = toy_engine(max_num_seqs=4)
    engine.add_request("a", prompt(2 * BLOCK), drawn(4))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan.copies == []
    assert engine.pool.num_used == 2 + 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_owner_of_a_copy_gives_way_before_it_is_made(mode: str) -> None:
    """Its copy is dropped from the plan: the block may already be somebody else's.

    What is swapped out instead is the block that it would have been copied from.
    """
    engine = toy_engine(
        num_blocks=6, max_model_len=24, enable_prefix_caching=False, preemption_mode=mode
    )
    engine.add_request("a", prompt(7), greedy(14))
    engine.step()
    engine.add_request("b", prompt(6, 1), drawn(3, 12))
    done = drain(engine)
    assert done["b"].metrics.preemptions > 0
    assert done["a"].outputs[0].token_ids == reference(prompt(7), greedy(14), max_model_len=24)
    for sample in done["b"].outputs:
        want = reference(prompt(6, 1), drawn(3, 12), index=sample.index, max_model_len=24)
        assert sample.token_ids == want


def test_a_sequence_that_computes_what_another_has_takes_its_block() -> None:
    engine = toy_engine()
    # In one step: a waits for nobody, and b, which reads its prompt, can't use what a has.
    engine.add_request("a", prompt(14), greedy(4))
    engine.add_request("b", prompt(14), replace(greedy(4), prompt_logprobs=0))
    engine.step()
    a, b = (engine.requests[name].sequences[0] for name in "ab")
    assert a.blocks[:3] == b.blocks[:3]
    assert a.blocks[3] != b.blocks[3]
    assert engine.pool.num_used == 5
    check(engine)
    done = drain(engine)
    assert done["a"].outputs[0].token_ids == done["b"].outputs[0].token_ids


def test_what_another_is_computing_is_waited_for() -> None:
    """Of prompts that begin alike and come at once, only the first computes what they share."""
    engine = toy_engine(max_num_batched_tokens=8)
    shared = prompt(3 * BLOCK)
    for i in range(4):
        engine.add_request(f"{i}", [*shared, *prompt(3, i)], greedy(4))
    engine.add_request("other", prompt(5, 9), greedy(4))
    done = drain(engine)
    for i in range(4):
        output = done[f"{i}"]
        assert output.metrics.cached_tokens == (3 * BLOCK if i else 0)
        want = reference([*shared, *prompt(3, i)], greedy(4))
        assert output.outputs[0].token_ids == want
    assert done["other"].outputs[0].token_ids == reference(prompt(5, 9), greedy(4))


def test_those_behind_go_first_meanwhile() -> None:
    engine = toy_engine(max_num_batched_tokens=8)
    shared = prompt(3 * BLOCK)
    engine.add_request("first", [*shared, 1], greedy(4))
    engine.step()  # eight tokens of it: a block is to come
    engine.add_request("second", [*shared, 2], greedy(4))
    engine.add_request("other", prompt(3, 9), greedy(4))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["first", "other"]
    done = drain(engine)
    assert done["second"].metrics.cached_tokens == 3 * BLOCK
    for name, tokens in (("first", [*shared, 1]), ("second", [*shared, 2])):
        assert done[name].outputs[0].token_ids == reference(tokens, greedy(4))


def test_those_behind_leave_it_a_row() -> None:
    """Who waits a step for a block doesn't wait for the end of another that came later."""
    engine = toy_engine(max_num_seqs=4)
    shared = prompt(3 * BLOCK)
    engine.add_request("first", [*shared, 1], greedy(9))
    engine.add_request("second", [*shared, 2], replace(drawn(2), max_tokens=9))
    for i in range(3):
        engine.add_request(f"{i}", prompt(3, 9 + i), greedy(9))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["first", "0"]
    engine.step()
    running = [s.request.request_id for s in engine.scheduler.running]
    assert running == ["first", "0", "second", "second"]
    done = drain(engine)
    assert done["second"].metrics.cached_tokens == 3 * BLOCK


def test_each_wait_is_one_step() -> None:
    """Each request shares a block more, and waits for the one before it and no longer."""
    engine = toy_engine()
    shared = prompt(8 * BLOCK)
    for i in range(6):
        engine.add_request(f"{i}", [*shared[: (i + 1) * BLOCK], 50 + i], greedy(9))
    for step in range(6):
        engine.step()
        assert len(engine.scheduler.running) == step + 1
    done = drain(engine)
    assert [done[f"{i}"].metrics.cached_tokens for i in range(6)] == [i * BLOCK for i in range(6)]


@pytest.mark.parametrize("seed", range(6))
def test_as_many_hits_as_one_after_the_other(seed: int) -> None:
    """Whatever comes at once, each block that two prompts share is computed once."""
    rng = random.Random(seed)
    heads = [prompt(rng.randrange(1, 6) * BLOCK, i) for i in range(4)]
    prompts = [
        [
            *rng.choice(heads)[: rng.randrange(BLOCK, 6 * BLOCK)],
            *prompt(rng.randrange(1, 9), 50 + i),
        ]
        for i in range(40)
    ]
    sequential = toy_engine(num_blocks=400)
    for i, tokens in enumerate(prompts):
        sequential.add_request(f"{i}", tokens, greedy(1))
        drain(sequential)
    engine = toy_engine(num_blocks=400, max_num_batched_tokens=rng.randrange(5, 40))
    coming, done = list(enumerate(prompts)), {}
    while coming or engine.has_unfinished:
        for i, tokens in coming[: rng.randrange(6)]:
            engine.add_request(f"{i}", tokens, greedy(rng.randrange(1, 6)))
            coming = coming[1:]
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert engine.scheduler.tree is not None and sequential.scheduler.tree is not None
    assert engine.scheduler.tree.tokens_hit == sequential.scheduler.tree.tokens_hit > 0
    for i, tokens in enumerate(prompts):
        length = len(done[f"{i}"].outputs[0].token_ids)
        assert done[f"{i}"].outputs[0].token_ids == reference(tokens, greedy(length))


def test_nobody_waits_for_what_it_may_not_use() -> None:
    engine = toy_engine()
    shared = prompt(3 * BLOCK)
    for i in range(2):
        options = RequestOptions(cache_salt=f"{i}")
        engine.add_request(f"{i}", [*shared, i], greedy(4), options=options)
    engine.step()
    assert len(engine.scheduler.running) == 2
    drain(engine)


def test_the_hit_rate_counts_each_prompt_once() -> None:
    """What a preempted sequence finds of its own work isn't a hit."""
    engine = toy_engine(num_blocks=9, max_model_len=36, max_num_batched_tokens=8)
    engine.add_request("a", prompt(7), greedy(25))
    engine.add_request("b", prompt(30, 1), greedy(4))
    done = drain(engine)
    assert done["b"].metrics.preemptions > 0
    assert done["b"].metrics.cached_tokens == 0
    assert engine.tree is not None
    assert (engine.tree.tokens_asked, engine.tree.tokens_hit) == (37, 0)
    engine.reset_prefix_cache()
    engine.add_request("c", prompt(10), greedy(1))
    drain(engine)
    engine.add_request("d", prompt(10), drawn(3, 5))
    assert drain(engine)["d"].metrics.cached_tokens == 8
    assert (engine.tree.tokens_asked, engine.tree.tokens_hit) == (57, 8)
    assert engine.stats()["prefix_hit_rate"] == 8 / 57


def test_a_hit_is_not_computed_again() -> None:
    engine = toy_engine()
    engine.add_request("a", prompt(21), greedy(1))
    assert parts(engine) == [("a", 21)]
    engine.add_request("b", prompt(21), greedy(1))
    assert parts(engine) == [("b", 1)]  # 5 blocks of 4 are there
    engine.add_request("c", prompt(20), greedy(1))
    assert parts(engine) == [("c", 4)]  # its last token must be computed, so its last block is
    toy = engine.runtime.runner._forward
    assert isinstance(toy, Toy)
    assert toy.steps[-1].positions.tolist() == [16, 17, 18, 19]


def test_a_newcomer_that_must_wait_gives_up_nothing() -> None:
    """What is cached stays so while the queue's head is looked at again and again."""
    engine = toy_engine(num_blocks=16, max_model_len=64)
    engine.add_request("old", prompt(13, 5), greedy(1))
    drain(engine)
    assert engine.pool.num_idle == 3
    engine.add_request("running", prompt(37), greedy(20))
    engine.step()  # takes 10 blocks: 3 are left, and 3 more are idle
    engine.add_request("waiting", prompt(22, 1), greedy(1))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.waiting] == ["waiting"]
    assert engine.tree is not None
    assert len(engine.tree.match(prompt(13, 5))) == 3
    assert len(drain(engine)) == 2
