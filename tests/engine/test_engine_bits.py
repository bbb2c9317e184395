"""Promise 2 through the engine: the logits that a request is sampled from, bit for bit.

bfloat16, native kernels, a decoder with every feature that could change an order of additions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOutput
from penstock.engine.request import Sequence
from penstock.kernels import native
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import Decoder
from penstock.runtime import Program, Runner, Runtime
from penstock.runtime.device import CPU
from penstock.sampling import Sampled, SamplingParams, SequenceSampling
from penstock.speculate import ROOT

from ..exactness import bits
from .toy import check

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

LENGTHS = [300, 1, 2, 3, 31, 32, 33, 64, 65, 100, 255, 256, 257, 270, 17, 16, 15]
PROMPTS = [bits.prompt(length, 7 + i) for i, length in enumerate(LENGTHS)]
MAX_LEN = 352
NEW = 12

Key = tuple[str, int, int]  # request, sample, position in its output


class Recorder:
    """Stands before the sampler and keeps the logits of every row."""

    def __init__(self, engine: Engine, texts: dict[str, list[int]] | None = None) -> None:
        """texts: what comes, by request: rows of other guesses aren't kept. None: all rows are."""
        self.engine = engine
        self.texts = texts
        self.sampler = engine.sampler
        self.logits: dict[Key, Tensor] = {}
        engine.sampler = self  # type: ignore[assignment]

    def prepare(self, rows: list[SequenceSampling]) -> None:
        self.sampler.prepare(rows)

    def takes_largest(self, rows: list[SequenceSampling]) -> bool:
        return False  # the logits are what is looked at

    def __call__(self, logits: Tensor, rows: list[SequenceSampling]) -> Sampled:
        owners = {
            id(state): (name, s.index)
            for name, request in self.engine.requests.items()
            for s in request.sequences
            for state, way in zip(s.states, ways_of(s), strict=True)
            if self.texts is None or self.texts[name][: len(s.tokens + way)] == s.tokens + way
        }
        for row, state in zip(logits, rows, strict=True):
            assert row.isfinite().all()
            if id(state) not in owners:
                continue
            self.logits[(*owners[id(state)], state.num_generated)] = row.clone()
        return self.sampler(logits, rows)


def engine_on(model: Decoder, num_blocks: int = 160, **kwargs: Any) -> Engine:
    layout = CPU.layout(model.spec.layers, model.dtype, 32)
    kv = layout.allocate(num_blocks)
    for pair in kv:
        for tensor in pair:
            tensor.fill_(float("nan"))  # what nobody wrote must not be read
    spec = ModelSpec("bits", model.spec, (), None, None, ())
    loaded = LoadedModel(model, spec, model.dtype, MAX_LEN, {}, ())
    kwargs.setdefault("max_num_seqs", len(PROMPTS))
    runner = Runner(Program(model, kv), kv)
    return Engine(EngineConfig.of(**kwargs), Runtime(loaded, None, layout, num_blocks, runner))


def ways_of(sequence: Sequence) -> list[list[int]]:
    """The guesses before each row of a sequence."""
    if sequence.draft is None:
        return [[]]
    found: list[list[int]] = [[]]
    draft = sequence.draft
    parents = range(ROOT, len(draft) - 1) if draft.parents is None else draft.parents
    for token, parent in zip(draft.tokens, parents, strict=True):
        found.append([*found[parent + 1], token])
    return found


def run(
    engine: Engine,
    prompts: dict[str, list[int]],
    params: SamplingParams,
    texts: dict[str, list[int]] | None = None,
) -> tuple[dict[Key, Tensor], dict[str, RequestOutput]]:
    recorder = Recorder(engine, texts)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
        check(engine)
    assert engine.pool.num_used == 0
    engine.sampler = recorder.sampler
    return recorder.logits, done


def named(prompts: list[list[int]]) -> dict[str, list[int]]:
    return {str(i): prompt for i, prompt in enumerate(prompts)}


