"""Mamba 2: against its reference, transformers' scan, closed forms, and itself in pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock import ops
from penstock.kernels import native

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")

SLOTS = 12


@dataclass
class Case:
    mixed: Tensor
    steps: Tensor
    conv: Tensor
    bias: Tensor | None
    rates: Tensor
    shift: Tensor
    skip: Tensor
    norm: Tensor
    state: Tensor
    inputs: Tensor
    starts: list[int]
    contexts: list[int]
    states: list[int] | None = None
    kept: list[list[int]] | None = None

    def run(self, name: str = "native") -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, and what lies in the slots then."""
        state, inputs = self.state.clone(), self.inputs.clone()

        def ints(values: list[int] | list[list[int]] | None) -> Tensor | None:
            return None if values is None else torch.tensor(values, dtype=torch.int32)

        kept = None if self.kept is None else torch.tensor(self.kept, dtype=torch.int32).view(-1, 2)
        out = ops.implementations("mamba2")[name](
            self.mixed, self.steps, self.conv, self.bias, self.rates, self.shift, self.skip,
            self.norm, 1e-5, ints(self.starts), ints(self.contexts), ints(self.states), kept, state,
            inputs,
        )  # fmt: skip
        return out, state, inputs

    def rows(self, first: int, count: int) -> Case:
        """Of one sequence's rows, as if they were a step."""
        rows = slice(first, first + count)
        return replace(
            self, mixed=self.mixed[rows], steps=self.steps[rows], starts=[0, count],
            contexts=[count],
        )  # fmt: skip


def make(
    lengths: list[int],
    groups: int = 1,
    heads: int = 6,
    key_dim: int = 32,
    value_dim: int = 48,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
) -> Case:
    """Sequences that all begin here, of which nothing is kept."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    total, inner = sum(lengths), heads * value_dim
    turned = inner + 2 * groups * key_dim
    return Case(
        normal(total, inner + turned).to(dtype),
        normal(total, heads),
        normal(width, turned) / 2,
        normal(turned) if bias else None,
        normal(heads).exp(),
        normal(heads),
        normal(heads),
        normal(inner),
        normal(SLOTS, heads, value_dim // 16, key_dim, 16),
        normal(SLOTS, width - 1, turned).to(dtype),
        [sum(lengths[:i]) for i in range(len(lengths) + 1)],
        list(lengths),
    )


SIZES = {
    "one group": {},
    "groups": {"groups": 3, "bias": False},
    "one head": {"heads": 1, "key_dim": 16, "value_dim": 16},
    "published": {"heads": 12, "key_dim": 128, "value_dim": 64},
    "many heads": {"heads": 34, "groups": 2, "key_dim": 16, "value_dim": 80, "width": 2},
    "wide convolution": {"width": 16},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@needs_native
def test_as_the_reference(sizes: str, dtype: torch.dtype) -> None:
    """Sequences that begin, go on, or bring nothing; states kept on the way and at the end."""
    case = make([5, 1, 0, 70, 33], dtype=dtype, **SIZES[sizes])  # type: ignore[arg-type]
    case = replace(
        case,
        contexts=[5, 9, 3, 170, 33],
        states=[-1, 2, 0, 3, -1],
        kept=[[1, 6], [4, 1], [5, 5], [40, 7], [75, 4], [75, 9], [108, 8]],
    )
    want, got = case.run("reference"), case.run()
    rounding = 2e-2 if dtype is torch.bfloat16 else 1e-4
    scale = want[0].float().abs().max().item()
    torch.testing.assert_close(got[0], want[0], rtol=rounding, atol=rounding * scale / 10)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
    assert torch.equal(got[2], want[2])
    untouched = [0, 2, 3, 10, 11]
    assert torch.equal(got[1][untouched], case.state[untouched])
    assert torch.equal(got[1][4], got[1][9])


@pytest.mark.parametrize("name", ["reference", "native"])
def test_one_token_by_the_formula(name: str) -> None:
    """With an input of one, a head's state is B ⊗ δx, and what it gives δx · (B·C) + D·x."""
    if name not in ops.implementations("mamba2"):
        pytest.skip(f"no native kernels: {native.reason}")
    case = make([1], heads=1, key_dim=16, value_dim=16, width=2, bias=False)
    case.kept = [[0, 1]]
    out, state, inputs = case.run(name)
    x, b, c = functional.silu(case.mixed[0, 16:] * case.conv[1]).split(16)
    step = (case.steps[0, 0] + case.shift[0]).exp().log1p()
    torch.testing.assert_close(state[1, 0, 0], b[:, None] * step * x, rtol=1e-5, atol=1e-6)
    z = case.mixed[0, :16]
    y = (step * x * (b @ c) + case.skip[0] * x) * z * z.sigmoid()
    y = y / (y.square().mean() + 1e-5).sqrt() * case.norm
    torch.testing.assert_close(out[0], y, rtol=1e-5, atol=1e-6)
    assert torch.equal(inputs[1, 0], case.mixed[0, 16:])


