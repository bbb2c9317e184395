"""Adapters and promise 2: a row's bits are its own, whoever else is in the batch.

bfloat16 and quantized, native kernels, a decoder with every feature that could change an order of
additions: gates, biases, norms after blocks, windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.cache import PagedLayout, kv_dtype
from penstock.config import EngineConfig
from penstock.engine import Engine, PoolingParams, RequestOptions
from penstock.errors import ConfigError, RequestError
from penstock.kernels import native
from penstock.models.common import DENSE_RULES
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import Decoder
from penstock.runtime import Program, Runtime
from penstock.runtime.adapters import Adapters
from penstock.runtime.loader import runner_over
from penstock.sampling import BeamSearchParams, SamplingParams

from ..exactness import bits
from ..lora_files import write_adapter
from .test_engine_bits import GREEDY, NEW, Key, Recorder, assert_same
from .toy import check

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

LENGTHS = [200, 1, 33, 64, 5, 100, 40, 129]
PROMPTS = {str(i): bits.prompt(length, 7 + i) for i, length in enumerate(LENGTHS)}
MAX_LEN = 352
WHO = {"0": "all", "2": "all", "3": "some", "4": "one", "5": "some", "7": "all"}
"""Adapters of the prompts; the others have none."""

FORMATS = [None, "w8a8", "w4a8", "w8a16", "w4a16-g64-asym", "w8a8-rotated", "fp8"]


def shapes(layers: range, *modules: str) -> list[tuple[str, tuple[int, int]]]:
    spec = bits.decoder_spec()
    hidden, wide = spec.hidden, spec.layers[0].mlp.intermediate
    q, kv = 6 * 64, 2 * 64
    known = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    chosen = modules or tuple(known)
    return [(f"model.layers.{i}.{name}", known[name]) for i in layers for name in chosen]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters: of everything, of two parts of a joined matrix, of one matrix."""
    base = tmp_path_factory.mktemp("adapters")
    some = shapes(range(1, 3), "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
    one = shapes(range(2, 3), "mlp.down_proj")
    write_adapter(base / "all", shapes(range(3)), 7, 1)
    write_adapter(base / "some", some, 16, 2, 0.3)
    write_adapter(base / "one", one, 1, 3)
    return {name: base / name for name in ("all", "some", "one")}


def engine_on(
    model: Decoder,
    folders: dict[str, Path],
    names: tuple[str, ...] = ("all", "some", "one"),
    blocks: int = 160,
    kv: str = "auto",
    eager: bool = False,
    rank: int = 16,
    **kwargs: Any,
) -> Engine:
    """An engine with these adapters; without any where there are no names."""
    layers = model.spec.layers
    heads = tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in layers)
    layout = PagedLayout(heads, kv_dtype(kv, model.dtype), 32)
    cache = layout.allocate(blocks)
    for part in (part for layer in cache for part in layer):
        part.view(torch.uint8).fill_(0xFF)  # NaN: what nobody wrote must not be read
    spec = ModelSpec("bits", model.spec, DENSE_RULES, None, None, ())
    loaded = LoadedModel(model, spec, model.dtype, MAX_LEN, {}, ())
    adapters = adapted = None
    forward = model if eager else Program(model, cache)
    if names:
        adapters = Adapters(loaded, len(names), rank)
        adapted = model if eager else Program(model, cache, adapted=True)
        for name in names:
            adapters.load(name, folders[name])
    runner = runner_over(forward, cache, layout, adapted=adapted)
    kwargs.setdefault("max_num_seqs", len(PROMPTS))
    runtime = Runtime(loaded, None, layout, blocks, runner, adapters=adapters)
    return Engine(EngineConfig.of(max_model_len=MAX_LEN, **kwargs), runtime)


def run(
    engine: Engine,
    who: dict[str, str],
    some: list[str] | None = None,
    params: SamplingParams = GREEDY,
) -> dict[Key, Tensor]:
    """The logits of each sample's tokens."""
    recorder = Recorder(engine)
    for name, prompt in PROMPTS.items():
        if some is None or name in some:
            options = RequestOptions(adapter=who.get(name))
            engine.add_request(name, prompt, params, options=options)
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
        check(engine)
    assert engine.pool.num_used == 0
    engine.sampler = recorder.sampler
    adapters = engine.runtime.adapters
    assert adapters is None or not any(adapter.users for adapter in adapters.loaded)
    return recorder.logits


@pytest.fixture(scope="module")
def model() -> Decoder:
    return bits.build(torch.bfloat16)


@pytest.fixture(scope="module")
def alone(model: Decoder, folders: dict[str, Path]) -> dict[Key, Tensor]:
    """Each prompt in an engine of its own, in one piece."""
    found: dict[Key, Tensor] = {}
    for name in PROMPTS:
        names = (WHO[name],) if name in WHO else ()
        engine = engine_on(model, folders, names, max_num_seqs=1, enable_prefix_caching=False)
        found |= run(engine, WHO, [name])
    return found


