"""The gated delta rule: against its reference, closed forms, and itself in pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels import native

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")

SLOTS = 12


@dataclass
class Case:
    mixed: Tensor
    gates: Tensor
    conv: Tensor
    rates: Tensor
    shift: Tensor
    norm: Tensor
    state: Tensor
    inputs: Tensor
    starts: list[int]
    contexts: list[int]
    states: list[int] | None = None
    kept: list[list[int]] | None = None
    strength: float = 1.0

    def run(self, name: str = "native") -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, and what lies in the slots then."""
        state, inputs = self.state.clone(), self.inputs.clone()

        def ints(values: list[int] | list[list[int]] | None) -> Tensor | None:
            return None if values is None else torch.tensor(values, dtype=torch.int32)

        kept = None if self.kept is None else ints(self.kept)
        out = ops.implementations("delta_rule")[name](
            self.mixed, self.gates, self.conv, self.rates, self.shift, self.norm, 1e-6,
            ints(self.starts), ints(self.contexts), ints(self.states),
            kept if kept is None else kept.view(-1, 2), state, inputs, self.strength,
        )  # fmt: skip
        return out, state, inputs


def make(
    lengths: list[int],
    keys: int = 2,
    heads: int = 4,
    key_dim: int = 32,
    value_dim: int = 48,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Sequences that all begin here, of which nothing is kept."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    total, turned = sum(lengths), 2 * keys * key_dim + heads * value_dim
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Case(
        normal(total, turned + heads * value_dim).to(dtype),
        normal(total, 2 * heads),
        normal(width, turned),
        normal(heads).exp(),
        normal(heads),
        normal(value_dim),
        normal(SLOTS, heads, value_dim // 16, key_dim, 16),
        normal(SLOTS, width - 1, turned).to(dtype),
        starts,
        list(lengths),
    )


SIZES = {
    "shared keys": {},
    "one head": {"keys": 1, "heads": 1, "key_dim": 16, "value_dim": 16},
    "large": {"keys": 2, "heads": 2, "key_dim": 128, "value_dim": 128},
    "wide convolution": {"keys": 1, "heads": 3, "width": 9},
    "narrow convolution": {"keys": 2, "heads": 2, "width": 2},
}


@pytest.mark.parametrize("strength", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@needs_native
def test_as_the_reference(sizes: str, dtype: torch.dtype, strength: float) -> None:
    """Sequences that begin, go on, or bring nothing; states kept on the way and at the end."""
    case = make([5, 1, 0, 70, 33], dtype=dtype, **SIZES[sizes])  # type: ignore[arg-type]
    case = replace(
        case,
        contexts=[5, 9, 3, 170, 33],
        states=[-1, 2, 0, 3, -1],
        kept=[[1, 6], [4, 1], [5, 5], [40, 7], [75, 4], [75, 9], [108, 8]],
    )
    case.strength = strength
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
    """With an input of one, a head's state is k ⊗ βv, and what it gives βv · (k·q)."""
    if name not in ops.implementations("delta_rule"):
        pytest.skip(f"no native kernels: {native.reason}")
    case = make([1], keys=1, heads=1, key_dim=16, value_dim=16, width=2)
    case.kept = [[0, 1]]
    out, state, inputs = case.run(name)
    x = torch.nn.functional.silu(case.mixed[0, :48] * case.conv[1])
    q, k, v = x.split(16)
    q, k = q / (q.square().sum() + 1e-6).sqrt() / 4, k / (k.square().sum() + 1e-6).sqrt()
    kept = k[:, None] * (case.gates[0, 1].sigmoid() * v)
    torch.testing.assert_close(state[1, 0, 0], kept, rtol=1e-5, atol=1e-6)
    o = q @ kept
    o = o / (o.square().mean() + 1e-6).sqrt() * case.norm
    z = case.mixed[0, 48:]
    torch.testing.assert_close(out[0], o * z * z.sigmoid(), rtol=1e-5, atol=1e-6)
    assert torch.equal(inputs[1, 0], case.mixed[0, :48])


@pytest.mark.parametrize("name", ["reference", "native"])
def test_what_a_key_stood_for_is_turned_around(name: str) -> None:
    """With a strength of 2 and all of it, a second value of none leaves minus the first."""
    if name not in ops.implementations("delta_rule"):
        pytest.skip(f"no native kernels: {native.reason}")
    case = make([2], keys=1, heads=1, key_dim=16, value_dim=16, width=2)
    case.kept = [[0, 1], [1, 2]]
    case.gates[:, 0], case.gates[:, 1] = -200.0, 100.0  # nothing fades, all is added
    case.conv[0], case.mixed[1, :32] = 0.0, case.mixed[0, :32]
    case.mixed[1, 32:48] = 0.0
    case.strength = 2.0
    _, state, _ = case.run(name)
    torch.testing.assert_close(state[2, 0, 0], -state[1, 0, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "native"])
def test_what_fades_is_forgotten(name: str) -> None:
    """α from 1, as large negative a leave it, to 0, where only the last token counts."""
    if name not in ops.implementations("delta_rule"):
        pytest.skip(f"no native kernels: {native.reason}")
    case = make([6], keys=1, heads=1, key_dim=16, value_dim=16, width=2)
    case.rates = torch.tensor([1000.0])
    case.gates[:, 0] = 5.0
    last, _, _ = case.run(name)
    alone = replace(
        case,
        mixed=case.mixed[4:], gates=case.gates[4:], starts=[0, 2], contexts=[2],
    )  # fmt: skip
    torch.testing.assert_close(last[5], alone.run(name)[0][1], rtol=1e-5, atol=1e-6)
    case.gates[:, 0] = -200.0  # softplus is 0 there, and nothing fades
    assert case.run(name)[0].isfinite().all()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_pieces_the_same_bits(dtype: torch.dtype) -> None:
    case = make([100], dtype=dtype)
    case.kept = [[36, 3], [99, 0]]
    whole, state, inputs = case.run()
    at, slot, parts = 0, -1, []
    for turn, count in enumerate([1, 1, 35, 1, 33, 29]):
        piece = replace(
            case,
            mixed=case.mixed[at : at + count], gates=case.gates[at : at + count],
            starts=[0, count], contexts=[at + count], states=[slot],
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
def test_in_a_batch_and_on_any_threads_the_same_bits() -> None:
    lengths = [40, 1, 17, 64]
    batch = make(lengths, dtype=torch.bfloat16)
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
        alone = replace(
            batch,
            mixed=batch.mixed[start : start + length], gates=batch.gates[start : start + length],
            starts=[0, length], contexts=[length],
        )  # fmt: skip
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
        ({"states": [-1], "kept": [[20, 0]]}, "row 20 of 20"),
        ({"states": [-1], "kept": [[3, SLOTS]]}, f"kept in state {SLOTS} of {SLOTS}"),
        ({"states": [-1], "kept": [[3, 1], [2, 2]]}, "kept rows must rise"),
        ({"states": [4], "kept": [[3, 4]]}, "state 4 is both read and written"),
        ({"starts": [0, 19]}, "query_start must go from 0 to 20"),
        ({"gates": torch.zeros(19, 8)}, "gates has 19 rows, mixed 20"),
        ({"gates": torch.zeros(20, 6)}, "gates must be float32 of 8 columns"),
        ({"norm": torch.zeros(3)}, "norm must be 48 contiguous float32"),
        ({"inputs": torch.zeros(SLOTS, 2, 320)}, "inputs must be"),
        ({"conv": torch.zeros(1, 320)}, "conv must be"),
        ({"mixed": torch.zeros(20, 500)}, "500 columns aren't"),
    ],
)
def test_what_doesnt_fit_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        replace(make([20]), **changes).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_native
def test_gates_of_values(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    x = (4 * torch.randn(9, 70, generator=random)).to(dtype)
    y = torch.randn(9, 140, generator=random).to(dtype)
    both = []
    for implementation in ops.implementations("gate_by_").values():
        wide = y.clone()
        implementation(wide[:, :70], x)
        assert torch.equal(wide[:, 70:], y[:, 70:])
        both.append(wide)
    assert len(both) == 2
    torch.testing.assert_close(both[0], both[1])
    with pytest.raises(RuntimeError, match="as many of one dtype"):
        ops.gate_by_(y, x)