@pytest.mark.parametrize("name", ["reference", "native"])
def test_as_a_sum_over_what_came(name: str) -> None:
    """Without a recurrence: y_t = Σ_s (C_t·B_s) · exp(−A Σ_{s<r≤t} δ_r) · δ_s x_s + D x_t."""
    if name not in ops.implementations("mamba2"):
        pytest.skip(f"no native kernels: {native.reason}")
    case = make([40], groups=2, heads=4)
    inner, dim = 4 * 48, 2 * 32
    padded = functional.pad(case.mixed[:, inner:], (0, 0, 3, 0)).t()[None]
    turned = functional.conv1d(padded, case.conv.t()[:, None], case.bias, groups=inner + 2 * dim)
    x, b, c = functional.silu(turned[0].t()).double().split((inner, dim, dim), 1)
    x = x.view(40, 4, 48)
    b, c = (part.view(40, 2, 32).repeat_interleave(2, 1) for part in (b, c))
    step = functional.softplus(case.steps + case.shift).double()
    since = step.cumsum(0)
    fade = (-case.rates * (since[:, None] - since[None])).exp()  # [t, s, heads]
    fade = fade * torch.ones(40, 40).tril()[:, :, None]
    weights = torch.einsum("thn,shn->tsh", c, b) * fade * step[None]
    y = torch.einsum("tsh,shp->thp", weights, x) + case.skip[:, None] * x
    z = case.mixed[:, :inner].double()
    y = (y.flatten(1) * functional.silu(z)).view(40, 2, -1)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * case.norm
    torch.testing.assert_close(case.run(name)[0], y.float(), rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_pieces_the_same_bits(dtype: torch.dtype, isa: str) -> None:
    native.select_isa(native.available_isas()[0])
    case = make([100], heads=12, dtype=dtype)
    case.kept = [[36, 3], [99, 0]]
    whole, state, inputs = case.run()
    native.select_isa(isa)
    at, slot, parts = 0, -1, []
    for turn, count in enumerate([1, 1, 35, 1, 33, 29]):
        piece = replace(
            case.rows(at, count), contexts=[at + count], states=[slot],
            kept=[[count - 1, 1 + turn % 2]],
        )  # fmt: skip
        out, case.state, case.inputs = piece.run()
        at, slot = at + count, 1 + turn % 2
        parts.append(out)
        if at == 37:
            assert torch.equal(case.state[slot], state[3])
            assert torch.equal(case.inputs[slot], inputs[3])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(case.state[slot], state[0]) and torch.equal(case.inputs[slot], inputs[0])


@needs_native
@pytest.mark.usefixtures("restore")
def test_in_a_batch_and_on_any_threads_the_same_bits() -> None:
    lengths = [40, 1, 17, 64]
    batch = make(lengths, heads=20, groups=2, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(batch.run()[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    for start, length in zip(batch.starts, lengths, strict=False):
        alone = batch.rows(start, length)
        assert torch.equal(alone.run()[0], found[0][start : start + length])


@needs_native
def test_rows_may_be_strided() -> None:
    case = make([20])
    wide = torch.cat((case.mixed, case.mixed), dim=1)
    assert torch.equal(replace(case, mixed=wide[:, : case.mixed.shape[1]]).run()[0], case.run()[0])


@needs_native
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"contexts": [21]}, "has 21 tokens, 20 of them in this step, and no state"),
        ({"states": [SLOTS]}, f"state {SLOTS} is outside of {SLOTS}"),
        ({"states": [4], "kept": [[3, 4]]}, "state 4 is both read and written"),
        ({"starts": [0, 19]}, "query_start must go from 0 to 20"),
        ({"steps": torch.zeros(19, 6)}, "steps has 19 rows, mixed 20"),
        ({"steps": torch.zeros(20, 5)}, "steps must be float32 of 6 columns"),
        ({"norm": torch.zeros(3)}, "norm must be 288 contiguous float32"),
        ({"skip": torch.zeros(3)}, "skip must be 6 contiguous float32"),
        ({"bias": torch.zeros(3)}, "bias must be 352 contiguous float32"),
        ({"inputs": torch.zeros(SLOTS, 2, 352)}, "inputs must be"),
        ({"conv": torch.zeros(1, 352)}, "conv must be"),
        ({"mixed": torch.zeros(20, 600)}, "600 columns aren't twice 288"),
    ],
)
def test_what_doesnt_fit_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        replace(make([20]), **changes).run()
