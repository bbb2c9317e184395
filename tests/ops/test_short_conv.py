"""The short convolution: against its reference, torch's own, and itself in pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock import ops
from penstock.errors import KernelError
from penstock.kernels import native

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")

SLOTS = 8


@dataclass
class Case:
    mixed: Tensor
    conv: Tensor
    bias: Tensor | None
    inputs: Tensor
    starts: list[int]
    contexts: list[int]
    states: list[int] | None = None
    kept: list[list[int]] | None = None

    def run(self, name: str = "native") -> tuple[Tensor, Tensor]:
        """Outputs, and what lies in the slots then."""
        inputs = self.inputs.clone()

        def ints(values: list[int] | list[list[int]] | None) -> Tensor | None:
            return None if values is None else torch.tensor(values, dtype=torch.int32)

        kept = None if self.kept is None else torch.tensor(self.kept, dtype=torch.int32).view(-1, 2)
        out = ops.implementations("short_conv")[name](
            self.mixed, self.conv, self.bias, ints(self.starts), ints(self.contexts),
            ints(self.states), kept, inputs,
        )  # fmt: skip
        return out, inputs


def make(
    lengths: list[int],
    channels: int = 48,
    width: int = 3,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
) -> Case:
    """Sequences that all begin here, of which nothing is kept."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    return Case(
        normal(sum(lengths), 3 * channels).to(dtype),
        normal(width, channels),
        normal(channels) if bias else None,
        normal(SLOTS, width - 1, channels).to(dtype),
        [sum(lengths[:i]) for i in range(len(lengths) + 1)],
        list(lengths),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{}, {"channels": 37}, {"width": 2, "bias": False}, {"width": 16, "channels": 16}]
)
@needs_native
def test_as_the_reference(sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Sequences that begin, go on, or bring nothing; inputs kept on the way and at the end."""
    case = make([5, 1, 0, 70, 33], dtype=dtype, **sizes)  # type: ignore[arg-type]
    case = replace(
        case,
        contexts=[5, 9, 3, 170, 33],
        states=[-1, 2, 0, 3, -1],
        kept=[[1, 6], [4, 1], [5, 5], [40, 7], [75, 4]],
    )
    want, got = case.run("reference"), case.run()
    rounding = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got[0], want[0], rtol=rounding, atol=rounding)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[1][[0, 2, 3]], case.inputs[[0, 2, 3]])


@pytest.mark.parametrize("name", ["reference", "native"])
def test_of_torch(name: str) -> None:
    """A sequence from its beginning is torch's depthwise convolution, cut at its length."""
    if name not in ops.implementations("short_conv"):
        pytest.skip(f"no native kernels: {native.reason}")
    case = make([29], width=4)
    b, c, x = case.mixed.split(48, 1)
    seen = functional.conv1d(
        (b * x).t()[None], case.conv.t()[:, None], case.bias, padding=3, groups=48
    )
    want = c * seen[0, :, :29].t()
    torch.testing.assert_close(case.run(name)[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("cut", [1, 2, 3, 16, 28])
@pytest.mark.usefixtures("restore")
@needs_native
def test_pieces_are_the_whole(cut: int, isa: str) -> None:
    """Two steps give the bits of one, on every instruction set, beside others and alone."""
    native.select_isa(native.available_isas()[0])
    whole = make([29], dtype=torch.bfloat16)
    want, _ = whole.run()
    native.select_isa(isa)
    first = replace(
        whole, mixed=whole.mixed[:cut], starts=[0, cut], contexts=[cut], kept=[[cut - 1, 5]]
    )
    out, inputs = first.run()
    rest = replace(
        whole,
        mixed=torch.cat((whole.mixed[:2], whole.mixed[cut:])),
        inputs=inputs, starts=[0, 2, 31 - cut], contexts=[2, 29], states=[-1, 5],
    )  # fmt: skip
    after, _ = rest.run()
    assert torch.equal(torch.cat((out, after[2:])), want)
    assert torch.equal(after[:2], want[:2])


@needs_native
def test_what_cannot_be() -> None:
    case = make([4])
    for broken, says in (
        (replace(case, contexts=[9]), "no state to go on from"),
        (replace(case, states=[SLOTS]), "state 8 is outside of 8"),
        (replace(case, states=[1], kept=[[3, 1]]), "both read and written"),
        (replace(case, kept=[[4, 1]]), "row 4 of 4"),
        (replace(case, mixed=case.mixed[:, :96]), r"conv must be \[2 to 16, 32\]"),
        (replace(case, mixed=case.mixed[:, :97]), "97 columns, which aren't three times"),
        (replace(case, inputs=case.inputs[:, :1]), "inputs must be"),
        (replace(case, starts=[0, 3]), "must go from 0 to 4"),
    ):
        with pytest.raises((RuntimeError, KernelError), match=says):
            broken.run()
