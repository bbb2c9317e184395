"""A linear cache, where a sequence's keys lie side by side: the same tokens as a paged one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from tests.engine.test_ranks import TEXTS, said
from tests.models.tiny import make_tiny

PROMPTS = [{"prompt_token_ids": [5 + (i * j) % 999 for i in range(300)]} for j in (3, 7, 11)]
KINDS = (
    SamplingParams(temperature=0, max_tokens=90, logprobs=2),
    SamplingParams(seed=5, n=3, max_tokens=40, logprobs=1),
)


def asked(llm: LLM) -> Any:
    found = [said(llm.generate(prompts, kind)) for kind in KINDS for prompts in (TEXTS, PROMPTS)]
    beams = llm.beam_search(TEXTS[:2], BeamSearchParams(beam_width=3, max_tokens=12))
    return found, [[sequence.tokens for sequence in beam.sequences] for beam in beams]


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_dtype": "int8"},
        {"speculative_config": {"method": "ngram"}, "quantization": "w8a8"},
        {"tensor_parallel_size": 2},
    ],
)
def test_they_say_what_a_paged_cache_says(engine: dict[str, Any]) -> None:
    paged = LLM(max_model_len=500, enable_prefix_caching=False, **engine)
    linear = LLM(max_model_len=500, layout="linear", **engine)
    assert linear.engine.runtime.layout.block_size == 512
    assert paged.engine.runtime.layout.block_size == 32
    assert asked(linear) == asked(paged)


def test_sequences_that_give_way() -> None:
    """Two have room; the others wait, or are computed again or swapped."""
    params = SamplingParams(seed=1, n=2, max_tokens=60, ignore_eos=True, logprobs=1)
    paged = LLM(max_model_len=500, enable_prefix_caching=False)
    for mode in ("recompute", "swap"):
        linear = LLM(max_model_len=500, layout="linear", num_blocks=3, preemption_mode=mode)
        assert said(linear.generate(TEXTS, params)) == said(paged.generate(TEXTS, params))
        assert linear.stats()["used_blocks"] == 0


def test_a_window(tmp_path: Path) -> None:
    """Nothing of a sequence's only block is let go."""
    make_tiny("mistral", tmp_path)
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in (5, 50, 90)]
    model: dict[str, Any] = {"model": tmp_path, "skip_tokenizer_init": True}
    paged, linear = LLM(**model, enable_prefix_caching=False), LLM(**model, layout="linear")
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=2)
    assert said(linear.generate(prompts, params)) == said(paged.generate(prompts, params))


def test_what_does_not_go_with_it() -> None:
    assert not EngineConfig.of(layout="linear").cache.enable_prefix_caching
    assert EngineConfig.of(layout="linear").storing("int8").cache.layout == "linear"
    for name, value in (
        ("enable_prefix_caching", True), ("block_size", 32), ("block_size", 64),
        ("kv_cache_dtype", "kivi"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"one block for all its tokens, so {name}"):
            EngineConfig.of(layout="linear", **{name: value})
    with pytest.raises(ConfigError, match="layout='linear' doesn't go with guesses by 'eagle'"):
        EngineConfig.of(layout="linear", speculative_config={"method": "eagle"})
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        EngineConfig.of(layout="linear", prefix_cache_dir="kept")
