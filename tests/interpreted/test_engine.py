"""A sequence's tokens and log-probabilities are its own over Triton's kernels, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import LLM, RequestOutput, SamplingParams
from penstock.engine import RequestOptions
from penstock.errors import ConfigError
from penstock.kernels import native
from penstock.pipeline.build import BuildOptions, build

LENGTH = 4
LENGTHS = (1, 4, 15)

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=2),
    "drawn": SamplingParams(
        temperature=0.9, top_p=0.95, top_k=40, seed=7, max_tokens=LENGTH, ignore_eos=True
    ),
    "penalized": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, seed=3, max_tokens=2,
        ignore_eos=True,
    ),
}  # fmt: skip


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(3, 250) for _ in range(20)]
    return [
        shared[: 17 * (i > 0)] + [rng.randrange(3, 250) for _ in range(n)]
        for i, n in enumerate(LENGTHS)
    ]


def seen(output: RequestOutput) -> list[Any]:
    return [
        (
            sample.token_ids,
            sample.finish_reason,
            [{t: (p.logprob, p.rank) for t, p in at.items()} for at in sample.logprobs or []],
        )
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), layers=2, length=256)


def make_llama(path: Path, layers: int, length: int) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def engine(folder: Path, **options: Any) -> LLM:
    chosen = {"num_blocks": 40, "max_num_seqs": 8, "max_model_len": 160, "dtype": "bfloat16"}
    return LLM(folder, skip_tokenizer_init=True, **chosen | options)


def run(llm: LLM, params: SamplingParams) -> list[Any]:
    found = [seen(output) for output in llm.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts()], params
    )]  # fmt: skip
    assert llm.stats()["used_blocks"] == 0
    return found


Alone = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """Each prompt by itself, whole, nothing cached, kernel by kernel, one step after another."""
    llm = engine(
        folder, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True,
        async_scheduling=False,
    )  # fmt: skip
    assert native.handle is None

    @cache
    def found(name: str) -> list[Any]:
        outputs = run(llm, PARAMS[name])
        assert llm.runtime.runner.graphs is not None
        assert llm.runtime.runner.graphs.counts.replays == 0
        assert llm.engine.computing.overlapped == 0
        return outputs

    return found


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "one step after another": {"async_scheduling": False},
    "in chunks": {"max_num_batched_tokens": 16},
    "no graphs": {"compilation_config": {"cudagraph_mode": "none"}},
    "few graphs": {"compilation_config": {"cudagraph_capture_sizes": [2, 5]}},
    "ngram": {"speculative_config": {"method": "ngram", "adaptive": False}},
    "self": {"speculative_config": {"method": "self", "adaptive": False}},
}


SLOW = pytest.mark.slow  # further ways to what the others have been through


@SLOW
def test_a_window_and_the_first_tokens(folder: Path) -> None:
    """Of which most are seen no more: alone and together, with what is cached found again."""
    reach = {"max_attention_window": 11, "sink_token_length": 3}
    one = engine(folder, max_num_seqs=1, enable_prefix_caching=False, **reach)
    want = run(one, PARAMS["greedy"])
    assert one.runtime.horizon.sink_tokens == 3
    together = engine(folder, max_num_batched_tokens=20, **reach)
    for _ in range(2):
        assert run(together, PARAMS["greedy"]) == want
    assert want != run(engine(folder), PARAMS["greedy"])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("together", "drawn"),
        ("together", "greedy"),
        pytest.param("together", "penalized", marks=SLOW),
        pytest.param("one step after another", "greedy", marks=SLOW),
        ("in chunks", "drawn"),
        pytest.param("in chunks", "greedy", marks=SLOW),
        ("no graphs", "greedy"),
        pytest.param("few graphs", "drawn", marks=SLOW),
        ("ngram", "greedy"),
        pytest.param("self", "drawn", marks=SLOW),
    ],
)
def test_a_sequence_is_its_own(folder: Path, alone: Alone, way: str, name: str) -> None:
    llm = engine(folder, **WAYS[way])
    assert run(llm, PARAMS[name]) == alone(name)
    if way == "together":
        assert run(llm, PARAMS[name]) == alone(name)  # what is cached is found
    if way == "together" and name != "penalized":
        assert llm.engine.computing.overlapped >= 2


@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=SLOW), "swap"])
def test_giving_way(folder: Path, alone: Alone, mode: str) -> None:
    """To a request that ranks higher, while a step that was begun early is on its way."""
    llm = engine(folder, policy="priority", max_num_seqs=2, preemption_mode=mode)
    items, found = prompts(), {}
    params = PARAMS["greedy"]
    for i in (0, 1):
        llm.engine.add_request(str(i), items[i], params, options=RequestOptions(priority=5))
    for _ in range(2):
        llm.engine.step()
    llm.engine.add_request("2", items[2], params, options=RequestOptions(priority=0))
    while llm.engine.has_unfinished:
        found |= {output.request_id: seen(output) for output in llm.engine.step()}
    assert [found[str(i)] for i in range(3)] == alone("greedy")
    assert llm.stats()["preemptions"] == 1
    assert llm.stats()["used_blocks"] == 0


FEW = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8"},
        pytest.param({"kv_cache_dtype": "fp8"}, marks=SLOW),
        {"quantization": "w8a8"},
        {"quantization": "w4a16-g32-asym"},
        pytest.param({"quantization": "fp8-w8a8"}, marks=SLOW),
        pytest.param({"quantization": "mxfp4"}, marks=SLOW),
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_formats(folder: Path, options: dict[str, Any]) -> None:
    items = [{"prompt_token_ids": tokens} for tokens in prompts()[:2]]
    llm = engine(folder, max_num_seqs=1, enforce_eager=True, **options)
    expected = [seen(output) for output in llm.generate(items, FEW)]
    llm = engine(folder, max_num_batched_tokens=24, **options)
    assert [seen(output) for output in llm.generate(items, FEW)] == expected


def test_products_in_any_order(folder: Path) -> None:
    """Many rows go to torch's own products, whose bits may differ; the tokens are right."""
    llm = engine(folder, deterministic=False, dtype="float32")
    exact = engine(folder, dtype="float32")
    item = {"prompt_token_ids": [3 + i % 250 for i in range(100)]}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    found, expected = (x.generate([item], params)[0].outputs[0].token_ids for x in (llm, exact))
    assert found == expected


