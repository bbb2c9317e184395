"""Models whose layers have states in place of keys and values: promise 2, what prompts begin with,
and whose each slot is.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM
from penstock.cache import Node, StateCache, StateLayout
from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOptions
from penstock.engine.options import Pin
from penstock.engine.states import States
from penstock.errors import ConfigError, OutOfCacheError, UnsupportedModelError
from penstock.kernels import native
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import Decoder
from penstock.pipeline.build import BuildOptions, build
from penstock.runtime import Program, Runner, Runtime
from penstock.runtime.device import CPU, Device
from penstock.sampling import BeamSearchParams, SamplingParams
from penstock.step import KV, Step

from ..exactness import bits
from ..models.tiny import Tiny, make_tiny
from .test_engine_bits import GREEDY, Key, Recorder, assert_same, named
from .toy import check

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

SIZE, MAX_LEN, SEQS, KNOWN = 32, 352, 8, 20
LENGTHS = [190, 1, 30, 64, 5, 95, 58, 126]
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
PROMPTS = named([bits.prompt(length, 7 + i) for i, length in enumerate(LENGTHS)])


FORMS = [f"bfloat16{bits.STATED}", f"w8a8{bits.STATED}", f"bfloat16{bits.CONVOLVED}"]
FORMS += [f"bfloat16{bits.SCANNED}", f"bfloat16{bits.BESIDE}"]


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return bits.build(torch.bfloat16, request.param)


def engine_on(
    model: Decoder, blocks: int = 160, known: int = KNOWN, breaks: bool = False, **kwargs: Any
) -> Engine:
    """breaks: every fifth step raises once it has run."""
    kwargs.setdefault("max_num_seqs", SEQS)
    config = EngineConfig.of(max_model_len=MAX_LEN, **kwargs)
    guesses = 0 if config.speculative is None else 12
    layers, slots = model.spec.layers, 2 * config.scheduler.max_num_seqs + known + guesses
    shapes = tuple(x.attention.state_shapes for x in layers)
    states = StateLayout(shapes, model.dtype, slots, guesses)
    layout = replace(CPU.layout(layers, model.dtype, SIZE), states=states)
    kv = layout.allocate(blocks)
    for part in (part for layer in kv for part in layer):
        part.view(torch.uint8).fill_(0xFF)  # NaN: what nobody wrote must not be read
    loaded = LoadedModel(
        model, ModelSpec("bits", model.spec, (), None, None, ()), model.dtype, MAX_LEN, {}, ()
    )
    forward: Any = Program(model, kv)
    if breaks:
        forward = _Breaking(forward)
    return Engine(config, Runtime(loaded, None, layout, blocks, Runner(forward, kv)))


class _Breaking:
    """Runs a step, and raises sometimes when it has."""

    def __init__(self, forward: Program) -> None:
        self.forward, self.count = forward, 0

    def __call__(self, step: Step, kv: KV) -> Tensor:
        logits = self.forward(step, kv)
        self.count += 1
        if self.count % 5 == 0 and step.num_sequences > 1:
            raise RuntimeError("broken for once")
        return logits


def states_of(engine: Engine) -> States:
    assert engine.scheduler.states is not None
    return engine.scheduler.states


def check_states(engine: Engine) -> None:
    """Each slot is held as often as somebody has it, and known by one node at most."""
    states = states_of(engine)
    pool = states._pool
    held: Counter[int] = Counter(states._pinned.values())
    for request in engine.requests.values():
        for s in request.sequences + [s.shadow for s in request.sequences if s.shadow]:
            held.update([s.state] * (s.state >= 0) + [slot for _, slot in s.leaving])
            assert (s.state >= 0) == (s.num_computed > 0)
    assert [pool.count(slot) for slot in range(pool.num_blocks)] == [
        held[slot] for slot in range(pool.num_blocks)
    ]
    for slot, node in states._after.items():
        assert node.state == slot and not node.lost
    assert pool.num_idle <= len(states._after)


def run(
    engine: Engine,
    prompts: dict[str, list[int]],
    params: SamplingParams,
    texts: dict[str, list[int]] | None = None,
) -> dict[Key, Tensor]:
    """Logits of each row that was drawn from; texts: what comes, where there are guesses."""
    recorder = Recorder(engine, texts)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
        check(engine)
        check_states(engine)
    assert engine.pool.num_used == 0 and engine.stats()["states"]["used"] == 0
    engine.sampler = recorder.sampler
    return recorder.logits


@pytest.fixture(scope="module")
def alone(model: Decoder) -> dict[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for name, prompt in PROMPTS.items():
        engine = engine_on(model, max_num_seqs=1, known=0, enable_prefix_caching=False)
        found |= run(engine, {name: prompt}, LONG)
    return found


def said(logits: dict[Key, Tensor], name: str) -> list[int]:
    """The tokens that came, greedily."""
    return [int(row.argmax()) for (request, _, _), row in logits.items() if request == name]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 40},
    "by two": {"max_num_seqs": 2},
    "giving way": {"blocks": 14},
    "without room for what is known": {"known": 0},
    "without prefixes": {"known": 0, "enable_prefix_caching": False},
    "steps that break": {"breaks": True},
    "shortest first": {"policy": "sjf", "max_num_seqs": 3},
    "guesses": {"speculative_config": {"method": "ngram", "adaptive": False}},
    "guesses with little room": {
        "speculative_config": {"method": "ngram", "adaptive": False},
        "known": 0,
        "max_num_batched_tokens": 24,
    },
    "guesses in steps that break": {
        "speculative_config": {"method": "suffix", "adaptive": False},
        "breaks": True,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_is_its_own(model: Decoder, alone: dict[Key, Tensor], way: str) -> None:
    engine = engine_on(model, **WAYS[way])
    texts = None
    if engine.speculation is not None:
        texts = {name: prompt + said(alone, name) for name, prompt in PROMPTS.items()}
    assert_same(run(engine, PROMPTS, LONG, texts), alone)
    assert (engine.scheduler.num_preemptions > 0) == (way == "giving way")
    # and again, from what is known by now
    assert_same(run(engine, PROMPTS, LONG, texts), alone)
    if engine.speculation is not None:
        assert engine.speculation.counts.accepted_tokens > 1


def hits(engine: Engine, prompt: list[int], new: int = 4, **options: Any) -> tuple[int, list[int]]:
    """Tokens of a prompt that were found, and its output."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    engine.add_request("x", prompt, params, options=RequestOptions(**options))
    done = []
    while engine.has_unfinished:
        done += engine.step()
        check_states(engine)
    (output,) = done
    return output.metrics.cached_tokens, output.outputs[0].token_ids


