"""Models whose layers several stages have: threads here, with sockets between them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.kernels import native
from penstock.models.load import load_model, weight_bytes
from penstock.ops.ranks import HEADER
from penstock.parallel import Ranks, Stage
from penstock.runtime.parts import PART_TOKENS, PARTS, joined, part, parts_of
from penstock.step import Step
from tests.models.tiny import DIVISIBLE, Make
from tests.parallel.test_models import logits_of

WAYS = ["reference", *["native"] * (native.handle is not None)]


def way(name: str, which: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = ops.implementations(name)[which]
    return found


def of_stages(
    count: int, folder: Path, tokens: Tensor, width: int = 1, program: bool = True, **asked: Any
) -> Tensor:
    """The last stage's logits, each stage of `width` ranks."""
    meetings = [torch.zeros(HEADER + (2 << 20), dtype=torch.uint8) for _ in range(count)]
    with ExitStack() as stack:
        pairs = [[socket.socketpair() for _ in range(width)] for _ in range(count - 1)]
        ends = [end for row in pairs for pair in row for end in pair]
        for end in ends:
            stack.enter_context(end)

        def run(place: tuple[int, int]) -> Tensor:
            number, rank = place
            before = pairs[number - 1][rank][1].fileno() if number else -1
            after = pairs[number][rank][0].fileno() if number + 1 < count else -1
            stage = Stage(number, count, before, after)
            try:
                loaded = load_model(
                    folder, ranks=Ranks(rank, width, meetings[number], stage=stage), **asked
                )
                return logits_of(loaded, tokens, "auto", program)
            except BaseException:
                for end in ends:
                    end.shutdown(socket.SHUT_RDWR)
                for meeting in meetings:
                    meeting[0] = 1
                raise

        places = [(number, rank) for number in range(count) for rank in range(width)]
        with ThreadPoolExecutor(len(places)) as threads:
            return list(threads.map(run, places))[(count - 1) * width]


@pytest.mark.parametrize("name", DIVISIBLE)
def test_every_family(tiny: Make, name: str) -> None:
    found = tiny(name)
    program = native.handle is not None
    whole = logits_of(load_model(found.folder, dtype="bfloat16"), found.prompt, "auto", program)
    stages = of_stages(2, found.folder, found.prompt, program=program, dtype="bfloat16")
    assert torch.equal(whole, stages)


@pytest.mark.parametrize("program", [False, *[True] * (native.handle is not None)])
@pytest.mark.parametrize("name", ["llama3-rope", "gpt2", "deepseek-v3", "gpt-oss"])
def test_stages_of_ranks(tiny: Make, name: str, program: bool) -> None:
    """Three stages of two ranks, whose layers aren't as many in each."""
    found = tiny(name)
    whole = logits_of(load_model(found.folder), found.prompt, "auto", program)
    assert torch.equal(whole, of_stages(3, found.folder, found.prompt, 2, program))


def test_a_stage_loads_what_it_computes(tiny: Make) -> None:
    """The first the embedding, the last norm and head; tied, both have the matrix."""
    none = torch.zeros(HEADER + 128, dtype=torch.uint8)

    def loaded(name: str, number: int) -> tuple[set[str], int]:
        stage = Stage(number, 3, 0, 0)
        model = load_model(tiny(name).folder, ranks=Ranks(0, 1, none, stage=stage)).model
        parts = {n for n, p in model.named_parameters() if p.numel()}
        return {n.rpartition(".layers.")[0] + ".".join(n.split(".")[:2]) for n in parts}, (
            weight_bytes(model)
        )

    first, middle, last = (loaded("mistral", number)[0] for number in range(3))
    assert first == {"embed.weight", "layers.0"}
    assert middle == {"layers.1"}
    assert last == {"layers.2", "norm.weight", "head.weight"}
    whole = weight_bytes(load_model(tiny("mistral").folder).model)
    assert sum(loaded("mistral", number)[1] for number in range(3)) == whole
    assert "head.weight" in loaded("llama3-rope", 0)[0]
    with pytest.raises(UnsupportedModelError, match="3 layers are too few for 4 stages"):
        Stage(0, 4).layers(3)


@pytest.mark.parametrize("which", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_through_a_socket(which: str, dtype: torch.dtype) -> None:
    """More than a socket holds, and none."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        for rows in (3, 0, 2000):
            x, sampled = torch.randn(rows, 256).to(dtype), torch.zeros(2, dtype=torch.int32)
            given = threads.submit(way("hand_on", which), x, sampled, ours.fileno())
            tokens = torch.zeros(rows, dtype=torch.int32)
            found = way("take_over", which)(tokens, 256, dtype, theirs.fileno())
            assert torch.equal(found, x)
            nothing = given.result(5)
            assert nothing.shape == (2, 0)
            assert nothing.dtype is torch.float32
        ours.close()
        with pytest.raises(RuntimeError, match="another rank of this step has gone"):
            way("take_over", which)(torch.zeros(1, dtype=torch.int32), 8, dtype, theirs.fileno())
        with pytest.raises(RuntimeError, match="another rank of this step has gone"):
            way("hand_on", which)(torch.zeros(1, 8, dtype=dtype), sampled, theirs.fileno())


def ragged(queries: list[int], contexts: list[int], sampled: list[int]) -> Step:
    """A step of sequences that bring so many tokens after what is there already."""

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    total = sum(queries)
    return Step(
        torch.arange(total, dtype=torch.int32),
        ints([c - q + i for q, c in zip(queries, contexts, strict=True) for i in range(q)]),
        torch.arange(total, dtype=torch.int32) + 7,
        ints([0, *np.cumsum(queries)]),
        ints(contexts),
        torch.arange(3 * len(queries), dtype=torch.int32).view(-1, 3),
        ints(sampled),
    )


def test_a_part_of_a_step() -> None:
    whole = ragged([1, 5, 3], [9, 5, 20], [0, 3, 5, 8])
    cut = part(whole, 0, 4)
    assert cut.query_start.tolist() == [0, 1, 4]
    assert cut.context_len.tolist() == [9, 3]
    assert cut.block_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cut.sample_at.tolist() == [0, 3]
    rest = part(whole, 4, 9)
    assert rest.query_start.tolist() == [0, 2, 5]
    assert rest.context_len.tolist() == [5, 20]
    assert rest.positions.tolist() == [3, 4, 17, 18, 19]
    assert rest.sample_at.tolist() == [1, 4]


def test_parts_are_the_whole() -> None:
    """Any cuts of any step: each token once, with what it sees; rows in the order of the asked."""
    random = np.random.default_rng(3)
    for _ in range(50):
        queries = random.integers(1, 400, random.integers(1, 6)).tolist()
        contexts = [q + int(random.integers(0, 50)) for q in queries]
        total = sum(queries)
        step = ragged(queries, contexts, random.permutation(total)[: total // 3].tolist())
        parts = parts_of(step, 2)
        assert len(parts) == max(min(total // PART_TOKENS, 2 * PARTS), 1)
        for name in ("tokens", "positions", "slots"):
            together = torch.cat([getattr(one, name) for one in parts])
            assert torch.equal(together, getattr(step, name))
        for one in parts:
            assert one.query_start[-1] == one.num_tokens
            for b in range(one.num_sequences):
                last = int(one.query_start[b + 1]) - 1
                assert one.context_len[b] == one.positions[last] + 1
        found = [one.tokens[one.sample_at.long()][:, None] for one in parts]
        assert torch.equal(joined(found, step, parts).squeeze(1), step.sample_at)
    assert {f.name for f in fields(Step)} == {f.name for f in fields(parts[0])}
