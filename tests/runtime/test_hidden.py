"""Hidden states as one native call: what the decoder's final norm makes, bit for bit."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import native
from penstock.nn import Decoder
from penstock.runtime import Program, Runner
from penstock.runtime.hidden import HiddenRunner
from tests.exactness.bits import Machine, build

from .test_program import prefill

FORMATS = [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "w4a8")]


def rows(decoder: Decoder, machine: Machine, sampled: int) -> torch.Tensor:
    """The norm alone, widened by torch."""
    step = prefill(300, sampled)
    with torch.inference_mode():
        residual = decoder.hidden_states(step, machine.kv)
        return decoder.norm(residual[step.sample_at.long()]).float()


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("sampled", [0, 1, 300])
def test_operator_by_operator(dtype: torch.dtype, quantization: str | None, sampled: int) -> None:
    decoder = build(dtype, quantization)
    machine = Machine(decoder)
    runner = HiddenRunner(decoder, Runner(decoder, machine.kv))
    found = runner.forward(prefill(300, sampled))
    assert found.dtype is torch.float32 and found.shape == (sampled, 224)
    assert torch.equal(found, rows(decoder, machine, sampled))


@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("sampled", [0, 1, 300])
def test_as_one_call(dtype: torch.dtype, quantization: str | None, sampled: int) -> None:
    decoder = build(dtype, quantization)
    machine = Machine(decoder)
    program = Program(decoder, machine.kv)
    runner = HiddenRunner(decoder, Runner(program, machine.kv))
    assert isinstance(runner._forward, Program)
    want = rows(decoder, machine, sampled)
    assert torch.equal(runner.forward(prefill(300, sampled)), want)
    logits = program(prefill(300, 3), machine.kv).clone()  # the two don't share buffers
    assert torch.equal(runner.forward(prefill(300, sampled)), want)
    assert torch.equal(program(prefill(300, 3), machine.kv), logits)
