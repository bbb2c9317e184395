"""After warm-up nothing is allocated: a step writes where the steps before it wrote.

Two counts: what kernels and programs take from the system, and what torch takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from penstock import LLM, SamplingParams
from penstock.kernels import native

from ..models.tiny import MAX_LEN, make_tiny

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

SEQUENCES, STEPS = 8, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=["qwen2", "gemma2", "mixtral", "gpt-oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    make_tiny(str(request.param), path)
    return path


def llm_of(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder, skip_tokenizer_init=True, max_model_len=MAX_LEN, max_num_seqs=SEQUENCES,
        num_blocks=96, **options,
    )  # fmt: skip


def begin(llm: LLM, name: str, length: int, params: SamplingParams = GREEDY) -> None:
    """All sequences, until each decodes."""
    for i in range(SEQUENCES):
        prompt = [3 + (7 * i + j) % 300 for j in range(length + i)]
        llm.engine.add_request(f"{name}-{i}", prompt, params)
    for _ in range(4):
        llm.engine.step()


def end(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()


def taken_by_torch(llm: LLM) -> list[str]:
    """The operators that took memory in some steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(STEPS):
            llm.engine.step()
    events = seen.events()
    assert events is not None
    assert sum(event.name == "penstock::program_run" for event in events) == STEPS
    return [event.name for event in events if event.cpu_memory_usage > 0]


@pytest.mark.parametrize("quantization", [None, "w8a8", "w4a16"])
def test_steps_that_decode_take_no_memory(folder: Path, quantization: str | None) -> None:
    llm = llm_of(folder, quantization=quantization)
    begin(llm, "first", 20)
    before = native.allocations
    assert taken_by_torch(llm) == []
    assert native.allocations == before
    end(llm)


def test_prompts_take_none_but_for_the_first(folder: Path) -> None:
    """Of the largest step that there may be; smaller ones find room."""
    llm = llm_of(folder, quantization="w8a8", enable_prefix_caching=False)
    begin(llm, "first", 60)
    end(llm)
    before = native.allocations
    for name, length in (("second", 60), ("third", 3), ("fourth", 40)):
        begin(llm, name, length)
        end(llm)
    assert native.allocations == before


def test_the_count_counts(folder: Path) -> None:
    """A larger step than there was takes memory: the tests above can fail."""
    llm = llm_of(folder, enable_prefix_caching=False)
    llm.engine.add_request("short", [5, 6], GREEDY)
    end(llm)
    before = native.allocations
    llm.runtime.runner.program.reserve(1 << 14, 1)  # type: ignore[union-attr]
    assert native.allocations > before
    params = SamplingParams(max_tokens=64, logprobs=5, ignore_eos=True, detokenize=False)
    begin(llm, "drawn", 20, params)
    assert taken_by_torch(llm)  # log-probabilities are results
    end(llm)
