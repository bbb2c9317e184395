"""Salts and pins through the engine: what is found again, against an oracle of whole prefixes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock import LLM
from penstock.engine import Engine, Pin, PoolingParams, RequestOptions
from penstock.errors import RequestError
from penstock.sampling import SamplingParams

from .toy import BLOCK, GREEDY, check, drain, reference, run_one, toy_engine

ONE = SamplingParams(temperature=0.0, max_tokens=1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pinning_engine(num_blocks: int = 16, **kwargs: Any) -> tuple[Engine, Clock]:
    engine, clock = toy_engine(num_blocks, **kwargs), Clock()
    assert engine.pins is not None
    engine.pins.clock = clock
    return engine, clock


def ask(engine: Engine, tokens: list[int], **options: Any) -> int:
    """Run one request; tokens of its prompt that were found."""
    engine.add_request("it", tokens, ONE, options=RequestOptions(**options))
    output = drain(engine)["it"]
    assert output.outputs[0].token_ids == reference(tokens, ONE)
    return output.metrics.cached_tokens


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 60 for i in range(length)]


def flood(engine: Engine, start: int) -> None:
    """Fill the whole cache with prompts that nobody has asked for before."""
    for i in range(engine.pool.num_blocks // 4):
        ask(engine, [start, i, *prompt(15, start + i)])


# ── salts ────────────────────────────────────────────────────────────────────────────────────────


def test_equal_prompts_with_other_salts_share_nothing() -> None:
    engine = toy_engine()
    assert ask(engine, prompt(13)) == 0
    assert ask(engine, prompt(13), cache_salt="a") == 0
    assert ask(engine, prompt(13), cache_salt="b") == 0
    assert ask(engine, prompt(13)) == 12
    assert ask(engine, prompt(13), cache_salt="a") == 12
    assert engine.stats()["cached_blocks"] == 9
    for kind in ("last", "mean"):  # pooling requests have salts, too
        params = PoolingParams(kind)  # type: ignore[arg-type]
        engine.add_pooling_request("c", prompt(13), params, options=RequestOptions(cache_salt="c"))
        assert drain(engine)["c"].metrics.cached_tokens == 0
    assert ask(engine, prompt(13), cache_salt="c") == 12


def test_side_by_side_only_the_same_salt_shares() -> None:
    """At once, where c waits for what b computes, and samples of one."""
    engine = toy_engine()
    for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", "y")):
        engine.add_request(name, prompt(8), GREEDY, options=RequestOptions(cache_salt=salt))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["a", "b", "d"]
    engine.step()
    a, b, c, d = (engine.requests[name].sequences[0].blocks[:2] for name in "abcd")
    assert b == c and not set(a) & set(b) and not set(d) & {*a, *b}
    drain(engine)
    drawn = SamplingParams(n=3, seed=1, max_tokens=4)
    engine.add_request("n", prompt(8), drawn, options=RequestOptions(cache_salt="x"))
    output = drain(engine)["n"]
    assert output.metrics.cached_tokens == 4
    for sample in output.outputs:
        assert sample.token_ids == reference(prompt(8), drawn, index=sample.index)


def test_a_salted_request_finds_its_own_blocks_after_giving_way() -> None:
    engine = toy_engine(8, 32, max_num_batched_tokens=32)
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    for name in "abc":
        engine.add_request(name, prompt(8), greedy, options=RequestOptions(cache_salt=name))
    done = drain(engine)
    assert engine.scheduler.num_preemptions > 0
    want = reference(prompt(8), greedy, max_model_len=32)
    assert [done[name].outputs[0].token_ids for name in "abc"] == [want] * 3


def test_salts_that_nobody_uses_any_more_leave_nothing() -> None:
    engine = toy_engine(16)
    for i in range(500):
        ask(engine, prompt(9), cache_salt=str(i))
    assert engine.tree is not None
    assert len(engine.tree._roots) <= 8  # of two blocks each
    engine.reset_prefix_cache()
    assert not engine.tree._roots


# ── pins ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_pinned_prefix_outlasts_a_flood() -> None:
    engine, clock = pinning_engine()
    ask(engine, prompt(20), pins=(Pin(14, 60),))  # ends within the fourth block
    ask(engine, prompt(20), cache_salt="a")
    assert (engine.stats()["pins"], engine.stats()["pinned_blocks"]) == (1, 3)
    flood(engine, 7)
    assert ask(engine, prompt(20)) == 12
    assert ask(engine, prompt(20), cache_salt="a") == 0
    clock.now = 59
    flood(engine, 8)
    assert ask(engine, prompt(30)) == 12  # and its time starts again
    clock.now = 118
    flood(engine, 9)
    assert ask(engine, prompt(20)) == 12
    clock.now = 200
    assert (engine.stats()["pins"], engine.stats()["pinned_blocks"]) == (0, 0)
    flood(engine, 11)
    assert ask(engine, prompt(20)) == 0
    assert engine.stats()["used_blocks"] == 0


def test_a_pooling_request_pins_and_renews() -> None:
    engine, clock = pinning_engine()
    options = RequestOptions(pins=(Pin(8, 10),))
    engine.add_pooling_request("it", prompt(9), PoolingParams("mean"), options=options)
    drain(engine)
    clock.now = 9
    engine.add_pooling_request("it", prompt(9))
    assert drain(engine)["it"].metrics.cached_tokens == 8
    clock.now = 18
    assert engine.stats()["pinned_blocks"] == 2


def test_its_time_starts_with_the_prompt_not_with_each_token() -> None:
    engine, clock = pinning_engine()
    options = RequestOptions(pins=(Pin(4, 10),))
    engine.add_request("it", prompt(5), SamplingParams(max_tokens=20), options=options)
    for _ in range(12):
        engine.step()
        clock.now += 1
    assert engine.has_unfinished and engine.stats()["pins"] == 0
    drain(engine)


def test_pins_never_cost_a_request_its_blocks() -> None:
    """The same steps, token for token and block for block, with half the cache pinned."""
    runs = []
    for pin in (0, 16):
        engine, _ = pinning_engine(16)
        for i in range(2):
            ask(engine, [i, *prompt(16)], pins=(Pin(pin),))
        assert engine.stats()["pinned_blocks"] == pin // 2
        for i in range(6):
            engine.add_request(str(i), prompt(10, i), SamplingParams(seed=i, max_tokens=40))
        trace = []
        while engine.has_unfinished:
            trace += [output.outputs[0].token_ids for output in engine.step()]
            trace.append([len(s.blocks) for s in engine.scheduler.running])
            check(engine)
        runs.append((trace, engine.scheduler.num_preemptions))
        assert engine.stats()["pins"] == 0  # all of it was needed
    assert runs[0] == runs[1] and runs[0][1] > 0


def test_one_that_needs_the_whole_cache_gets_it() -> None:
    engine, _ = pinning_engine(16)
    for i in range(4):
        ask(engine, [i, *prompt(8)], pins=(Pin(8),))
    assert engine.stats()["pinned_blocks"] == 8
    output = run_one(engine, prompt(40, 5), SamplingParams(temperature=0.0, max_tokens=None))
    assert len(output.outputs[0].token_ids) == 24 and output.metrics.preemptions == 0


def test_a_pin_yields_under_a_window() -> None:
    """The embedded model's: the first blocks of the pinned prompt are passed by while it runs."""
    llm = LLM(max_attention_window=64, num_blocks=12, max_num_batched_tokens=64, max_num_seqs=8)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    prompts = [[5 + i % 50 for i in range(106)], *([10 + i] * 40 for i in range(4))]
    options = [RequestOptions(pins=(Pin(96),)), *[None] * 4]
    pinned = [x.outputs[0].token_ids for x in llm.generate(prompts, params, options=options)]
    assert llm.stats()["used_blocks"] == 0
    assert [x.outputs[0].token_ids for x in llm.generate(prompts, params)] == pinned


