"""The runner: copies first, then the forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime import Runner
from penstock.step import KV, Step


def _step() -> Step:
    ints = torch.zeros(1, dtype=torch.int32)
    return Step(ints, ints, ints, ints, ints, ints[None], ints)


def test_copies_come_before_the_step() -> None:
    kv: KV = [(torch.arange(4.0)[:, None], torch.arange(4.0)[:, None])]
    seen = []

    def forward(step: Step, cache: KV) -> Tensor:
        assert cache is kv and torch.is_inference_mode_enabled()
        seen.append([tensor[:, 0].tolist() for tensor in cache[0]])
        cache[0][0][0] = 9.0  # a step that writes to what was copied
        return torch.ones(1, 3)

    runner = Runner(forward, kv)
    runner.copy([(0, 2), (1, 3)])
    assert runner.forward(_step()).tolist() == [[1.0, 1.0, 1.0]]
    assert seen == [[[0.0, 1.0, 0.0, 1.0]] * 2]
    assert kv[0][0][:, 0].tolist() == [9.0, 1.0, 0.0, 1.0]
    runner.forward(_step())
    assert len(seen) == 2


def test_blocks_go_out_and_come_back() -> None:
    kv: KV = [(torch.arange(4.0)[:, None], torch.arange(4.0)[:, None] + 9)]
    runner = Runner(lambda step, kv: torch.ones(1, 3), kv)
    runner.swap_out([(1, 0), (3, 1)])
    for part in kv[0]:
        part.zero_()
    runner.swap_in([(1, 0), (0, 2)])
    assert [part[:, 0].tolist() for part in kv[0]] == [[3.0, 0.0, 1.0, 0.0], [12.0, 0.0, 10.0, 0.0]]


def test_one_engine_at_a_time() -> None:
    class Owner:
        has_unfinished = True

    runner = Runner(lambda step, kv: torch.ones(1, 3), [])
    first, second = Owner(), Owner()
    with pytest.raises(ConfigError, match="given to another engine"):
        runner.check(first)
    runner.claim(first)
    runner.check(first)
    with pytest.raises(ConfigError, match="Another engine has requests on this runtime"):
        runner.claim(second)
    first.has_unfinished = False
    runner.claim(second)
    runner.check(second)
    with pytest.raises(ConfigError, match="given to another engine"):
        runner.check(first)
    del second
    runner.claim(first)  # nobody is left who could mind
