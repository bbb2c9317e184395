"""Steps that decode are padded and replayed: what is chosen, what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.config import CompilationConfig
from penstock.errors import ConfigError
from penstock.runtime.device import Device
from penstock.runtime.graphs import GraphForward, StepLimits, capture_sizes
from penstock.step import KV, Step
from tests.runtime.test_staging import decoding, ragged

DEVICE = Device(torch.device("cpu"), by_triton=True)
LIMITS = StepLimits(sequences=20, tokens=64, width=64)


class Echo(nn.Module):
    """Logits that say what a step was; notes the shapes it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def forward(self, step: Step, kv: KV) -> Tensor:
        self.seen.append(tuple(step.block_table.shape))  # type: ignore[arg-type]
        rows = step.sample_at.long()
        return torch.stack((step.tokens[rows], step.positions[rows]), dim=1).float()


def over(echo: Echo, kv: KV, **options: object) -> GraphForward:
    return GraphForward(echo, kv, DEVICE, LIMITS, CompilationConfig(**options))  # type: ignore[arg-type]


def test_sizes() -> None:
    assert capture_sizes(1) == (1,)
    assert capture_sizes(4) == (1, 2, 4)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)


def test_decoding_is_recorded_once_and_replayed() -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv)
    for count in (5, 6, 8, 5):
        logits = forward(decoding(count), kv)
        assert logits.tolist() == [[50.0 + i, 3.0 + i] for i in range(count)]
    assert set(echo.seen) == {(8, 8)}  # padded to one shape
    assert (forward.counts.captures, forward.counts.replays, forward.counts.eager) == (1, 3, 0)
    forward(decoding(9), kv)
    assert echo.seen[-1] == (16, 8)
    assert forward.counts.captures == 2


def test_prompts_run_kernel_by_kernel() -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv)
    assert forward(ragged(), kv).tolist() == [[7.0, 2.0], [8.0, 40.0]]
    assert echo.seen == [(2, 2)]
    assert forward.counts.eager == 1


def test_beyond_the_largest_size() -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv, cudagraph_capture_sizes=[2, 4])
    assert len(forward(decoding(5), kv)) == 5
    assert (forward.counts.captures, forward.counts.eager) == (0, 1)
    assert len(forward(decoding(3), kv)) == 3
    assert echo.seen[-1] == (4, 8)


def test_none() -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv, cudagraph_mode="none")
    forward(decoding(5), kv)
    assert echo.seen == [(5, 1)]
    assert forward.counts.eager == 1
    assert forward.how == "kernels one by one"


def test_widths_of_tables() -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv)
    for width, padded in ((1, 8), (8, 8), (9, 32), (33, 64), (64, 64)):
        step = decoding(2)
        table = torch.ones((2, width), dtype=torch.int32)
        forward(replace(step, block_table=table), kv)
        assert echo.seen[-1] == (2, padded)


def test_graphs_of_more_than_a_step_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"graphs of 64 sequences.*more than 20 .*Leave larger"):
        over(Echo(), [(torch.zeros(1),)], cudagraph_capture_sizes=[1, 64])
    few = GraphForward(
        Echo(), [(torch.zeros(1),)], DEVICE, replace(LIMITS, tokens=8), CompilationConfig()
    )
    few.warm_up()
    assert few.counts.captures == 3 * len(capture_sizes(8))


def test_a_table_wider_than_any_leaves_graphs_as_they_are() -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv)
    forward(decoding(2), kv)
    where = forward._inputs.address
    wide = replace(decoding(2), block_table=torch.ones((2, 4000), dtype=torch.int32))
    assert forward(wide, kv).tolist() == [[50.0, 3.0], [51.0, 4.0]]
    assert (echo.seen[-1], forward.counts.eager) == ((2, 4000), 1)
    assert forward._inputs.address == where
    assert forward(decoding(2), kv).tolist() == [[50.0, 3.0], [51.0, 4.0]]
    assert forward.counts.replays == 1


def test_another_cache_has_no_graphs() -> None:
    """A graph reads the cache that it was recorded over."""
    echo, kv, other = Echo(), [(torch.zeros(1),)], [(torch.zeros(1),)]
    forward = over(echo, kv)
    forward(decoding(5), other)
    assert (forward.counts.captures, forward.counts.eager) == (0, 1)


@pytest.mark.parametrize("mode", ["none", "full_decode_only"])
def test_tokens_that_are_on_the_device_already(mode: str) -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv, cudagraph_mode=mode)
    step = decoding(3)
    step.tokens[:] = torch.tensor([2, 0, 4])
    chosen = torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32)
    assert forward.follow(step, kv, chosen)[:, 0].tolist() == [12.0, 10.0, 14.0]


def test_warm_up_records_every_size() -> None:
    echo, kv = Echo(), [(torch.zeros(1),)]
    forward = over(echo, kv)
    with torch.inference_mode():
        forward.warm_up()
        assert forward.counts.captures == 3 * len(capture_sizes(LIMITS.sequences))
        assert {width for _, width in echo.seen} == {64, 32, 8, 1}
        assert forward.counts.replays == 0
        forward(decoding(5), kv)
    assert forward.counts.replays == 1