def test_a_prompt_begins_where_one_like_it_ended(model: Decoder) -> None:
    """After its last whole block; and the next turn of a conversation, after its answer's."""
    engine = engine_on(model)
    prompt = bits.prompt(150, 3)
    found, answer = hits(engine, prompt, 60)
    assert found == 0
    assert hits(engine, prompt, 60) == (128, answer)
    turn = prompt + answer + bits.prompt(20, 4)
    plain = engine_on(model, enable_prefix_caching=False, known=0)
    found, after = hits(engine, turn)
    assert found == (150 + 59) // SIZE * SIZE == 192
    assert (0, after) == hits(plain, turn)


def test_what_two_prompts_share_is_known_to_the_third(model: Decoder) -> None:
    """The second parts from the first where no state was left, and leaves one there."""
    engine = engine_on(model)
    shared = bits.prompt(100, 3)
    found = [hits(engine, shared + bits.prompt(70, 10 + i))[0] for i in range(4)]
    assert found == [0, 0, 96, 96]


@pytest.mark.parametrize(("budget", "found"), [(2048, 3 * 96), (64, 64 + 2 * 96)])
def test_prompts_that_come_together_compute_what_they_share_once(
    model: Decoder, budget: int, found: int
) -> None:
    """In chunks, the second comes when the first has gone on: it begins where a chunk has ended."""
    engine = engine_on(model, max_num_batched_tokens=budget)
    shared = bits.prompt(100, 3)
    prompts = named([shared + bits.prompt(40, 10 + i) for i in range(4)])
    alone = engine_on(model, max_num_seqs=1, enable_prefix_caching=False, known=0)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    want = {k: v for name, p in prompts.items() for k, v in run(alone, {name: p}, params).items()}
    assert_same(run(engine, prompts, params), want)
    assert engine.tree is not None
    assert engine.tree.tokens_hit == found