def assert_same(got: dict[Key, Tensor], want: dict[Key, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, row in want.items():
        assert torch.equal(got[key], row), key


GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return bits.build(torch.bfloat16)


@pytest.fixture(scope="module")
def alone(model: Decoder) -> dict[Key, Tensor]:
    """Each prompt in an engine of its own, in one piece."""
    logits: dict[Key, Tensor] = {}
    for name, prompt in named(PROMPTS).items():
        engine = engine_on(model, max_num_seqs=1, enable_prefix_caching=False)
        logits |= run(engine, {name: prompt}, GREEDY)[0]
    return logits


def test_the_engine_computes_what_the_decoder_does(
    model: Decoder, alone: dict[Key, Tensor]
) -> None:
    for name in ("0", "1", "6"):
        tokens = PROMPTS[int(name)]
        output = [int(alone[name, 0, i].argmax()) for i in range(NEW)]
        whole = bits.alone(model, tokens + output[:-1])
        for i in range(NEW):
            assert torch.equal(alone[name, 0, i], whole[len(tokens) - 1 + i])


@pytest.mark.parametrize("budget", [17, 64, 2048])
@pytest.mark.parametrize("caching", [True, False])
def test_in_a_batch_of_17(
    model: Decoder, alone: dict[Key, Tensor], budget: int, caching: bool
) -> None:
    engine = engine_on(model, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    assert_same(run(engine, named(PROMPTS), GREEDY)[0], alone)


@pytest.mark.parametrize("chunk", [1, 7])
def test_in_small_chunks(model: Decoder, alone: dict[Key, Tensor], chunk: int) -> None:
    some = [6, 9] if chunk == 1 else [0, 6, 9, 12]
    engine = engine_on(model, max_num_seqs=chunk, max_num_batched_tokens=chunk)
    got, _ = run(engine, {str(i): PROMPTS[i] for i in some}, GREEDY)
    assert_same(got, {key: row for key, row in alone.items() if int(key[0]) in some})


def test_without_chunks(model: Decoder, alone: dict[Key, Tensor]) -> None:
    engine = engine_on(model, max_num_batched_tokens=MAX_LEN, enable_chunked_prefill=False)
    assert_same(run(engine, named(PROMPTS), GREEDY)[0], alone)


def test_with_a_prefix_hit(model: Decoder, alone: dict[Key, Tensor]) -> None:
    engine = engine_on(model)
    run(engine, named(PROMPTS), GREEDY)
    got, done = run(engine, named(PROMPTS), GREEDY)
    assert_same(got, alone)
    hits = [done[str(i)].metrics.cached_tokens for i in range(len(PROMPTS))]
    assert hits == [(length - 1) // 32 * 32 for length in LENGTHS]


def test_after_giving_way(model: Decoder, alone: dict[Key, Tensor]) -> None:
    """11 blocks hold one sequence of full length: prompts in chunks run out of them."""
    for caching in (True, False):
        engine = engine_on(
            model, num_blocks=11, enable_prefix_caching=caching, max_num_batched_tokens=40
        )
        got, done = run(engine, named(PROMPTS), GREEDY)
        assert sum(output.metrics.preemptions for output in done.values()) > 0
        assert_same(got, alone)


def test_samples_of_one_request(model: Decoder) -> None:
    """n samples share the prompt, copy its last block, and are what they are one by one."""
    params = SamplingParams(n=6, seed=5, temperature=1.1, max_tokens=30)
    prompt = {"a": PROMPTS[9]}
    want, done = run(engine_on(model), prompt, params)
    assert len({tuple(sample.token_ids) for sample in done["a"].outputs}) == 6
    single, _ = run(
        engine_on(model), prompt, SamplingParams(seed=5, temperature=1.1, max_tokens=30)
    )
    assert_same({key: row for key, row in want.items() if key[1] == 0}, single)
    tight = engine_on(model, num_blocks=12, max_num_batched_tokens=20)
    got, again = run(tight, prompt, params)
    assert again["a"].metrics.preemptions > 0
    assert_same(got, want)
    assert [s.token_ids for s in again["a"].outputs] == [s.token_ids for s in done["a"].outputs]


def test_beside_sampled_and_penalised_neighbours(model: Decoder, alone: dict[Key, Tensor]) -> None:
    """What others ask of the sampler changes neither a row's logits nor its token."""
    engine = engine_on(model)
    recorder = Recorder(engine)
    others = [
        SamplingParams(temperature=2.0, seed=1, max_tokens=NEW),
        SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.3, max_tokens=NEW),
        SamplingParams(temperature=0.0, logit_bias={3: 100.0}, logprobs=5, max_tokens=NEW),
        SamplingParams(temperature=0.5, n=2, prompt_logprobs=1, max_tokens=NEW),
    ]
    for i, prompt in enumerate(PROMPTS[:12]):
        engine.add_request(str(i), prompt, GREEDY if i % 2 else others[i // 2 % 4])
    while engine.has_unfinished:
        engine.step()
    greedy = [i for i in range(12) if i % 2]
    assert_same(
        {key: row for key, row in recorder.logits.items() if int(key[0]) in greedy},
        {key: row for key, row in alone.items() if int(key[0]) in greedy},
    )


def test_logprobs_are_those_of_the_logits(model: Decoder, alone: dict[Key, Tensor]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=3, prompt_logprobs=2)
    engine = engine_on(model, max_num_batched_tokens=40)
    _, done = run(engine, {"0": PROMPTS[0], "6": PROMPTS[6]}, params)
    for name, output in done.items():
        (sample,) = output.outputs
        assert sample.logprobs is not None and output.prompt_logprobs is not None
        total = 0.0
        for i, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
            want = alone[name, 0, i].log_softmax(-1)
            top = want.topk(3).indices.tolist()
            assert list(entry) == top and entry[token].rank == 1
            assert [entry[t].logprob for t in top] == want[top].tolist()
            total += entry[token].logprob
        assert sample.cumulative_logprob == total
        prompt = output.prompt_token_ids
        rows = bits.alone(model, prompt).log_softmax(-1)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for i in range(1, len(prompt)):
            found, want = output.prompt_logprobs[i], rows[i - 1]
            assert found is not None
            assert found[prompt[i]].logprob == want[prompt[i]].item()
            assert found[prompt[i]].rank == int((want > want[prompt[i]]).sum()) + 1
            assert set(want.topk(2).indices.tolist()) <= set(found)


def test_prompt_logprobs_after_a_hit_and_after_giving_way(model: Decoder) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
    prompts = {"a": PROMPTS[9], "b": PROMPTS[10]}
    want = run(engine_on(model, enable_prefix_caching=False), prompts, params)[1]
    cached = engine_on(model)
    run(cached, prompts, GREEDY)
    # a's 352 tokens push b out while its prompt comes in
    tight = engine_on(model, num_blocks=11, max_num_seqs=2, max_num_batched_tokens=9)
    tight.add_request("first", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40))
    tight.step()
    for engine in (cached, tight):
        got = run(engine, prompts, params)[1]
        for name in prompts:
            assert got[name].prompt_logprobs == want[name].prompt_logprobs
            assert got[name].metrics.cached_tokens == 0
