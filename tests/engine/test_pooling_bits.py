"""Embeddings are a function of the prompt alone, bit for bit.

bfloat16 (and quantized), native kernels, a decoder with every feature that could change an order of
additions. What is expected comes from the decoder's own rows, in one piece, added up here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine import Engine, PoolingParams
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.sampling import SamplingParams

from ..exactness import bits
from .test_engine_bits import GREEDY, LENGTHS, MAX_LEN, PROMPTS, engine_on
from .toy import check

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

KINDS = ("last", "mean", "cls")
Embeddings = dict[tuple[int, str], list[float]]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return bits.build(torch.bfloat16)


def rows_of(model: Decoder, tokens: list[int]) -> np.ndarray:
    """[T, hidden]: the sequence alone, in one piece, operator by operator."""
    machine = bits.Machine(model)
    found: list[torch.Tensor] = []
    hidden = model.hidden_states

    def noted(step: Any, kv: Any) -> torch.Tensor:
        residual = hidden(step, kv)
        found.append(model.norm(residual).float())
        return residual

    model.hidden_states = noted  # type: ignore[method-assign]
    machine.run([(machine.stream(tokens), len(tokens))])
    del model.hidden_states
    return found[0].numpy()


@pytest.fixture(scope="module")
def expected(model: Decoder) -> Embeddings:
    found: Embeddings = {}
    for i, tokens in enumerate(PROMPTS):
        rows = rows_of(model, tokens)
        total = [0.0] * rows.shape[1]
        for row in rows.tolist():  # Python's floats are float64
            total = [a + b for a, b in zip(total, row, strict=True)]
        mean = [x / len(tokens) for x in total]
        for kind, vector in (
            ("last", rows[-1].tolist()),
            ("mean", mean),
            ("cls", rows[0].tolist()),
        ):
            length = math.sqrt(math.fsum(x * x for x in vector))
            found[i, kind] = [float(np.float32(x / length)) for x in vector]
    return found


def embeddings(engine: Engine, which: list[int] | None = None) -> Embeddings:
    chosen = list(range(len(PROMPTS))) if which is None else which
    for i in chosen:
        for kind in KINDS:
            engine.add_pooling_request(f"{i} {kind}", PROMPTS[i], PoolingParams(kind))  # type: ignore[arg-type]
    found: Embeddings = {}
    while engine.has_unfinished:
        outputs: list[Any] = engine.step()
        for output in outputs:
            if " " in output.request_id:
                name, kind = output.request_id.split()
                found[int(name), kind] = output.embedding
        check(engine)
    assert engine.pool.num_used == 0
    return found


@pytest.mark.parametrize("budget", [17, 64, 2048])
@pytest.mark.parametrize("caching", [True, False])
def test_in_a_batch(model: Decoder, expected: Embeddings, budget: int, caching: bool) -> None:
    engine = engine_on(model, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    assert embeddings(engine) == expected
    assert embeddings(engine) == expected  # after prefix hits, for `last`


def test_alone(model: Decoder, expected: Embeddings) -> None:
    found: Embeddings = {}
    engine = engine_on(model, max_num_seqs=1, enable_prefix_caching=False)
    for i in range(len(PROMPTS)):
        found |= embeddings(engine, [i])
    assert found == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(model: Decoder, expected: Embeddings, chunk: int) -> None:
    some = [6, 9] if chunk == 1 else [0, 6, 9, 12]
    engine = engine_on(model, max_num_seqs=min(chunk, 17), max_num_batched_tokens=chunk)
    want = {key: vector for key, vector in expected.items() if key[0] in some}
    assert embeddings(engine, some) == want


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_with_threads(model: Decoder, expected: Embeddings, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert embeddings(engine_on(model, max_num_batched_tokens=100)) == expected
    finally:
        torch.set_num_threads(before)


def test_beside_requests_that_generate(model: Decoder, expected: Embeddings) -> None:
    """Neither kind changes the other, nor does giving way."""
    for blocks in (160, 14):
        engine = engine_on(model, num_blocks=blocks, max_num_batched_tokens=60)
        for i in (0, 5, 9):
            engine.add_request(str(i), PROMPTS[i], GREEDY)
        engine.step()
        assert embeddings(engine) == expected
    assert engine.scheduler.num_preemptions > 0


def test_a_prompt_as_long_as_the_model_goes(model: Decoder) -> None:
    """And one that generates after it: its last token has a place of its own."""
    tokens = bits.prompt(MAX_LEN, 77)
    engine = engine_on(model, num_blocks=11)
    for kind in ("last", "mean"):
        engine.add_pooling_request(kind, tokens, PoolingParams(kind, normalize=False))  # type: ignore[arg-type]
    done: dict[str, Any] = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
    rows = rows_of(model, tokens)
    assert done["last"].embedding == rows[-1].tolist()
    mean = np.add.accumulate(rows.astype(np.float64))[-1] / MAX_LEN
    assert done["mean"].embedding == mean.astype(np.float32).tolist()


def test_hits_are_those_of_a_generating_request(model: Decoder) -> None:
    """What one kind leaves in the cache, the other finds."""
    engine = engine_on(model)
    embeddings(engine)
    for i, tokens in enumerate(PROMPTS):
        engine.add_request(str(i), tokens, SamplingParams(temperature=0.0, max_tokens=1))
    hits = {}
    while engine.has_unfinished:
        hits |= {int(o.request_id): o.metrics.cached_tokens for o in engine.step()}
    assert hits == {i: (length - 1) // 32 * 32 for i, length in enumerate(LENGTHS)}