def test_few_slots_are_given_to_what_was_used_last(model: Decoder) -> None:
    engine = engine_on(model, max_num_seqs=1, known=2)
    prompts = [bits.prompt(70, 20 + i) for i in range(6)]
    for prompt in prompts:
        assert hits(engine, prompt)[0] == 0
    found = [hits(engine, prompt)[0] for prompt in reversed(prompts)]
    assert found[0] == 64 and found[-1] == 0
    assert engine.stats()["states"]["cached"] <= 4


def test_pins_hold_states(model: Decoder) -> None:
    engine = engine_on(model, max_num_seqs=1, known=4)
    prompt = bits.prompt(100, 3)
    hits(engine, prompt, pins=(Pin(64, 100.0),))
    for i in range(12):
        hits(engine, bits.prompt(70, 20 + i))
    assert hits(engine, prompt[:80] + bits.prompt(30, 4))[0] == 64
    engine.reset_prefix_cache()
    assert engine.stats()["states"] == {"slots": 6, "used": 0, "cached": 0}
    assert hits(engine, prompt)[0] == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True),
        BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True),
        SamplingParams(
            guidance_scale=1.5, negative_prompt=[5, 6, 7], seed=1, max_tokens=40,
            ignore_eos=True,
        ),
    ],
    ids=["samples", "beams", "guidance"],
)  # fmt: skip
def test_those_that_fork(model: Decoder, params: Any) -> None:
    """They share a prompt's state, and go on apart; with little room, too."""
    found = []
    for options in ({}, {"blocks": 38, "max_num_batched_tokens": 50}):
        engine = engine_on(model, **options)
        for name in ("0", "3", "5"):
            engine.add_request(name, PROMPTS[name], params)
        done = {}
        while engine.has_unfinished:
            done |= {o.request_id: o for o in engine.step()}
            check(engine)
            check_states(engine)
        assert engine.stats()["states"]["used"] == 0
        texts = {name: [c.token_ids for c in o.outputs] for name, o in done.items()}
        assert all(done[name].error is None for name in done)
        found.append(texts)
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_blocks_and_slots_come_back_from_aborted_requests(model: Decoder) -> None:
    engine = engine_on(model, max_num_batched_tokens=40)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, GREEDY)
    for name in PROMPTS:
        engine.step()
        engine.abort(name)
        check_states(engine)
    while engine.has_unfinished:
        engine.step()
    assert engine.pool.num_used == 0 and engine.stats()["states"]["used"] == 0


def test_no_block_holds_a_state(model: Decoder) -> None:
    engine = engine_on(model)
    kinds = [isinstance(layer, StateCache) for layer in engine.runtime.runner.kv]
    assert kinds == [x.attention.has_state for x in model.spec.layers] and any(kinds)
    layout = engine.runtime.layout
    attending = [i for i, (count, _) in enumerate(layout.heads) if count]
    each = layout.bytes_per_token(attending[0])
    assert layout.bytes_per_block == len(attending) * SIZE * each


