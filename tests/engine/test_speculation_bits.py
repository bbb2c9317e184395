"""Promise 2 with drafts: the logits of every token that counts, and the cache, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine import Engine
from penstock.engine.request import Sequence
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


def held(engine: Engine, sequence: Sequence) -> list[Tensor]:
    """The bytes of the cache's full blocks that a sequence has computed."""
    full = sequence.num_computed // engine.scheduler.block_size
    parts = [part for layer in engine.runtime.runner.kv for part in layer]
    return [part.view(torch.uint8)[sequence.blocks[:full]].clone() for part in parts]


@pytest.mark.parametrize("kind", [Guesser, TreeGuesser])
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8", "int4"], indirect=True)
def test_after_each_step_the_cache_is_as_without(
    model: Decoder,
    kv: str,
    plain: tuple[dict[Key, Tensor], dict[str, list[int]]],
    kind: type[Guesser],
) -> None:
    """As many blocks in use at each length, and the same bytes in those that are full."""
    seen: dict[tuple[str, int], tuple[int, list[Tensor]]] = {}
    for guesses in (False, True):
        engine = engine_over(kv, model, enable_prefix_caching=False)
        if guesses:
            speculate(engine, kind(follows(plain[1]), 0.4), 7)
        for name in ("3", "8"):
            engine.add_request(name, SOME[name], PARAMS)
        compared = 0
        while engine.has_unfinished:
            engine.step()
            check(engine)
            for sequence in engine.scheduler.running:
                key = sequence.request.request_id, sequence.num_computed
                state = len(sequence.blocks), held(engine, sequence)
                if not guesses:
                    seen[key] = state
                    continue
                compared += 1
                blocks, parts = seen[key]
                assert blocks == state[0]
                assert all(torch.equal(a, b) for a, b in zip(parts, state[1], strict=True))
        assert compared > 20 or not guesses