def test_reset_drops_pins() -> None:
    engine, _ = pinning_engine()
    ask(engine, prompt(9), pins=(Pin(8),))
    engine.reset_prefix_cache()
    stats = engine.stats()
    assert (stats["pins"], stats["pinned_blocks"], stats["cached_blocks"]) == (0, 0, 0)
    assert ask(engine, prompt(9)) == 0


def test_pins_that_can_not_take_effect() -> None:
    engine = toy_engine(16)
    with pytest.raises(RequestError, match=r"9 blocks of 4 tokens .* 16 blocks at most 8"):
        engine.add_request("a", prompt(40), ONE, options=RequestOptions(pins=(Pin(36),)))
    engine.add_request("b", prompt(35), ONE, options=RequestOptions(pins=(Pin(1000),)))
    drain(engine)
    assert engine.stats()["pinned_blocks"] == 8  # all of that prompt's
    off = toy_engine(enable_prefix_caching=False)
    with pytest.raises(RequestError, match=r"pin of 4 tokens can't take .*enable_prefix_caching"):
        off.add_pooling_request("a", prompt(8), options=RequestOptions(pins=(Pin(4),)))
    assert off.stats()["pins"] == 0 and not off.has_unfinished
    off.reset_prefix_cache()


# ── hits, against an oracle ──────────────────────────────────────────────────────────────────────


def test_every_hit_and_the_rate() -> None:
    """A cache that holds all: a request finds what some before it with its salt began with."""
    rng = random.Random(0)
    engine, clock = pinning_engine(2000)
    seen: set[tuple[str | None, tuple[int, ...]]] = set()
    asked = found = 0
    for _ in range(300):
        clock.now += rng.random()
        salt = rng.choice([None, None, "a", "b"])
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        whole = [(salt, tuple(tokens[:n])) for n in range(BLOCK, len(tokens) + 1, BLOCK)]
        expected = 0
        for at, prefix in enumerate(whole):
            if prefix not in seen or (at + 1) * BLOCK == len(tokens):
                break
            expected = (at + 1) * BLOCK
        hit = ask(engine, tokens, cache_salt=salt, pins=(Pin(rng.randint(0, 9), 5.0),))
        assert hit == expected
        seen |= set(whole)
        asked, found = asked + len(tokens), found + expected
    assert 0 < found < asked
    assert engine.stats()["prefix_hit_rate"] == found / asked


def test_pinned_prefixes_are_always_hit() -> None:
    """A small cache under floods: whatever is pinned, in force and wasn't too much, is found."""
    rng = random.Random(1)
    engine, clock = pinning_engine(24)
    until: dict[tuple[str, int], float] = {}  # at most 4 heads of 2 blocks: less than half
    hits = 0
    for step in range(300):
        clock.now += rng.random()
        key = rng.choice("ab"), rng.randrange(2)
        head = prompt(2 * BLOCK, 20 + key[1])
        before = until.get(key, 0.0) > clock.now
        pin = rng.random() < 0.5
        tokens = [*head, step % 60, rng.randrange(60)]
        found = ask(engine, tokens, cache_salt=key[0], pins=(Pin(8 if pin else 0, 2.0),))
        assert found == 2 * BLOCK or not before
        hits += before
        if pin or before:
            until[key] = clock.now + 2.0
        if rng.random() < 0.3:
            flood(engine, step % 20)
    assert 20 < hits < 280
    clock.now += 2.0
    stats = engine.stats()
    assert (stats["pins"], stats["used_blocks"]) == (0, 0)