def test_embeddings_are_a_prompts_own(model: Decoder) -> None:
    """Pooled together with others, in chunks, and after a hit."""
    found = []
    for options in ({"max_num_seqs": 1}, {}, {"max_num_batched_tokens": 40}):
        engine = engine_on(model, **options)
        for _ in range(2):
            done = {}
            for name, prompt in PROMPTS.items():
                engine.add_pooling_request(name, prompt)
            while engine.has_unfinished:
                done |= {o.request_id: o for o in engine.step()}
                check_states(engine)
            found.append({name: output.embedding for name, output in done.items()})
    assert all(each.keys() == PROMPTS.keys() for each in found)
    assert all(each == found[0] for each in found)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


def llm_of(tiny: Tiny, **options: Any) -> LLM:
    chosen: dict[str, Any] = {"max_model_len": tiny.case.max_len, "num_blocks": 24}
    return LLM(tiny.folder, skip_tokenizer_init=True, **chosen | options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_config": {"method": "self"}}, "method='self' isn't built"),
        ({"speculative_config": {"method": "medusa", "model": "x"}}, "method='medusa' isn't built"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 33}},
            "num_speculative_tokens=33, but .* slots for 32, of all",
        ),
        ({"preemption_mode": "swap"}, "preemption_mode='swap' or a swap_space isn't built"),
        ({"swap_space": 1.0}, "preemption_mode='swap' or a swap_space isn't built"),
        ({"prefix_cache_dir": "prefixes"}, "a prefix_cache_dir isn't built"),
        ({"kv_cache_dtype": "kivi", "dtype": "bfloat16"}, "kv_cache_dtype='kivi' isn't built"),
        ({"max_attention_window": 64}, "layers with states"),
        ({"max_num_seqs": 10_000_000, "max_num_batched_tokens": 10_000_000}, "Lower it to"),
    ],
)
def test_what_isnt_built(hybrid: Tiny, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, OutOfCacheError), match=said):
        llm_of(hybrid, **options)


@pytest.mark.parametrize(
    "divided",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"context_parallel_size": 2}],
)
def test_ranks_are_refused(hybrid: Tiny, divided: dict[str, int]) -> None:
    with pytest.raises(UnsupportedModelError, match="can't be divided among processes"):
        llm_of(hybrid, **divided)


def test_a_draft_model_with_states_is_refused(hybrid: Tiny, tmp_path: Path) -> None:
    target = make_tiny("llama", tmp_path)
    draft = {"method": "draft_model", "model": str(hybrid.folder)}
    with pytest.raises(ConfigError, match="a guess that isn't taken can't be taken back"):
        llm_of(target, speculative_config=draft)


