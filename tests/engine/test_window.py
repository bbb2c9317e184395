"""Models whose layers all see a window, some with the first tokens beside it: a sequence holds the
blocks of those, and the bits stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.cache import PagedLayout, kv_dtype
from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOptions
from penstock.engine.options import Pin
from penstock.kernels import native
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import Decoder
from penstock.quant import formats_of
from penstock.runtime import SEES_ALL, Horizon, Program, Runner, Runtime
from penstock.runtime.memory import horizon_of
from penstock.sampling import BeamSearchParams, SamplingParams

from ..exactness import bits
from .test_engine_bits import GREEDY, Key, assert_same, named, run
from .toy import check, watch

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

SIZE, MAX_LEN = 32, 512
WINDOWS = (50, 20, 50)
LENGTHS = [300, 33, 64, 5, 257, 129]
PROMPTS = [bits.prompt(length, 3 + i) for i, length in enumerate(LENGTHS)]


def held(model: Decoder) -> int:
    """The most blocks that a window of 50 touches, and those of the first tokens."""
    return (50 - 2) // SIZE + 2 + -(-model.spec.layers[0].attention.sink_tokens // SIZE)


def windowed(windows: tuple[int, ...] = WINDOWS, sink_tokens: int = 0) -> Decoder:
    """sink_tokens: of all layers but the second."""
    spec = bits.decoder_spec()
    first = (sink_tokens, 0, sink_tokens)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=window, sink_tokens=sinks))
        for layer, window, sinks in zip(spec.layers, windows, first, strict=True)
    )
    spec = replace(spec, layers=layers)
    return bits.fill(Decoder(spec, formats_of(None, torch.bfloat16), torch.bfloat16))


@pytest.fixture(scope="module", params=[0, 4, 40])
def model(request: pytest.FixtureRequest) -> Decoder:
    return windowed(sink_tokens=request.param)


def engine_on(
    model: Decoder, blocks: int = 200, kv: str = "auto", lets_go: bool = True, **kwargs: Any
) -> Engine:
    """Without `lets_go` the cache has no empty block, and a sequence keeps all of its own."""
    heads = tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in model.spec.layers)
    layout = PagedLayout(heads, kv_dtype(kv, model.dtype), SIZE)
    cache = layout.allocate(blocks + lets_go)
    for part in (part for layer in cache for part in layer):
        part[:blocks].view(torch.uint8).fill_(0xFF)  # NaN: what nobody wrote must not be read
    spec = ModelSpec("bits", model.spec, (), None, None, ())
    loaded = LoadedModel(model, spec, model.dtype, MAX_LEN, {}, ())
    kwargs.setdefault("max_num_seqs", len(PROMPTS))
    runner = Runner(Program(model, cache), cache)
    engine = Engine(
        EngineConfig.of(max_model_len=MAX_LEN, **kwargs),
        Runtime(loaded, None, layout, blocks, runner),
    )
    sees = Horizon(max(WINDOWS), model.spec.layers[0].attention.sink_tokens)
    assert engine.runtime.horizon == (sees if lets_go else SEES_ALL)
    return engine


def most_held(engine: Engine, prompts: dict[str, list[int]], params: SamplingParams) -> int:
    """The most blocks that one sequence held between two steps, of its own or shared."""
    most = 0
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished:
        engine.step()
        check(engine)
        for sequence in engine.scheduler.running:
            most = max(most, sum(block != engine.pool.empty for block in sequence.blocks))
    assert engine.pool.num_used == 0
    return most


@pytest.fixture(scope="module")
def kept(model: Decoder) -> dict[str, dict[Key, torch.Tensor]]:
    """What comes where nothing is let go, by the cache's dtype."""
    return {
        kv: run(engine_on(model, kv=kv, lets_go=False), named(PROMPTS), GREEDY)[0]
        for kv in ("auto", "int8", "fp8", "int4")
    }


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("budget", [16, 70, 2048])
@pytest.mark.parametrize("caching", [True, False])
def test_the_same_bits(
    model: Decoder, kept: dict[str, Any], kv: str, budget: int, caching: bool
) -> None:
    engine = engine_on(model, kv=kv, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    watch(engine)
    assert_same(run(engine, named(PROMPTS), GREEDY)[0], kept[kv])


@pytest.mark.parametrize("caching", [True, False])
def test_memory_is_flat_at_ten_windows(model: Decoder, caching: bool) -> None:
    engine = engine_on(model, 8 + MAX_LEN // SIZE, enable_prefix_caching=caching)
    long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    assert most_held(engine, {"one": PROMPTS[3]}, long) == held(model)
    whole = engine_on(model, 8 + MAX_LEN // SIZE, lets_go=False)
    assert most_held(whole, {"one": PROMPTS[3]}, long) == 505 // SIZE + 1


def test_a_prompt_in_chunks_is_let_go_as_it_is_computed(model: Decoder) -> None:
    engine = engine_on(model, max_num_batched_tokens=16)
    assert most_held(engine, {"one": PROMPTS[0]}, GREEDY) == held(model)


@pytest.mark.parametrize("how", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_those_that_gave_way(model: Decoder, how: str, caching: bool) -> None:
    """Hardly more blocks than one sequence may need: they take each other's."""
    engine = engine_on(
        model,
        MAX_LEN // SIZE + 1,
        max_num_seqs=18,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
        preemption_mode=how,
        swap_space=0.01 if how == "swap" else None,
    )
    watch(engine)
    prompts = {str(i): PROMPTS[i][:70] for i in range(4)}
    long = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=100, ignore_eos=True)
    want, _ = run(engine_on(model, 400, lets_go=False, max_num_seqs=18), prompts, long)
    for _ in range(2):  # the second time with what is left in the tree
        assert_same(run(engine, prompts, long)[0], want)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [200, 40])
def test_samples_and_beams(model: Decoder, caching: bool, blocks: int) -> None:
    found = []
    for lets_go in (True, False):
        engine = engine_on(
            model,
            blocks if lets_go else 200,
            lets_go=lets_go,
            max_num_seqs=12,
            max_num_batched_tokens=64,
            enable_prefix_caching=caching,
        )
        watch(engine)
        outputs = {}
        for i, prompt in enumerate(PROMPTS[:3]):
            params = SamplingParams(n=3, seed=i, temperature=1.0, max_tokens=120, ignore_eos=True)
            engine.add_request(f"s{i}", prompt, params)
        engine.add_request("b", PROMPTS[2], BeamSearchParams(beam_width=3, max_tokens=90))
        while engine.has_unfinished:
            for output in engine.step():
                outputs[output.request_id] = [one.token_ids for one in output.outputs]
            check(engine)
        assert engine.pool.num_used == 0
        found.append(outputs)
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.parametrize("method", ["ngram", "self"])
def test_guesses(model: Decoder, kept: dict[str, Any], method: str) -> None:
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method == "self":
        asked["draft_layers"] = 1
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    outputs = []
    for lets_go, config in ((True, asked), (False, None)):
        engine = engine_on(model, lets_go=lets_go, speculative_config=config)
        watch(engine)
        found = {}
        for name, prompt in named(PROMPTS).items():
            engine.add_request(name, prompt, long)
        while engine.has_unfinished:
            found |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
            check(engine)
        outputs.append(found)
    assert outputs[0] == outputs[1]


def test_prefixes_are_found_until_others_take_what_was_passed_by(model: Decoder) -> None:
    """And with a block, all that continues it is lost."""
    engine = engine_on(model, 17, max_num_seqs=2, max_num_batched_tokens=64)
    watch(engine)
    first, _ = run(engine, {"a": PROMPTS[0]}, GREEDY)
    run(engine, {"b": PROMPTS[4]}, GREEDY)  # takes what was idle first: of what a passed by
    lost = {0: 32, 4: 32, 40: 96}[model.spec.layers[0].attention.sink_tokens]
    for cached in (lost, 288):
        found, outputs = run(engine, {"a": PROMPTS[0]}, GREEDY)
        assert outputs["a"].metrics.cached_tokens == cached
        assert_same(found, first)


def test_pins_on_what_was_passed_by(model: Decoder) -> None:
    engine = engine_on(model, 24, max_num_seqs=3, max_num_batched_tokens=64)
    watch(engine)
    options = RequestOptions(pins=(Pin(96, 60.0), Pin(288, 60.0)))
    engine.add_request("a", PROMPTS[0], GREEDY, options=options)
    engine.add_request("b", PROMPTS[4], GREEDY)
    engine.add_request("c", PROMPTS[5], GREEDY)
    while engine.has_unfinished:
        engine.step()
        check(engine)
    engine.reset_prefix_cache()
    check(engine)
    assert engine.pool.num_used == 0


def test_which_models() -> None:
    assert horizon_of(windowed().spec, MAX_LEN) == Horizon(50)
    assert horizon_of(windowed(sink_tokens=4).spec, MAX_LEN) == Horizon(50, 4)
    assert not horizon_of(windowed().spec, 50)  # which nobody gets beyond
    assert not horizon_of(windowed(sink_tokens=4).spec, 54)
    assert not horizon_of(windowed((50, 0, 20)).spec, MAX_LEN)  # one layer sees all
    assert not horizon_of(bits.decoder_spec(), MAX_LEN)


def test_blocks_of_one_sequence() -> None:
    """What it keeps, and what a step adds; never more than it has."""
    horizon = Horizon(50, 40)
    assert (horizon.kept(SIZE), horizon.blocks(SIZE, 1000)) == (2, 2 + 2 + 2)
    assert horizon.blocks(SIZE, 100) == 4
    assert horizon.most_blocks(SIZE, 1000, 64) == 8
    assert horizon.most_blocks(SIZE, 200, 64) == 7
    assert SEES_ALL.most_blocks(SIZE, 1000, 64) == 32


def test_what_is_found_after_swaps_was_computed(model: Decoder) -> None:
    """Whom a window has passed blocks by isn't swapped: an empty block would come back as one.

    And nobody writes the empty block.
    """
    swapping = {"preemption_mode": "swap", "swap_space": 0.01}
    engine = engine_on(model, 14, max_num_seqs=16, max_num_batched_tokens=64, **swapping)
    watch(engine)
    assert engine.tree is not None
    params = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=250, ignore_eos=True)
    for i in range(6):
        engine.add_request(str(i), PROMPTS[i][:70], params)
    keys = engine.runtime.runner.kv[0][0].view(torch.uint8)
    while engine.has_unfinished:
        engine.step()
        check(engine)
        assert all(keys[block].any() for block in engine.tree._nodes)
    assert engine.scheduler.num_preemptions > engine.preemption.num_swap > 0
    for part in (part for layer in engine.runtime.runner.kv for part in layer):
        assert not part[engine.pool.empty].view(torch.uint8).any()
