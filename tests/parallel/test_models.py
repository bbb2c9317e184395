"""Models that ranks share: threads here, each with its part, over a meeting of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.cache import kv_dtype
from penstock.errors import ConfigError, PenstockError, UnsupportedModelError
from penstock.kernels import native
from penstock.models.load import LoadedModel, load_model
from penstock.ops.ranks import HEADER
from penstock.parallel import Ranks
from penstock.runtime import Program
from penstock.runtime.device import CPU
from penstock.runtime.runner import Forward
from penstock.step import Step
from tests.models.tiny import BLOCK, DIVISIBLE, TABLE, Make

MIXTURES = ["mixtral", "olmoe", "qwen2-moe", "deepseek-v3", "gpt-oss"]


def logits_of(loaded: LoadedModel, tokens: Tensor, kv: str, program: bool) -> Tensor:
    """Of a prompt in two chunks and of three tokens one by one."""
    model = loaded.model
    layout = CPU.layout(model.cached_layers, kv_dtype(kv, model.dtype), BLOCK)
    cache = layout.allocate(len(TABLE) + 1)
    forward: Forward = Program(model, cache) if program else model
    table, found, done = torch.tensor(TABLE, dtype=torch.int32), [], 0
    for count in (40, len(tokens) - 43, 1, 1, 1):
        at = torch.arange(done, done + count, dtype=torch.int32)
        done += count
        step = Step(
            tokens=tokens[at.long()].to(torch.int32),
            positions=at,
            slots=table[at // BLOCK] * BLOCK + at % BLOCK,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_len=torch.tensor([done], dtype=torch.int32),
            block_table=table[None],
            sample_at=torch.arange(count, dtype=torch.int32),
        )
        with torch.inference_mode():
            found.append(forward(step, cache).clone())
    return torch.cat(found)


def of_ranks(
    size: int,
    folder: Path,
    tokens: Tensor,
    kv: str = "auto",
    *,
    program: bool = native.handle is not None,
    whole_experts: bool = False,
    place_bytes: int = 1 << 20,
    **asked: Any,
) -> Tensor:
    """The first rank's logits; 1: of a whole model."""
    if size == 1:
        return logits_of(load_model(folder, **asked), tokens, kv, program)
    meeting = torch.zeros(HEADER + 2 * place_bytes, dtype=torch.uint8)

    def rank(number: int) -> Tensor:
        try:
            ranks = Ranks(number, size, meeting, whole_experts)
            return logits_of(load_model(folder, ranks=ranks, **asked), tokens, kv, program)
        except BaseException:
            meeting[0] = 1  # nobody waits
            raise

    with ThreadPoolExecutor(size) as threads:
        return next(iter(list(threads.map(rank, range(size)))))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", DIVISIBLE)
def test_every_family(tiny: Make, name: str, size: int) -> None:
    found = tiny(name)
    if size > found.case.changes.get("num_attention_heads", 4):
        pytest.skip("a rank has a head at least")
    whole, shared = (of_ranks(n, found.folder, found.prompt, dtype="bfloat16") for n in (1, size))
    assert torch.equal(whole, shared)


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8", "w4a16-g64-asym", "fp8-tensor", "nvfp4"])
@pytest.mark.parametrize("name", ["qwen2", "mixtral", "deepseek-v2"])
def test_rounded_as_one(tiny: Make, name: str, quantization: str) -> None:
    """Also where a scale is all of a matrix's."""
    found = tiny(name)
    whole, shared = (
        of_ranks(n, found.folder, found.prompt, quantization=quantization) for n in (1, 2)
    )
    assert torch.equal(whole, shared)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_with_whole_experts(tiny: Make, name: str, size: int) -> None:
    found = tiny(name)
    whole = of_ranks(1, found.folder, found.prompt, dtype="bfloat16")
    shared = of_ranks(
        size, found.folder, found.prompt, dtype="bfloat16", whole_experts=True
    )  # fmt: skip
    assert torch.equal(whole, shared)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("name", ["llama3-rope", "mixtral", "deepseek-v3"])
def test_operators_one_by_one(tiny: Make, name: str, whole_experts: bool) -> None:
    found, experts = tiny(name), whole_experts and name != "llama3-rope"
    whole, shared = (
        of_ranks(n, found.folder, found.prompt, program=False, whole_experts=experts and n > 1)
        for n in (1, 2)
    )
    assert torch.equal(whole, shared)


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_quantized_caches(tiny: Make, kv: str) -> None:
    found = tiny("qwen3")
    whole, shared = (of_ranks(n, found.folder, found.prompt, kv, dtype="bfloat16") for n in (1, 2))
    assert torch.equal(whole, shared)


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek-v3"])
def test_steps_that_need_several_meetings(tiny: Make, name: str) -> None:
    """Rows that have no room in a place are put together some at a time."""
    found = tiny(name)
    whole = of_ranks(1, found.folder, found.prompt)
    for experts in (False, name != "llama"):
        shared = of_ranks(
            2, found.folder, found.prompt, place_bytes=4096, whole_experts=experts
        )  # fmt: skip
        assert torch.equal(whole, shared)


def test_what_ranks_cannot_share(tiny: Make) -> None:
    def refused(name: str, size: int, says: str, **more: Any) -> None:
        kind: type[PenstockError] = UnsupportedModelError if not more else ConfigError
        with pytest.raises(kind, match=says):
            of_ranks(size, tiny(name).folder, tiny(name).prompt, **more)

    refused("llama", 3, "4 heads over 2 key heads can't be shared among 3 ranks: .* 1, 2, 4")
    refused("llama", 2, "has no effect on a model without experts", whole_experts=True)


def test_parts_are_as_equal_as_can_be() -> None:
    ranks: Callable[[int], Ranks] = lambda size: Ranks(size - 1, size, torch.zeros(0))  # noqa: E731
    assert ranks(3).split(100).bounds == (0, 32, 64, 100)
    assert ranks(4).split(5, 1).bounds == (0, 1, 2, 3, 5)
    assert list(ranks(3).split(100).own) == list(range(64, 100))
    shared, keys = ranks(3).heads(20, 5)
    assert shared.bounds == (0, 4, 12, 20)
    assert keys == range(3, 5)
    shared, keys = ranks(4).heads(8, 2)
    assert shared.bounds == (0, 2, 4, 6, 8)
    assert keys == range(1, 2)
    assert ranks(3).split(30).bounds == (0, 10, 20, 30)  # fewer panels than ranks
    with pytest.raises(UnsupportedModelError, match="2 columns or experts are too few for 3"):
        ranks(3).split(2)
