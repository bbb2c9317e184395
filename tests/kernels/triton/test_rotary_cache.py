from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache.layouts.paged import PagedRows
from penstock.errors import KernelError
from penstock.kernels.triton import launchers
from tests.kernels.triton.conftest import DEVICE

CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PAGE, BLOCKS = 16, 4


@dataclass
class Case:
    """Arguments for both, and what they write to."""

    tokens: int = 3
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    rotary: int = 64
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16
    norm: str = ""
    interleaved: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)
    sink_reach: int = 0
    whole: bool = False  # small integers, whose squares any order of adding sums exactly

    def arguments(self) -> tuple[Any, ...]:
        torch.manual_seed(1)
        width = (self.heads + 2 * self.kv_heads) * self.dim
        x = torch.randn(self.tokens, width + 16) * 3
        x = (x.round() if self.whole else x).to(self.dtype)[:, :width]  # strided rows
        sizes = [0, 0]
        if self.norm:
            counts = (self.heads, self.kv_heads) if self.norm == "full" else (1, 1)
            sizes = [count * self.dim for count in counts]
        norms = [torch.rand(n).to(DEVICE) + 0.5 if n else None for n in sizes]
        if self.norm == "turned":
            norms = [norm if norm is None else norm[None] for norm in norms]
        angles = torch.rand(64, self.rotary // 2) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE) if self.rotary else None
        positions = torch.randint(0, 64, (self.tokens,), dtype=torch.int32, device=DEVICE)
        slots = torch.randperm(PAGE * BLOCKS - 8)[: self.tokens].to(DEVICE, torch.int32)
        if self.tokens > 2:
            slots[1] = -1
        return x.to(DEVICE), self.heads, *norms, 1e-5, cos_sin, self.interleaved, positions, slots

    def run(self, call: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Queries, then the cache, codes as integers and float8 as bytes."""
        device = arguments[0].device
        (kv,) = PagedRows(((self.kv_heads, self.dim),), self.cache, PAGE).allocate(BLOCKS, device)
        pairs = torch.tensor(self.copies, dtype=torch.int32, device=device) if self.copies else None
        y = call(*arguments, *kv, copies=pairs, sink_reach=self.sink_reach)
        kv = tuple(t.view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t for t in kv)
        return tuple(t.cpu() for t in (y, *kv))

    def reference(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The same from the reference, on a CPU: a GPU's division by 127 is no division."""
        held = tuple(a.cpu() if isinstance(a, Tensor) else a for a in arguments)
        return self.run(ops.op("rotary_cache").reference, held)

    def both(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        arguments = self.arguments()
        found = self.run(launchers()["rotary_cache"], arguments)
        return found, self.reference(arguments)

    def same(self) -> None:
        for a, b in zip(*self.both(), strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0)


CACHES = [None, torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved"),
    [(64, 64, False), (64, 64, True), (64, 0, False), (40, 40, True), (48, 24, False)],
)
def test_turned_and_written(
    dim: int, rotary: int, cache: torch.dtype | None, interleaved: bool, dtype: torch.dtype
) -> None:
    """No sum: every bit is the reference's."""
    Case(dim=dim, rotary=rotary, dtype=dtype, cache=cache or dtype, interleaved=interleaved).same()


@pytest.mark.parametrize(("dim", "rotary", "interleaved"), [(64, 64, False), (40, 40, True)])
@pytest.mark.parametrize("heads", [(4, 2), (20, 1)])
def test_queries_turned_twice(
    dim: int, rotary: int, interleaved: bool, heads: tuple[int, int]
) -> None:
    """Once by their positions, which go up to 63, and once by none beyond reach."""
    count, kv_heads = heads
    Case(
        tokens=5, dim=dim, rotary=rotary, interleaved=interleaved, heads=count, kv_heads=kv_heads,
        copies=[(0, 50)], sink_reach=20,
    ).same()  # fmt: skip


@pytest.mark.parametrize("norm", ["head", "full", "turned"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (48, 24)])
def test_norms_whose_sums_are_exact(
    dim: int, rotary: int, cache: torch.dtype | None, norm: str
) -> None:
    held = cache or torch.bfloat16
    Case(dim=dim, rotary=rotary, cache=held, norm=norm, whole=True).same()


@pytest.mark.parametrize("norm", ["head", "full", "turned"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_norms(norm: str, interleaved: bool, dtype: torch.dtype) -> None:
    case = Case(heads=3, kv_heads=1, dtype=dtype, cache=dtype, norm=norm, interleaved=interleaved)
    for a, b in zip(*case.both(), strict=True):
        torch.testing.assert_close(a, b, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("which", [0, 1])
def test_one_norm_alone(which: int) -> None:
    case = Case(norm="head", whole=True, dtype=torch.float32, cache=torch.float32)
    arguments = list(case.arguments())
    arguments[2 + which] = None
    found = case.run(launchers()["rotary_cache"], tuple(arguments))
    expected = case.reference(tuple(arguments))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("cache", [torch.bfloat16, *CACHES[1:]], ids=str)
def test_copies(cache: torch.dtype) -> None:
    """A token goes to several slots, one of them none; so does one without its own."""
    case = Case(cache=cache, norm="head", whole=True, copies=[(0, 60), (1, 61), (0, 62), (2, -1)])
    case.same()


@pytest.mark.parametrize("norm", ["", "head", "full", "turned"])
def test_a_token_alone(norm: str) -> None:
    case = Case(norm=norm, heads=17, dim=128, rotary=128, tokens=4)
    call = launchers()["rotary_cache"]
    x, heads, q_norm, k_norm, eps, cos_sin, turns, positions, slots = case.arguments()
    together = case.run(call, (x, heads, q_norm, k_norm, eps, cos_sin, turns, positions, slots))
    caches = PagedRows(((2, 128),), torch.bfloat16, PAGE).allocate(BLOCKS, torch.device(DEVICE))[0]
    alone = [
        call(x[i], heads, q_norm, k_norm, eps, cos_sin, turns, positions[i], slots[i], *caches)
        for i in (slice(j, j + 1) for j in range(4))
    ]
    assert torch.equal(torch.cat(alone).cpu(), together[0])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(caches, together[1:], strict=True))


def test_what_is_not_finite_stays_where_it_is() -> None:
    case = Case(dtype=torch.float32, cache=torch.float32)
    arguments = case.arguments()
    x = arguments[0]
    x[0, 4 * 64 + 3], x[2, 6 * 64 + 5] = torch.nan, torch.inf  # a key, and a value
    found = case.run(launchers()["rotary_cache"], arguments)
    expected = case.reference(arguments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_nan_makes_its_scale_one() -> None:
    case = Case(cache=torch.int8)
    arguments = case.arguments()
    arguments[0][2, 6 * 64 + 5] = torch.nan
    _, _, _, keys, values = case.run(launchers()["rotary_cache"], arguments)
    block, offset = divmod(int(arguments[-1][2]), PAGE)
    assert values[block, 0, offset].isnan()
    assert values.isnan().sum() == 1
    assert not keys.isnan().any()


def test_no_tokens() -> None:
    case = Case(tokens=0)
    y, keys, values = case.run(launchers()["rotary_cache"], case.arguments())
    assert y.shape == (0, 4, 64) and not keys.any() and not values.any()


def test_what_it_refuses() -> None:
    case = Case()
    arguments = case.arguments()
    call = launchers()["rotary_cache"]
    panels = torch.zeros(4, 2, 16, 64, device=DEVICE).bfloat16()
    with pytest.raises(KernelError, match=r"contiguous; this cache is torch.bfloat16 \[4, 2, 64"):
        call(*arguments, panels.transpose(2, 3), panels)
    norms = [torch.ones(n, device=DEVICE) for n in (256, 64)]
    with pytest.raises(KernelError, match=r"256 and 128; these have \[256, 64\]"):
        call(*arguments[:2], *norms, *arguments[4:], panels, panels)
