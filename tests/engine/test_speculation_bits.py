"""Promise 2 with drafts: the logits of every token that counts, and the cache, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM
from penstock.engine import Engine
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.sampling import SamplingParams, SequenceSampling

from ..exactness import bits
from .guessing import Guesser, Next, TreeGuesser, speculate
from .test_engine_bits import PROMPTS, Key, assert_same, named, run
from .test_kv_formats import engine_over
from .toy import check

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

PARAMS = SamplingParams(temperature=0.0, max_tokens=40)
SOME = named(PROMPTS[:9])


@pytest.fixture(scope="module")
def model() -> Decoder:
    return bits.build(torch.bfloat16)


@pytest.fixture(scope="module", params=["bfloat16", "int8", "fp8", "int4", "kivi"])
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(model: Decoder, kv: str) -> tuple[dict[Key, Tensor], dict[str, list[int]]]:
    """Logits and texts of an engine that guesses nothing."""
    logits, done = run(engine_over(kv, model), SOME, PARAMS)
    return logits, {name: SOME[name] + output.outputs[0].token_ids for name, output in done.items()}


def follows(texts: dict[str, list[int]]) -> Next:
    """What comes after some tokens of these texts; nothing after any others."""

    def after(tokens: Any, state: SequenceSampling) -> int:
        for text in texts.values():
            if text[: len(tokens)] == tokens and len(text) > len(tokens):
                return text[len(tokens)]
        return 3

    return after


@pytest.mark.parametrize("kind", [Guesser, TreeGuesser])
@pytest.mark.parametrize("wrong", [0.0, 0.3])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 40}, {"num_blocks": 24, "max_num_batched_tokens": 64}],
    ids=str,
)
def test_logits(
    model: Decoder,
    kv: str,
    plain: tuple[dict[Key, Tensor], dict[str, list[int]]],
    options: dict[str, Any],
    wrong: float,
    kind: type[Guesser],
) -> None:
    if kind is TreeGuesser and kv == "kivi":
        pytest.skip("trees don't go with a window: config refuses them")
    want, texts = plain
    engine = engine_over(kv, model, **options)
    speculation = speculate(engine, kind(follows(texts), wrong), 7)
    assert_same(run(engine, SOME, PARAMS, texts)[0], want)
    assert speculation.counts.accepted_tokens > (100 if kind is Guesser else 40)


Rows = list[Tensor]
"""The bits that the cache holds of some tokens, token by token: keys, values and scales."""


def held(engine: Engine, blocks: list[int], count: int) -> Rows:
    """The rows of the first `count` tokens in these blocks (shapes: cache/layouts/paged.py)."""

    def rows(part: Tensor, *axes: int) -> Tensor:
        """axes: those of blocks and of the tokens in them, outer ones first."""
        bits = part.view(torch.int16 if part.itemsize == 2 else torch.uint8)[blocks]
        rest = [axis for axis in range(bits.dim()) if axis not in axes]
        return bits.permute(*axes, *rest).flatten(0, len(axes) - 1)[:count].clone()

    found = []
    for key, value, *scales in engine.runtime.runner.kv:
        pairs = value.dtype is torch.uint8  # int4: the innermost are dimensions, not tokens
        found += [rows(key, 0, 2, 4), rows(value, 0, 3, 4 if pairs else 5)]
        found += [rows(scale, 0, scale.dim() - 1) for scale in scales]
    return found


def begins(rows: Rows, count: int, want: Rows, first: int = 0) -> bool:
    """Whether they are the `count` rows of `want` from the first on."""
    return all(
        len(a) == count and torch.equal(a, b[first : first + count])
        for a, b in zip(rows, want, strict=True)
    )


def step(engine: Engine) -> list[tuple[str, int, Rows]]:
    """One step; what is held of each sequence that goes on: name, tokens computed, their rows.

    Its blocks are as many as these need: those that guesses had are given back.
    """
    engine.step()
    check(engine)
    size, running = engine.scheduler.block_size, engine.scheduler.running
    assert engine.pool.num_used == len({block for s in running for block in s.blocks})
    for s in running:
        assert len(s.blocks) == -(-s.num_computed // size)
    return [
        (s.request.request_id, s.num_computed, held(engine, s.blocks, s.num_computed))
        for s in running
    ]


def longest(
    engine: Engine, prompts: dict[str, list[int]], params: SamplingParams = PARAMS
) -> dict[str, Rows]:
    """What an engine that guesses nothing has of each text in the end; until then, the same."""
    found: dict[str, Rows] = {}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished:
        for name, count, rows in step(engine):
            before = found.get(name, [part[:0] for part in rows])
            assert begins([part[: len(before[0])] for part in rows], len(before[0]), before)
            assert count >= len(before[0])
            found[name] = rows
    return found


def audit(
    engine: Engine,
    prompts: dict[str, list[int]],
    want: dict[str, Rows],
    params: SamplingParams = PARAMS,
) -> int:
    """Hold what an engine has after each step against `want`; how often that was done."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    compared = 0
    while engine.has_unfinished:
        for name, count, rows in step(engine):
            assert begins(rows, count, want[name]), (name, count)
            compared += 1
    assert engine.pool.num_used == 0
    return compared


