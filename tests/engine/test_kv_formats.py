"""Promise 2 through the engine over caches of four bits: batches, chunks, samples, giving way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOutput
from penstock.errors import ConfigError
from penstock.kernels import native
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import Decoder
from penstock.runtime import Program, Runtime
from penstock.runtime.loader import runner_over
from penstock.runtime.sizing import layout_of
from penstock.sampling import BeamSearchParams

from ..exactness import bits
from .test_engine_bits import GREEDY, MAX_LEN, PROMPTS, Key, assert_same, named, run

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")


def engine_over(kv: str, model: Decoder, num_blocks: int = 160, **kwargs: Any) -> Engine:
    """With as many places for recent tokens as a loaded engine has, and NaN in all of them."""
    kwargs.setdefault("max_num_seqs", len(PROMPTS))
    window = {"kv_recent_window": bits.WINDOW} if kv == "kivi" else {}
    config = EngineConfig.of(kv_cache_dtype=kv, **window, **kwargs)
    spec = ModelSpec("bits", model.spec, (), None, None, ())
    loaded = LoadedModel(model, spec, model.dtype, MAX_LEN, {}, ())
    layout = layout_of(config, loaded)
    cache = layout.allocate(num_blocks)
    for layer in cache:
        for part in layer[:6]:
            part.view(torch.uint8).fill_(0xFF)
    runner = runner_over(Program(model, cache), cache, layout)
    return Engine(config, Runtime(loaded, None, layout, num_blocks, runner))


@pytest.fixture(scope="module", params=["int4", "kivi"])
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return bits.build(torch.bfloat16)


@pytest.fixture(scope="module")
def alone(model: Decoder, kv: str) -> dict[Key, torch.Tensor]:
    """Each prompt in an engine of its own, in one piece; and held against the decoder."""
    logits: dict[Key, torch.Tensor] = {}
    for name, prompt in named(PROMPTS).items():
        engine = engine_over(kv, model, max_num_seqs=1, enable_prefix_caching=False)
        logits |= run(engine, {name: prompt}, GREEDY)[0]
    tokens = PROMPTS[0] + [int(logits["0", 0, i].argmax()) for i in range(11)]
    whole = bits.alone(model, tokens, kv=kv)
    for i in range(12):
        assert torch.equal(logits["0", 0, i], whole[299 + i])
    return logits


@pytest.mark.parametrize("budget", [17, 64, 2048])
def test_in_a_batch_of_17(
    model: Decoder, kv: str, alone: dict[Key, torch.Tensor], budget: int
) -> None:
    engine = engine_over(kv, model, max_num_batched_tokens=budget)
    assert_same(run(engine, named(PROMPTS), GREEDY)[0], alone)
    got, done = run(engine, named(PROMPTS), GREEDY)  # again, with hits where they are allowed
    assert_same(got, alone)
    hits = sum(output.metrics.cached_tokens for output in done.values())
    assert (hits > 0) == (kv == "int4")


def test_after_giving_way(model: Decoder, kv: str, alone: dict[Key, torch.Tensor]) -> None:
    engine = engine_over(kv, model, num_blocks=11, max_num_batched_tokens=40)
    got, done = run(engine, named(PROMPTS), GREEDY)
    assert sum(output.metrics.preemptions for output in done.values()) > 0
    assert_same(got, alone)


@pytest.mark.parametrize("kv", ["int4"], indirect=True)
def test_after_being_swapped_out(model: Decoder, kv: str, alone: dict[Key, torch.Tensor]) -> None:
    engine = engine_over(
        kv, model, num_blocks=11, max_num_batched_tokens=40, preemption_mode="swap",
        swap_space=0.001, enable_prefix_caching=False,
    )  # fmt: skip
    got, _ = run(engine, named(PROMPTS), GREEDY)
    assert engine.preemption.num_swap > 0
    assert_same(got, alone)


@pytest.mark.parametrize("n", [2, 6])
def test_samples_of_one_request(model: Decoder, kv: str, n: int) -> None:
    """They share the window of their prompt, copy its last block, and leave it one by one."""
    params = SamplingParams(n=n, seed=5, temperature=1.1, max_tokens=120)
    prompts = {"a": PROMPTS[9], "b": PROMPTS[7]}
    want, done = run(engine_over(kv, model), prompts, params)
    assert len({tuple(sample.token_ids) for sample in done["a"].outputs}) == n
    for sample in done["a"].outputs:  # each held against the decoder, without an engine
        tokens = PROMPTS[9] + list(sample.token_ids[:-1])
        whole = bits.alone(model, tokens, kv=kv)
        for i in (0, 1, 40, 119):
            assert torch.equal(want["a", sample.index, i], whole[99 + i])
    tight = engine_over(kv, model, num_blocks=12, max_num_seqs=12, max_num_batched_tokens=20)
    got, again = run(tight, prompts, params)
    assert again["a"].metrics.preemptions + again["b"].metrics.preemptions > 0
    assert_same(got, want)


def test_places_are_given_back(model: Decoder) -> None:
    """However many requests come and go, places are found; at the end a few blocks still have
    one, and the next that need it take it."""
    engine = engine_over("kivi", model, max_num_seqs=3, max_num_batched_tokens=32)
    recent = engine.runtime.runner.recent
    assert recent is not None
    for _ in range(2):
        run(engine, named(PROMPTS), GREEDY)
        assert recent.num_used <= engine.runtime.layout.max_recent_blocks < 160


def test_beams_leave_what_they_share_together(model: Decoder) -> None:
    """However long they go on, and one that isn't theirs beside them finds its places."""
    search = BeamSearchParams(beam_width=2, max_tokens=320, ignore_eos=True)
    engine = engine_over("kivi", model, max_num_seqs=3, max_num_batched_tokens=32)
    recent = engine.runtime.runner.recent
    assert recent is not None
    engine.add_request("beams", PROMPTS[3][:8], search)
    engine.add_request("other", PROMPTS[4][:8], replace(GREEDY, max_tokens=320))
    used, done = 0, {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        used = max(used, recent.num_used)
    assert [output.error for output in done.values()] == [None, None]
    each = (bits.WINDOW + 31) // bits.BLOCK + 2  # a window, a block that is begun, one copied
    assert used <= 3 * each < engine.runtime.layout.max_recent_blocks
    roomy = engine_over("kivi", model)
    roomy.add_request("beams", PROMPTS[3][:8], search)
    alone: list[RequestOutput] = []
    while roomy.has_unfinished:
        alone += roomy.step()
    assert done["beams"].outputs == alone[-1].outputs


@pytest.mark.parametrize("kv", ["int4", "kivi"])
def test_by_name(kv: str) -> None:
    """The embedded model over each cache: text, bytes, and no room in the swap space of kivi."""
    llm = LLM(dtype="bfloat16", kv_cache_dtype=kv, max_num_seqs=4, num_blocks=64)
    layout = llm.engine.runtime.layout
    assert layout.stored == kv
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts = ["Once upon a time", "The little dog", "One day, Lily and Tom went to the park. " * 12]
    together = [o.outputs[0].token_ids for o in llm.generate(texts, params)]
    one = LLM(dtype="bfloat16", kv_cache_dtype=kv, max_num_seqs=1, num_blocks=64)
    assert [one.generate([t], params)[0].outputs[0].token_ids for t in texts] == together
    assert (llm.engine.swap_space.num_slots == 0) == (kv == "kivi")
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{kv}' is widened to bfloat16"):
        LLM(dtype="float32", kv_cache_dtype=kv)