@pytest.mark.parametrize("quantization", FORMATS)
def test_those_without_are_as_without_any(
    folders: dict[str, Path], quantization: str | None
) -> None:
    """In each format; and those with adapters are other, but not by much more than they add."""
    model = bits.build(torch.bfloat16, quantization)
    plain = run(engine_on(model, folders, ()), {})
    mixed = run(engine_on(model, folders), WHO)
    none = [key for key in plain if key[0] not in WHO]
    assert_same({key: mixed[key] for key in none}, {key: plain[key] for key in none})
    assert not any(torch.equal(mixed[name, 0, 0], plain[name, 0, 0]) for name in WHO)
    eager = run(engine_on(model, folders, eager=True), WHO)
    assert_same(eager, mixed)


@pytest.mark.parametrize("budget", [9, 70, 2048])
@pytest.mark.parametrize("caching", [True, False])
def test_in_a_batch(
    model: Decoder,
    folders: dict[str, Path],
    alone: dict[Key, Tensor],
    budget: int,
    caching: bool,
) -> None:
    """In whichever slot, with room for larger ranks, in chunks, and again with hits."""
    names = ("one", "all", "some") if caching else ("some", "one", "all")
    engine = engine_on(
        model,
        folders,
        names,
        rank=64,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    for _ in range(2):
        assert_same(run(engine, WHO), alone)
    stats = engine.stats()["prefix"]
    assert stats["hits"] == (caching and sum((length - 1) // 32 * 32 for length in LENGTHS))


def test_hits_are_an_adapters_own(
    model: Decoder, folders: dict[str, Path], alone: dict[Key, Tensor]
) -> None:
    """Nor those of one that had its name before."""
    engine = engine_on(model, folders)
    run(engine, dict.fromkeys(PROMPTS, "one"))
    run(engine, {})
    assert engine.stats()["prefix"]["hits"] == 0
    assert_same(run(engine, WHO), alone)
    adapters = engine.runtime.adapters
    assert adapters is not None
    adapters.unload("all")
    adapters.load("all", folders["some"])
    hits = engine.stats()["prefix"]["hits"]
    again = run(engine, {"0": "all"}, ["0"])
    assert engine.stats()["prefix"]["hits"] == hits
    assert not torch.equal(again["0", 0, 0], alone["0", 0, 0])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(
    model: Decoder, folders: dict[str, Path], alone: dict[Key, Tensor], threads: int
) -> None:
    had = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(run(engine_on(model, folders), WHO), alone)
    finally:
        torch.set_num_threads(had)


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_quantized_caches(model: Decoder, folders: dict[str, Path], kv: str) -> None:
    mixed = run(engine_on(model, folders, kv=kv, max_num_batched_tokens=70), WHO)
    for name in ("0", "1", "3"):
        single = run(engine_on(model, folders, kv=kv, max_num_seqs=1), WHO, [name])
        assert_same({key: mixed[key] for key in single}, single)


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_those_that_gave_way(model: Decoder, folders: dict[str, Path], how: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=70)
    want = run(engine_on(model, folders), WHO, params=params)
    engine = engine_on(
        model,
        folders,
        blocks=11,
        max_num_batched_tokens=40,
        preemption_mode=how,
        swap_space=0.01 if how == "swap" else None,
    )
    for _ in range(2):
        assert_same(run(engine, WHO, params=params), want)
    assert engine.scheduler.num_preemptions > 0
    assert how == "recompute" or engine.preemption.num_swap > 0


def test_samples(model: Decoder, folders: dict[str, Path]) -> None:
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=NEW)
    plain = engine_on(model, folders, (), max_num_seqs=24)
    mixed = run(engine_on(model, folders, max_num_seqs=24), WHO, params=params)
    without = {key: row for key, row in run(plain, {}, params=params).items() if key[0] not in WHO}
    assert_same({key: mixed[key] for key in without}, without)
    for name in ("2", "5"):
        engine = engine_on(model, folders, (WHO[name],), max_num_seqs=3)
        single = run(engine, WHO, [name], params)
        assert_same({key: mixed[key] for key in single}, single)


def outputs_of(engine: Engine, params: Any, who: dict[str, str], some: list[str]) -> dict[str, Any]:
    for name in some:
        options = RequestOptions(adapter=who.get(name))
        if isinstance(params, PoolingParams):
            engine.add_pooling_request(name, PROMPTS[name], params, options=options)
        else:
            engine.add_request(name, PROMPTS[name], params, options=options)
    found = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] = output
        check(engine)
    return found


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=3, max_tokens=8),
        SamplingParams(
            temperature=0.0, max_tokens=8, guidance_scale=2.0, negative_prompt=[5, 6, 7]
        ),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
        PoolingParams("mean"),
        PoolingParams("last"),
    ],
    ids=["beams", "guidance", "prompt_logprobs", "mean", "last"],
)
def test_other_kinds_of_requests(model: Decoder, folders: dict[str, Path], params: Any) -> None:
    """Each as alone, and not as without its adapter."""
    some = ["0", "1", "3", "4"]

    def said(output: Any) -> Any:
        if isinstance(params, PoolingParams):
            return output.embedding
        tokens = [sample.token_ids for sample in output.outputs]
        return tokens, output.prompt_logprobs

    mixed = outputs_of(engine_on(model, folders, max_num_seqs=16), params, WHO, some)
    plain = outputs_of(engine_on(model, folders, (), max_num_seqs=16), params, {}, some)
    for name in some:
        names = (WHO[name],) if name in WHO else ()
        single = outputs_of(engine_on(model, folders, names), params, WHO, [name])
        assert said(mixed[name]) == said(single[name])
    assert said(mixed["1"]) == said(plain["1"])
    assert any(said(mixed[name]) != said(plain[name]) for name in ("0", "3", "4"))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_guesses(model: Decoder, folders: dict[str, Path], method: str) -> None:
    """Steps that check several tokens at once leave the same ones."""
    params = SamplingParams(temperature=0.0, max_tokens=60)
    guessing = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    engine = engine_on(model, folders, speculative_config=guessing)
    got = outputs_of(engine, params, WHO, list(PROMPTS))
    want = outputs_of(engine_on(model, folders), params, WHO, list(PROMPTS))
    assert engine.speculation is not None and engine.speculation.counts.drafts > 0
    for name in PROMPTS:
        assert got[name].outputs[0].token_ids == want[name].outputs[0].token_ids