def test_fewer_sequences_where_memory_is_short(
    hybrid: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless so many were asked for: then it is an error that says how many fit."""
    layout = llm_of(hybrid).runtime.layout
    assert layout.states is not None and layout.states.slots == 2 * 64 + 64
    room = 4 * 20 * layout.states.bytes_per_slot / 0.9 + 100
    monkeypatch.setattr(Device, "available_bytes", property(lambda self: int(room)))
    with caplog.at_level("INFO", "penstock"):
        llm = llm_of(hybrid)
    assert "Up to 10 sequences run at once" in caplog.text
    assert llm.engine.config.scheduler.max_num_seqs == 10
    prompts = [{"prompt_token_ids": hybrid.prompt[: 20 + i].tolist()} for i in range(14)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    few = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    monkeypatch.undo()
    assert few == [o.outputs[0].token_ids for o in llm_of(hybrid).generate(prompts, params)]
    beside = (20 * layout.states.bytes_per_slot + 24 * layout.bytes_per_block) / 0.9 + 100
    monkeypatch.setattr(Device, "available_bytes", property(lambda self: int(beside)))
    assert llm_of(hybrid, max_num_seqs=10).runtime.layout.states.slots == 20
    with pytest.raises(OutOfCacheError, match=r"max_num_seqs=11 .* room for 20\. Lower it to 10"):
        llm_of(hybrid, max_num_seqs=11)


def test_a_runtime_is_asked_for_no_more_than_it_has(hybrid: Tiny) -> None:
    """What was refused at loading is refused of an engine on it, too."""
    runtime = llm_of(hybrid, max_num_seqs=3).runtime
    for options, said in (
        ({"max_num_seqs": 40}, "loaded with the states of 35 sequences"),
        ({"speculative_config": {"method": "ngram"}}, "without room for the states that guesses"),
        ({"speculative_config": {"method": "self"}}, "method='self' isn't built"),
        ({"preemption_mode": "swap"}, "preemption_mode='swap' or a swap_space isn't built"),
        ({"swap_space": 1.0}, "preemption_mode='swap' or a swap_space isn't built"),
    ):
        with pytest.raises(ConfigError, match=said):
            Engine(EngineConfig.of(**options), runtime)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"layout": "linear"}])
def test_guesses_have_slots_of_their_own(hybrid: Tiny, options: dict[str, Any]) -> None:
    """Where no prefixes are known, too."""
    asked = {"method": "suffix", "adaptive": False}
    llm = llm_of(hybrid, speculative_config=asked, **options)
    prompts = [{"prompt_token_ids": hybrid.prompt[:20].tolist()}]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    first, second = (llm.generate(prompts, params)[0].outputs[0].token_ids for _ in range(2))
    assert first == second
    assert llm.stats()["spec_decode_num_accepted_tokens"] > 20


def test_pins_and_marks_leave_those_that_run_their_slots(model: Decoder) -> None:
    """However many there are: every slot beyond is taken by what comes first."""
    engine = engine_on(model, max_num_seqs=2, known=3, enable_prefix_caching=True)
    states = states_of(engine)
    for i in range(6):
        prompt = bits.prompt(130, 40 + i)
        hits(engine, prompt, pins=tuple(Pin(32 * n, 100.0) for n in range(1, 5)))
        assert len(states._pinned) <= 1
    shared = bits.prompt(160, 3)
    for cut in (40, 70, 100, 130):  # parts in many places at once
        engine.add_request(str(cut), shared[:cut] + bits.prompt(40, cut), LONG)
    while engine.has_unfinished:
        assert all(output.error is None for output in engine.step())
        check_states(engine)


def test_while_an_answer_grows_one_state_of_it_is_known(model: Decoder) -> None:
    engine = engine_on(model, max_num_seqs=1, known=12)
    states = states_of(engine)
    engine.add_request(
        "x", bits.prompt(40, 3), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    )
    while engine.has_unfinished:
        engine.step()
        assert len(states._after) <= 2  # the prompt's, and the latest
    assert sorted(depth(node) * SIZE for node in states._after.values()) == [32, 224]


def depth(node: Node | None) -> int:
    return -1 if node is None else 1 + depth(node.parent)


def test_a_reset_leaves_those_that_run_theirs(model: Decoder, alone: dict[Key, Tensor]) -> None:
    engine = engine_on(model, max_num_batched_tokens=40)
    recorder = Recorder(engine)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, LONG)
    while engine.has_unfinished:
        engine.step()
        engine.reset_prefix_cache()
        check_states(engine)
    assert_same(recorder.logits, alone)


@pytest.mark.parametrize("seed", range(12))
def test_anything_at_once(model: Decoder, seed: int) -> None:
    """Random engines and requests: each gets what it gets alone, and slots come back."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "max_num_seqs": rng.choice([3, 5, 8]), "known": rng.choice([0, 1, 5, 20]),
        "blocks": rng.choice([24, 40, 160]), "max_num_batched_tokens": rng.choice([24, 64, 2048]),
        "policy": rng.choice(["fcfs", "sjf"]), "breaks": rng.random() < 0.4,
    }  # fmt: skip
    if rng.random() < 0.5:
        method = rng.choice(["ngram", "suffix"])
        options["speculative_config"] = {"method": method, "adaptive": False}
    engine = engine_on(model, **options)
    plain = engine_on(model, known=0, enable_prefix_caching=False, max_num_seqs=1)
    stems = [bits.prompt(rng.randint(20, 130), 100 + i) for i in range(3)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    for i in range(14):
        prompt = rng.choice(stems)[: rng.choice([9, 32, 64, 96])]
        prompt = prompt + bits.prompt(rng.randint(1, 60), rng.randint(200, 204))
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=rng.choice([1, 8, 40]),
            ignore_eos=True,
        )  # fmt: skip
        asked[str(i)] = prompt, params
    waiting, done = list(asked.items()), {}
    while waiting or engine.has_unfinished:
        while waiting and rng.random() < 0.6:
            name, (prompt, params) = waiting.pop()
            pins = (Pin(rng.randint(1, len(prompt)), 100.0),) if rng.random() < 0.3 else ()
            salt = rng.choice([None, None, "a"])
            engine.add_request(
                name, prompt, params, options=RequestOptions(pins=pins, cache_salt=salt)
            )
        done |= {o.request_id: o for o in engine.step()}
        check(engine)
        check_states(engine)
        if rng.random() < 0.03:
            engine.reset_prefix_cache()
    for name, (prompt, params) in asked.items():
        assert done[name].error is None
        plain.add_request(name, prompt, params)
        while plain.has_unfinished:
            for output in plain.step():
                assert output.outputs[0].token_ids == done[name].outputs[0].token_ids


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_a_built_engine_says_the_same(
    hybrid: Tiny, tmp_path: Path, eager: bool, quantization: str | None
) -> None:
    build(
        BuildOptions(
            hybrid.folder, tmp_path / "engine", quantization=quantization, max_model_len=160,
            max_num_seqs=4, profile=(1, 32, 64), timing_cache=False,
        )
    )  # fmt: skip
    built = LLM(tmp_path / "engine", skip_tokenizer_init=True, enforce_eager=eager)
    same_tokens(hybrid, built, llm_of(hybrid, quantization=quantization))


