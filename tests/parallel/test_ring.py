"""Models whose sequences ranks share: threads here, each with some tokens, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.cache import kv_dtype
from penstock.config import EngineConfig
from penstock.config.parallel import SPAN_TOKENS
from penstock.errors import ConfigError, UnsupportedModelError
from penstock.kernels import native
from penstock.models.load import load_model
from penstock.nn.shared import check_shareable
from penstock.nn.spec import VisionSpec
from penstock.ops.attention import SPAN
from penstock.parallel import Ring
from penstock.runtime import Program
from penstock.runtime.device import CPU
from penstock.runtime.footprint import footprints
from penstock.runtime.hidden import HiddenRunner
from penstock.runtime.runner import Forward, Runner
from penstock.step import Step
from tests.models.tiny import CASES, DIVISIBLE, make_model
from tests.ops.test_ring import meeting_of

LENGTH = 1400
"""Tokens of a prompt: six spans."""

Long = Callable[[str], Path]

pytestmark = pytest.mark.skipif(native.handle is None, reason="no native kernels")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Long:
    """Tiny checkpoints that have positions for longer texts, each made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            case = CASES[name]
            positions = "n_positions" if name == "gpt2" else "max_position_embeddings"
            case = replace(case, changes={**case.changes, positions: 2048})
            made[name] = tmp_path_factory.mktemp(name)
            make_model(case).save_pretrained(made[name])
        return made[name]

    return get


def steps(size: int) -> list[Step]:
    """Of two sequences: a prompt in chunks beside one that decodes, a draft, single tokens."""
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 320, (2, LENGTH), generator=random, dtype=torch.int32)
    tables = torch.randperm(2 * (LENGTH // size + 1), generator=random).view(2, -1).int()
    done, found = [0, 0], []
    for counts in ((300, 0), (1, 690), (1, 310), (5, 2), (1, 1), (600, 1)):
        at = [torch.arange(d, d + n).int() for d, n in zip(done, counts, strict=True)]
        done = [d + n for d, n in zip(done, counts, strict=True)]
        slots = [t[a // size] * size + a % size for t, a in zip(tables, at, strict=True)]
        rows = torch.arange(sum(counts)).int()
        found.append(
            Step(
                tokens=torch.cat([t[a.long()] for t, a in zip(tokens, at, strict=True)]),
                positions=torch.cat(at),
                slots=torch.cat(slots),
                query_start=torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
                context_len=torch.tensor(done, dtype=torch.int32),
                block_table=tables,
                sample_at=rows.flip(0)[:40],
            )
        )
    return found


def of_ranks(
    size: int,
    folder: Path,
    kv: str = "auto",
    *,
    program: bool = True,
    hidden: bool = False,
    place_bytes: int = 1 << 20,
    **asked: Any,
) -> list[Tensor]:
    """The first rank's logits; 1: those of one process."""
    meeting = meeting_of(place_bytes)

    def rank(number: int) -> list[Tensor]:
        try:
            ranks = Ring(number, size, meeting) if size > 1 else None
            model = load_model(folder, ranks=ranks, **asked).model
            layout = CPU.layout(model.cached_layers, kv_dtype(kv, model.dtype), SPAN * size)
            cache = replace(layout, ranks=size).allocate(2 * (LENGTH // layout.block_size + 1))
            forward: Forward = Program(model, cache) if program else model
            runner = Runner(forward, cache, part=model.own_part)
            run = HiddenRunner(model, runner).forward if hidden else runner.forward
            return [run(step).clone() for step in steps(SPAN * size)]
        except BaseException:
            meeting[0] = 1  # nobody waits
            raise

    with ThreadPoolExecutor(size) as threads:
        return next(iter(list(threads.map(rank, range(size)))))


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", DIVISIBLE)
def test_every_family(long: Long, name: str) -> None:
    whole, *shared = (of_ranks(n, long(name), dtype="bfloat16") for n in (1, 2, 3))
    assert all(same(whole, each) for each in shared)


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_quantized_caches(long: Long, kv: str) -> None:
    whole, shared = (of_ranks(n, long("qwen3"), kv, dtype="bfloat16") for n in (1, 3))
    assert same(whole, shared)


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_rounded_weights(long: Long, quantization: str) -> None:
    whole, shared = (of_ranks(n, long("mixtral"), quantization=quantization) for n in (1, 2))
    assert same(whole, shared)


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("name", ["llama3-rope", "gpt2", "qwen3-moe", "deepseek-v3"])
def test_in_float32(long: Long, name: str, program: bool) -> None:
    """Operators one by one, and as one native call; more ranks than some steps have tokens."""
    whole, shared = (of_ranks(n, long(name), program=program) for n in (1, 4))
    assert same(whole, shared)


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_steps_that_need_several_meetings(long: Long, name: str) -> None:
    whole, shared = (of_ranks(n, long(name), place_bytes=200_000) for n in (1, 2))
    assert same(whole, shared)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states(long: Long, dtype: str) -> None:
    whole, shared = (of_ranks(n, long("gemma3"), hidden=True, dtype=dtype) for n in (1, 2))
    assert same(whole, shared)


def test_pictures_are_refused(long: Long) -> None:
    spec = load_model(long("llama")).spec.decoder
    seeing = replace(spec, vision=VisionSpec(*range(1, len(fields(VisionSpec)) + 1)))
    with pytest.raises(UnsupportedModelError, match="A model that sees pictures isn't built for"):
        check_shareable(seeing, Ring(0, 2, meeting_of(1 << 20)), 100)


def test_texts_without_room_are_refused(long: Long) -> None:
    """Before a weight is read, not when a text has grown so long."""
    says = r"have room for 1,792 of them, but max_model_len is 2,048: lower it"
    with pytest.raises(ConfigError, match=says):
        of_ranks(2, long("llama"), place_bytes=1 << 15)


def test_a_span_is_what_attention_takes() -> None:
    assert SPAN_TOKENS == SPAN


def test_what_it_takes_is_not_planned(long: Long) -> None:
    asked = EngineConfig.of(model=long("llama"), context_parallel_size=2)
    with pytest.raises(ConfigError, match="What context_parallel_size=2 takes isn't planned"):
        footprints(asked, CPU)