@pytest.mark.parametrize("method", ["self", "medusa", "eagle", "eagle3"])
def test_guesses_that_do_not_go_with_it(method: str) -> None:
    more = {} if method == "self" else {"model": "x"}
    with pytest.raises(ConfigError, match="Use ngram, suffix or draft_model"):
        EngineConfig.of(enable_lora=True, speculative_config={"method": method, **more})


def test_an_unloaded_one_goes_on_for_those_that_run(
    model: Decoder, folders: dict[str, Path], alone: dict[Key, Tensor]
) -> None:
    """Its slot is nobody's until they have ended, and others run meanwhile."""
    engine = engine_on(model, folders, ("all", "some"))
    adapters = engine.runtime.adapters
    assert adapters is not None
    recorder = Recorder(engine)
    for name in ("0", "5"):
        options = RequestOptions(adapter=WHO[name])
        engine.add_request(name, PROMPTS[name], GREEDY, options=options)
    engine.step()
    adapters.unload("all")
    with pytest.raises(RequestError, match=r"There is no adapter 'all'; loaded: some\."):
        engine.add_request("x", PROMPTS["1"], GREEDY, options=RequestOptions(adapter="all"))
    with pytest.raises(ValueError, match="There is no slot for the adapter 'one'"):
        adapters.load("one", folders["one"])
    engine.step()
    while engine.has_unfinished:
        engine.step()
    adapters.load("one", folders["one"])
    assert adapters.names == ["some", "one"]
    assert_same(recorder.logits, {key: alone[key] for key in alone if key[0] in ("0", "5")})


def test_what_is_taken_is_given_back(model: Decoder, folders: dict[str, Path]) -> None:
    """By requests that end, are aborted, or are refused."""
    engine = engine_on(model, folders)
    adapters = engine.runtime.adapters
    assert adapters is not None
    options = RequestOptions(adapter="all")
    for name in ("0", "1"):
        engine.add_request(name, PROMPTS[name], GREEDY, options=options)
    with pytest.raises(RequestError):
        engine.add_request("2", [600], GREEDY, options=options)
    with pytest.raises(RequestError):
        engine.add_request("0", PROMPTS["0"], GREEDY, options=options)
    users = {adapter.name: adapter.users for adapter in adapters.loaded}
    assert users == {"all": 2, "some": 0, "one": 0}
    engine.step()
    engine.abort("0")
    while engine.has_unfinished:
        engine.step()
    assert not any(adapter.users for adapter in adapters.loaded)


def test_without_room_for_any(model: Decoder, folders: dict[str, Path]) -> None:
    engine = engine_on(model, folders, ())
    with pytest.raises(RequestError, match="without enable_lora=True"):
        engine.add_request("0", [1], GREEDY, options=RequestOptions(adapter="all"))
    with pytest.raises(RequestError, match="adapter must be a loaded adapter's name, not 3"):
        RequestOptions(adapter=3)  # type: ignore[arg-type]


def test_the_floor_counts_each_adapter_once(model: Decoder, folders: dict[str, Path]) -> None:
    engine = engine_on(model, folders, ("all", "some"), max_num_batched_tokens=2048)
    adapters = engine.runtime.adapters
    assert adapters is not None
    read = {adapter.name: adapter.nbytes for adapter in adapters.loaded}
    found = []
    for who in ({}, {"0": "all"}, dict.fromkeys(PROMPTS, "all"), {"0": "all", "1": "some"}):
        steps: list[int] = []
        engine.ledger.watch = lambda record, steps=steps: steps.append(record.cost.weight_bytes)
        run(engine, who)
        engine.reset_prefix_cache()
        found.append((steps[0], steps[-1]))  # the prompts', and one of their tokens'
    for at in (0, 1):
        plain, one, many, two = (each[at] for each in found)
        assert one - plain == many - plain == read["all"]
        assert two - plain == read["all"] + read["some"]