def test_several_samples_and_stops(folder: Path) -> None:
    llm, item = engine(folder), {"prompt_token_ids": prompts()[1]}
    chosen = {"temperature": 1.0, "n": 2, "seed": 5, "max_tokens": 6}
    whole = seen(llm.generate([item], SamplingParams(**chosen, ignore_eos=True))[0])
    stop = whole[0][0][3]  # the fourth token of one of them: it ends there, the other goes on
    stopped = seen(llm.generate([item], SamplingParams(**chosen, stop_token_ids=[stop]))[0])
    for (tokens, reason, _), (all_tokens, _, _) in zip(stopped, whole, strict=True):
        assert tokens == all_tokens[: all_tokens.index(stop) + 1 if stop in all_tokens else 6]
        assert (reason == "stop") == (stop in all_tokens)


def test_embeddings(folder: Path) -> None:
    items = [{"prompt_token_ids": tokens} for tokens in prompts()[:2]]
    together = [o.outputs.embedding for o in engine(folder).embed(items)]
    llm = engine(folder, max_num_seqs=1)
    assert together == [llm.embed([item])[0].outputs.embedding for item in items]


@pytest.mark.parametrize("quantization", [pytest.param(None, marks=SLOW), "w4a16-g32"])
def test_an_engine_folder(folder: Path, tmp_path: Path, quantization: str | None) -> None:
    """What was built for a GPU gives the same tokens and log-probabilities as what it is of."""
    chosen: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    limits = {"max_num_seqs": 8, "max_model_len": 160}
    build(BuildOptions(folder, tmp_path / "engine", device="cuda", **chosen, **limits))
    items = [{"prompt_token_ids": tokens} for tokens in prompts()[:2]]
    built = LLM(tmp_path / "engine", skip_tokenizer_init=True, num_blocks=40)
    assert built.runtime.engine is not None
    assert built.runtime.runner.graphs is not None
    expected = [seen(o) for o in engine(folder, quantization=quantization).generate(items, FEW)]
    assert [seen(output) for output in built.generate(items, FEW)] == expected
    found = [o.outputs.embedding for o in built.embed(items[:1])]
    again = engine(folder, quantization=quantization).embed(items[:1])
    assert found == [o.outputs.embedding for o in again]


def test_what_is_not_built_is_refused(folder: Path) -> None:
    for options, words in (
        ({"kv_cache_dtype": "int4"}, "built for CPUs only. On a GPU choose fp8 or int8"),
        ({"device": "cuda"}, "device='cuda' can't take effect"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine(folder, **options)
