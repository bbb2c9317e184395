"""Engines whose ranks share the tokens of each sequence: what one process says, by `==`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from penstock.errors import ConfigError, EngineDeadError, RankError
from tests.engine.test_ranks import TEXTS, ends, processes, said
from tests.models.tiny import CASES, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)

Ask = Callable[[LLM], Any]


def make_long(name: str, folder: Path) -> Path:
    """A tiny checkpoint for texts of 4,096 tokens."""
    case = CASES[name]
    case = replace(case, changes={**case.changes, "max_position_embeddings": 4096})
    make_model(case).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_long("qwen3", tmp_path_factory.mktemp("long"))


def prompt(tokens: int, step: int, vocabulary: int = 300) -> dict[str, list[int]]:
    return {"prompt_token_ids": [5 + (i * step) % (vocabulary - 5) for i in range(tokens)]}


def equal(ask: Ask, sizes: tuple[int, ...] = (2, 3), **engine: Any) -> Any:
    """What one process says, which all say."""
    one = ask(LLM(**engine))
    for size in sizes:
        assert ask(LLM(**engine, context_parallel_size=size)) == one
    return one


@pytest.mark.quick
@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int4", "quantization": "w8a8"},
    ],
)
def test_long_texts(long: Path, kind: dict[str, Any]) -> None:
    """One alone, several at once, prompts in chunks beside sequences that decode."""
    prompts = [prompt(n, j) for n, j in ((3000, 7), (1, 1), (700, 11), (255, 3), (1900, 13))]

    def ask(llm: LLM) -> Any:
        return said(llm.generate(prompts[:1], GREEDY)), said(llm.generate(prompts, GREEDY))

    engine = {"skip_tokenizer_init": True, "enable_prefix_caching": False, **kind}
    equal(ask, model=long, max_num_batched_tokens=600, **engine)


def test_latents(tmp_path: Path) -> None:
    folder = make_long("deepseek-v3", tmp_path)
    prompts = [prompt(n, j) for n, j in ((2000, 7), (300, 3), (20, 5))]

    def ask(llm: LLM) -> Any:
        return said(llm.generate(prompts, GREEDY)), said(llm.generate(prompts, GREEDY))

    engine = {"skip_tokenizer_init": True, "max_num_batched_tokens": 600}
    equal(ask, model=folder, **engine)


def test_what_was_read_is_found_again(long: Path) -> None:
    """A hit is of whole blocks, of which each rank has a part."""
    first, other = prompt(2000, 7), prompt(2000, 7)
    other["prompt_token_ids"][1700:] = prompt(400, 3)["prompt_token_ids"]

    def hits(llm: LLM) -> tuple[Any, int]:
        found = [said(llm.generate([each], GREEDY)) for each in (first, other, first)]
        return found, llm.stats()["prefix"]["hits"]

    engine: dict[str, Any] = {"model": long, "skip_tokenizer_init": True}
    one, _ = hits(LLM(**engine))
    for size, found in ((2, 1536), (3, 1536)):
        several, hit = hits(LLM(**engine, context_parallel_size=size))
        assert several == one
        assert hit >= found


def test_blocks_that_a_window_has_passed_by(tmp_path: Path) -> None:
    """They are let go, though others keep a part of each."""
    folder = make_long("mistral", tmp_path)
    prompts = [prompt(2500, 7), prompt(900, 3)]

    def ask(llm: LLM) -> Any:
        found = said(llm.generate(prompts, GREEDY))
        return found, bool(llm.engine.runtime.horizon)

    engine = {"skip_tokenizer_init": True, "max_num_batched_tokens": 512}
    assert equal(ask, model=folder, **engine)[1]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_those_that_give_way(mode: str) -> None:
    """Samples that share blocks, and sequences that leave the cache and come back."""
    texts = [prompt(n, j, 999) for n, j in ((490, 3), (600, 7), (735, 11))]
    drawn = SamplingParams(n=2, seed=7, max_tokens=60, logprobs=1, prompt_logprobs=1)

    def ask(llm: LLM) -> Any:
        return said(llm.generate(texts, drawn)), llm.stats()["preemptions"] > 0

    engine: dict[str, Any] = {"preemption_mode": mode, "max_num_batched_tokens": 200}
    several = [
        ask(LLM(**engine, num_blocks=blocks, context_parallel_size=size))
        for size, blocks in ((2, 4), (3, 3))
    ]
    one, _ = ask(LLM(**engine))
    assert several == [(one, True)] * 2


def test_a_search_embeddings_and_log_probabilities() -> None:
    def ask(llm: LLM) -> Any:
        beams = llm.beam_search(TEXTS[:2], BeamSearchParams(beam_width=3, max_tokens=12))
        vectors = [o.outputs.embedding for o in llm.embed([*TEXTS, prompt(900, 7, 999)])]
        params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
        (read,) = llm.generate([prompt(700, 3, 999)], params)
        at = [[x.logprob for x in (each or {}).values()] for each in read.prompt_logprobs or []]
        return [[s.tokens for s in b.sequences] for b in beams], vectors, at

    equal(ask, (2,))


@pytest.mark.parametrize(
    "engine",
    [
        {"speculative_config": {"method": "ngram"}, "quantization": "w4a8"},
        {"speculative_config": {"method": "draft_model"}},
        {"enforce_eager": True},
    ],
)
def test_other_engines(engine: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = [*TEXTS, " ".join(TEXTS * 6)]
    equal(lambda llm: said(llm.generate(texts, params)), (2,), model="stories-chat", **engine)


def test_what_it_says_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="penstock")
    llm = LLM(context_parallel_size=2)
    assert "2 processes (ranks) share the context: context_parallel_size=2" in caplog.text
    runtime = llm.engine.runtime
    assert runtime.layout.block_size == 512
    assert runtime.runner.kv[0][0].shape[2] * 16 == 256  # of which half is here
    whole = LLM().engine.runtime
    assert runtime.layout.bytes_per_block == 8 * whole.layout.bytes_per_block
    assert runtime.cache_bytes == 2 * runtime.layout.nbytes(runtime.num_blocks)


def test_a_rank_that_is_killed_ends_the_engine() -> None:
    llm = LLM(context_parallel_size=2)
    (rank,) = processes(llm)
    assert llm.generate(TEXTS[:1])
    os.kill(rank, signal.SIGKILL)
    says = (
        rf"2 processes .* can't go on: rank 1 \(process {rank}\) has ended with -9. Load it again"
    )
    for _ in range(2):
        with pytest.raises((RankError, EngineDeadError), match=says):
            llm.generate(TEXTS[:1])


def test_a_rank_that_is_killed_in_a_step() -> None:
    async def serve() -> None:
        llm = AsyncLLM(context_parallel_size=3)
        pids = [other.process.pid for other in llm.runtime.team._others]  # type: ignore

        async def stream() -> None:
            many, count = SamplingParams(max_tokens=900, ignore_eos=True), 0
            async for _ in llm.generate(TEXTS[0], many, "a"):
                count += 1
                if count == 5:
                    os.kill(pids[1], signal.SIGKILL)

        with pytest.raises(EngineDeadError, match=r"rank 2 .* has ended with -9"):
            await stream()
        llm.shutdown()
        assert all(ends(pid) for pid in pids)

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size=2 with context_parallel_size=2 isn't b",
        ),
        ({"pipeline_parallel_size": 2}, "share the tokens of a sequence or the weights"),
        ({"stage_addresses": ["a:1"]}, "are those of 2 .*context_parallel_size out"),
        (
            {"block_size": 64},
            "blocks of 512 tokens, of which each rank keeps 256, so block_size=64",
        ),
        ({"layout": "linear"}, "isn't built together with layout='linear'"),
        ({"max_attention_window": 64}, "isn't built together with a max_attention_window"),
        ({"kv_cache_dtype": "kivi"}, "isn't built together with kv_cache_dtype='kivi'"),
        ({"prefix_cache_dir": "x", "enable_prefix_caching": True}, "with a prefix_cache_dir"),
        ({"enable_lora": True}, "isn't built together with enable_lora"),
        ({"load_format": "dummy"}, "isn't built together with load_format='dummy'"),
        ({"speculative_config": {"method": "self"}}, "isn't built together with guesses by 'self'"),
    ],
)
def test_what_does_not_go_together(beside: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(context_parallel_size=2, **beside)


def test_sizes_that_are_none() -> None:
    with pytest.raises(ConfigError, match="context_parallel_size must be a positive integer"):
        LLM(context_parallel_size=0)
    with pytest.raises(ConfigError, match="context_parallel_size=65 are 65 processes, and 64"):
        LLM(context_parallel_size=65)
    with pytest.raises(ConfigError, match="context_parallel_size is of prompts and answers"):
        LLM(decode_context_parallel_size=2)