def audit_tree(engine: Engine, texts: dict[str, list[int]], want: dict[str, Rows]) -> int:
    """The same of the blocks that are kept for prompts to come; how many there are."""
    assert engine.tree is not None
    size, found = engine.scheduler.block_size, 0
    waiting = [(node, list[int]()) for node in engine.tree._roots.values()]
    while waiting:
        node, before = waiting.pop()
        tokens = [*before, *node.key]
        waiting += [(child, tokens) for child in node.children.values()]
        if node.block < 0:  # a root
            continue
        name = next(name for name, text in texts.items() if text[: len(tokens)] == tokens)
        assert begins(held(engine, [node.block], size), size, want[name], len(before))
        found += 1
    return found


WITHOUT_KIVI = pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8", "int4"], indirect=True)


@pytest.fixture(scope="module")
def rows(model: Decoder, kv: str) -> dict[str, Rows]:
    """Of each prompt, by an engine that guesses nothing and has room for all."""
    return longest(engine_over(kv, model, enable_prefix_caching=False), SOME)


@pytest.mark.parametrize("kind", [Guesser, TreeGuesser])
@WITHOUT_KIVI
def test_after_each_step_the_cache_is_as_without(
    model: Decoder,
    kv: str,
    plain: tuple[dict[Key, Tensor], dict[str, list[int]]],
    rows: dict[str, Rows],
    kind: type[Guesser],
) -> None:
    """Every row that counts, those of a block that has begun too, and no block beyond."""
    engine = engine_over(kv, model, enable_prefix_caching=False)
    counts = speculate(engine, kind(follows(plain[1]), 0.4), 7).counts
    assert audit(engine, {name: SOME[name] for name in ("3", "8")}, rows) > 20
    assert counts.accepted_at[1] > 5 and counts.accepted_tokens < counts.draft_tokens


@pytest.mark.parametrize("kind", [Guesser, TreeGuesser])
@pytest.mark.parametrize(
    "options",
    [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.01}],
    ids=str,
)
@WITHOUT_KIVI
def test_after_giving_way_the_cache_is_as_without(
    model: Decoder,
    kv: str,
    plain: tuple[dict[Key, Tensor], dict[str, list[int]]],
    rows: dict[str, Rows],
    options: dict[str, Any],
    kind: type[Guesser],
) -> None:
    """Sequences share blocks, lose them, and compute, find or fetch them again."""
    engine = engine_over(kv, model, num_blocks=18, max_num_batched_tokens=64, **options)
    counts = speculate(engine, kind(follows(plain[1]), 0.4), 7).counts
    names = ["8", "7", "6", "8", "7", "0", "6"]
    chosen = {f"{name}{'x' * at}": SOME[name] for at, name in enumerate(names)}
    twice = {name: rows[name[0]] for name in chosen}
    assert audit(engine, chosen, twice) > 100
    assert counts.accepted_at[1] > 9 and counts.accepted_tokens < counts.draft_tokens
    assert engine.stats()["preemptions"] > 0 and engine.stats()["prefix_hit_rate"] > 0
    assert (engine.preemption.num_swap > 0) == (options["preemption_mode"] == "swap")
    assert audit_tree(engine, plain[1], rows) > 5


METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model"},
    "self": {"method": "self"},
    "medusa": {"method": "medusa"},
    "eagle": {"method": "eagle"},
}
READ = "Once upon a time, there was a little girl named Lily. She loved to play with her ball. "


@pytest.mark.parametrize("method", METHODS)
@WITHOUT_KIVI
def test_with_those_who_guess_by_models(kv: str, method: str) -> None:
    """The embedded model, and what comes along with it; in want of blocks."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": kv, "max_model_len": 256}
    reference = LLM(**settings, enable_prefix_caching=False).engine
    read = reference.runtime.tokenizer
    assert read is not None
    texts = [READ * 3, READ * 2 + "One day,", READ + "The dog was", "Tom and his mom", READ * 3]
    prompts = named([read.encode(text) for text in texts])
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    want = longest(reference, prompts, params)
    engine = LLM(
        **settings, num_blocks=10, max_num_batched_tokens=64, max_num_seqs=8,
        preemption_mode="recompute",
        speculative_config={**METHODS[method], "adaptive": False},
    ).engine  # fmt: skip
    assert audit(engine, prompts, want, params) > 100
    stats = engine.stats()
    assert stats["spec_decode_num_accepted_tokens_per_pos"][1] > 0
    assert stats["spec_decode_num_accepted_tokens"] < stats["spec_decode_num_draft_tokens"]
    assert stats["preemptions"] > 0 and stats["prefix_hit_rate"] > 0
