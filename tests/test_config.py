"""What a user chose is checked at once, and by name."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.config import EngineConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_length": 5}, "Did you mean 'max_model_len'"),
        ({"cls": 1}, "'cls' isn't an argument of the engine"),
        ({"self": 1}, "'self' isn't an argument of the engine"),
        ({"max_model_len": 0}, "max_model_len must be a positive integer, not 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be a positive integer, not True"),
        ({"device": "gpu"}, "cuda:N with N from 0 to 99, not 'gpu'"),
        ({"device": "cuda:007"}, "not 'cuda:007'"),
        ({"device": "cuda:256"}, "not 'cuda:256'"),  # torch takes it for cuda:0
        ({"device": "cuda:١"}, "not 'cuda:١'"),
        ({"deterministic": 0}, "deterministic must be True, False or None, not 0"),
        ({"async_scheduling": 0}, "async_scheduling must be True, False or None, not 0"),
        ({"tokenizer": ["x"]}, "tokenizer must be a folder or a hub id, not "),
        ({"dtype": "float64"}, "dtype='float64' isn't one of auto, float32"),
        ({"block_size": 16}, "multiple of 32 tokens, not 16"),
        ({"memory_fraction": 0.0}, r"in \(0, 1\], not 0.0"),
        ({"memory_fraction": "x"}, "memory_fraction must be a number, not 'x'"),
        ({"memory_fraction": 0.5, "num_blocks": 9}, "leaves memory_fraction=0.5 .* nothing to"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3' isn't one of auto, int8, .* kivi"),
        ({"kv_recent_window": 64}, "kv_cache_dtype='auto' has no use for kv_recent_window=64"),
        (
            {"kv_cache_dtype": "kivi", "kv_recent_window": 0},
            "kv_recent_window must be a positive integer, not 0",
        ),
        (
            {"kv_cache_dtype": "kivi", "enable_prefix_caching": True},
            "'kivi' can't go with enable_prefix_caching: .* kv_cache_dtype='int4' goes with it",
        ),
        (
            {"kv_cache_dtype": "kivi", "preemption_mode": "swap"},
            "'kivi' can't be swapped out: .* Leave out preemption_mode='swap' and swap_space",
        ),
        ({"kv_cache_dtype": "kivi", "swap_space": 1}, "'kivi' can't be swapped out"),
        ({"policy": "edr"}, "policy='edr' isn't one of .* Did you mean 'edf'"),
        ({"policy": "edf", "scheduling_policy": "edf"}, "given twice"),
        ({"ttft_slo_s": 1.0}, "policy='fcfs' has no use for ttft_slo_s=1.0. Set policy='edf'"),
        ({"policy": "sjf", "tpot_slo_s": 1.0}, "policy='sjf' has no use for tpot_slo_s"),
        ({"policy": "edf", "tpot_slo_s": 0}, "tpot_slo_s must be a positive number of seconds"),
        ({"policy": "edf", "ttft_slo_s": float("nan")}, "ttft_slo_s must be a positive number"),
        ({"starvation_s": 5.0}, "policy='fcfs' leaves starvation_s=5.0 nothing to decide"),
        ({"policy": "sjf", "starvation_s": None}, "starvation_s must be .*, not None"),
        ({"preemption_mode": "swapp"}, "Did you mean 'swap'"),
        ({"swap_space": -1}, "swap_space must be a number of GiB, at least 0, not -1"),
        ({"swap_space": True}, "swap_space must be a number of GiB"),
        ({"preemption_mode": "swap", "swap_space": 0}, "has nowhere to swap to: swap_space is 0"),
        ({"preemption_mode": "recompute", "swap_space": 2}, "has no use for swap_space=2"),
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"model": None}, "model must be a folder, a hub id or a name, not None"),
        ({"model": ""}, "model must be"),
        ({"skip_tokenizer_init": True, "tokenizer": "x"}, "leaves no use for tokenizer='x'"),
        ({"num_blocks": 5, "num_gpu_blocks_override": 5}, "given twice"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            r"\(32\) is below max_num_seqs \(64\)",
        ),
        (
            {"enable_chunked_prefill": False, "max_model_len": 4096},
            r"max_model_len \(4096\) must fit in max_num_batched_tokens \(2048\)",
        ),
    ],
)
def test_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**arguments)


@pytest.mark.parametrize("kind", [penstock.LLM, penstock.AsyncLLM])
def test_names_that_python_uses_are_refused_as_any_other(kind: Any) -> None:
    for name in ("cls", "self"):
        with pytest.raises(ConfigError, match=f"'{name}' isn't an argument of the engine"):
            kind(**{name: 1})


def test_what_vllm_is_given_out_of_habit_asks_for_nothing() -> None:
    plain = {"tensor_parallel_size": 1, "trust_remote_code": False, "tokenizer_mode": "auto"}
    more = {"pipeline_parallel_size": None, "enable_lora": False, "disable_log_stats": True}
    assert EngineConfig.of(**plain, **more) == EngineConfig.of()
    for name, value, why in (
        ("data_parallel_size", True, "penstock fleet"),
        ("trust_remote_code", True, "no code of a checkpoint is ever run"),
        ("max_cpu_loras", 4, "max_loras"),
    ):
        with pytest.raises(ConfigError, match=f"{name}={value!r} can't take effect: .*{why}"):
            EngineConfig.of(**{name: value})


def test_flat_names_reach_their_part() -> None:
    config = EngineConfig.of(model="x", num_gpu_blocks_override=7, max_num_seqs=3, seed=4)
    assert (config.model.model, config.model.seed) == ("x", 4)
    assert (config.cache.num_blocks, config.scheduler.max_num_seqs) == (7, 3)


def test_names_of_vllm() -> None:
    config = EngineConfig.of(scheduling_policy="priority", preemption_mode="swap", swap_space=4)
    assert config.scheduler.policy == "priority"
    assert (config.scheduler.preemption_mode, config.scheduler.swap_space) == ("swap", 4)


def test_public_names() -> None:
    assert penstock.__all__ == [
        "LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "LoRARequest",
        "PenstockError", "RequestMetrics", "RequestOutput", "SamplingParams", "StructuredOutputs",
        "StructuredOutputsParams", "__version__",
    ]  # fmt: skip
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        penstock.LMM  # noqa: B018


def test_prefixes_are_cached_unless_the_cache_cannot_give_them() -> None:
    assert EngineConfig.of().cache.enable_prefix_caching is True
    assert EngineConfig.of(kv_cache_dtype="int4").cache.enable_prefix_caching is True
    kivi = EngineConfig.of(kv_cache_dtype="kivi", swap_space=0)
    assert kivi.cache.enable_prefix_caching is False
    assert EngineConfig.of(enable_prefix_caching=False).cache.enable_prefix_caching is False


def test_processes_that_share_a_context() -> None:
    asked = EngineConfig.of(context_parallel_size=3)
    assert (asked.parallel.size, asked.cache.block_size) == (3, 768)
    assert EngineConfig.of(context_parallel_size=None) == EngineConfig.of()
    assert EngineConfig.of(context_parallel_size=1).cache.block_size == 32
    assert EngineConfig.of(context_parallel_size=3, block_size=768) == asked
    with pytest.raises(ConfigError, match="context_parallel_size is of prompts and answers"):
        EngineConfig.of(prefill_context_parallel_size=2)


def test_processes_that_share_a_model() -> None:
    assert EngineConfig.of(tensor_parallel_size=2).parallel.tensor_parallel_size == 2
    assert EngineConfig.of(tensor_parallel_size=None) == EngineConfig.of()
    for value in (0, -1, 1.5, "2", True):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size must be a positive integer"):
            EngineConfig.of(tensor_parallel_size=value)
    with pytest.raises(ConfigError, match="=65 are 65 processes, and 64 is the most"):
        EngineConfig.of(tensor_parallel_size=65)
    both = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert EngineConfig.of(**both).parallel.size == 6
    assert EngineConfig.of(pipeline_parallel_size=None) == EngineConfig.of()
    with pytest.raises(ConfigError, match=r"=2 with pipeline_parallel_size=3 isn't built together"):
        EngineConfig.of(**both, enable_lora=True)
    with pytest.raises(ConfigError, match="enable_expert_parallel has no effect without"):
        EngineConfig.of(enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"isn't built together with kv_cache_dtype='kivi'"):
        EngineConfig.of(tensor_parallel_size=2).storing("kivi").check_together()  # an export's
    for name, value, says in (
        ("enable_lora", True, "enable_lora"),
        ("speculative_config", {"method": "self"}, "guesses by 'self'"),
        ("kv_cache_dtype", "kivi", "kv_cache_dtype='kivi'"),
        ("prefix_cache_dir", "kept", "a prefix_cache_dir"),
        ("load_format", "dummy", "load_format='dummy'"),
    ):
        with pytest.raises(ConfigError, match=f"=2 isn't built together with {says}. Leave one"):
            EngineConfig.of(tensor_parallel_size=2, **{name: value})