@pytest.mark.parametrize("name", ["falcon-h1", "nemotron-h-moe"])
def test_a_built_engine_of_several_layers_in_one(tmp_path: Path, name: str) -> None:
    """Of two that read the same, and of one without attention that comes first."""
    tiny = make_tiny(name, tmp_path / "model")
    build(
        BuildOptions(
            tiny.folder, tmp_path / "engine", max_model_len=160, max_num_seqs=4,
            profile=(1, 32, 64), timing_cache=False,
        )
    )  # fmt: skip
    same_tokens(tiny, LLM(tmp_path / "engine", skip_tokenizer_init=True), llm_of(tiny))


def same_tokens(tiny: Tiny, *llms: LLM) -> None:
    """Of prompts together, greedily."""
    prompts = [{"prompt_token_ids": tiny.prompt[: 9 + 20 * i].tolist()} for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    said = [[o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in llms]
    assert said[0] == said[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_changes_nothing(hybrid: Tiny, tmp_path: Path, temperature: float) -> None:
    """One without states, of the same vocabulary: hardly any of its guesses are right, and some."""
    draft = make_tiny("llama", tmp_path)
    asked = {"method": "draft_model", "model": str(draft.folder), "num_speculative_tokens": 3}
    prompts = [{"prompt_token_ids": hybrid.prompt[: 9 + 20 * i].tolist()} for i in range(4)]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
    found, counts = [], []
    for config in ({}, {"speculative_config": {**asked, "adaptive": False}}):
        llm = llm_of(hybrid, num_blocks=40, **config)
        found += [[o.outputs[0].token_ids for o in llm.generate(prompts, params)] for _ in range(2)]
        counts.append(llm.stats().get("spec_decode_num_draft_tokens", 0))
    assert all(each == found[0] for each in found)
    assert counts[0] == 0 < counts[1]
