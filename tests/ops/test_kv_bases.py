"""Keys and values in fewer dimensions than their heads, as an operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.ops.attention import gather_keys, gather_values

from .test_sink_tokens import STORED, needs_native, randn

SIZE, TOKENS = 32, 41
CASES = [
    (64, 48, 6, 2, 64, False),
    (64, 64, 4, 4, 32, True),
    (128, 96, 5, 1, 128, False),
    (80, 16, 8, 4, 0, False),
]
"""dim, kept, heads, kv_heads, dimensions that turn, in neighbouring pairs."""


def inputs(case: tuple[int, int, int, int, int, bool], dtype: torch.dtype) -> dict[str, Tensor]:
    dim, kept, heads, kv_heads, turning, _ = case
    return {
        "qkv": randn(TOKENS, (heads + kv_heads) * dim + kv_heads * kept, dtype=dtype),
        "bases": randn(2, kv_heads, dim, kept, seed=1) / dim**0.5,
        "q_norm": randn(dim, seed=2),
        "k_norm": randn(dim, seed=3),
        "table": randn(2 * TOKENS, turning, seed=4),
        "positions": torch.arange(5, 5 + TOKENS).int(),
        "slots": torch.arange(TOKENS).flip(0).int(),
    }


def run(
    op: object, case: tuple[int, int, int, int, int, bool], kept: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Queries, twice each, and what the cache then has of keys and values."""
    _, rank, heads, kv_heads, turning, interleaved = case
    given = inputs(case, dtype)
    (cache,) = PagedLayout(((kv_heads, rank),), kept, SIZE).allocate(3)
    copies = torch.tensor([[3, 90], [0, 64]], dtype=torch.int32)
    table = given["table"] if turning else None
    q = op(  # type: ignore[operator]
        given["qkv"], heads, given["q_norm"], given["k_norm"], 1e-6, table, interleaved,
        given["positions"], given["slots"], *cache, copies=copies, sink_reach=20,
        bases=given["bases"],
    )  # fmt: skip
    key, value, *scales = cache
    blocks, both = torch.arange(3), scales or [None, None]
    kept_of = (
        gather(held, blocks, 96, rank, scale)
        for gather, held, scale in zip(
            (gather_keys, gather_values), (key, value), both, strict=True
        )
    )
    return q, *kept_of


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["call", "reference"])
@pytest.mark.usefixtures("isa")
def test_closed_form(case: tuple[int, int, int, int, int, bool], how: str) -> None:
    """Normalised and rotated as without bases, then multiplied by them; values are as they come."""
    dim, kept, heads, kv_heads, turning, interleaved = case
    given = inputs(case, torch.float32)
    q, keys, values = run(getattr(ops.op("rotary_cache"), how), case, torch.float32, torch.float32)
    plain = torch.zeros(TOKENS, (heads + 2 * kv_heads) * dim)
    plain[:, : (heads + kv_heads) * dim] = given["qkv"][:, : (heads + kv_heads) * dim]
    (cache,) = PagedLayout(((kv_heads, dim),), torch.float32, SIZE).allocate(2)
    whole = ops.rotary_cache(
        plain, heads, given["q_norm"], given["k_norm"], 1e-6, given["table"] if turning else None,
        interleaved, given["positions"], given["slots"], *cache, sink_reach=20,
    )  # fmt: skip
    for_queries, for_keys = given["bases"].double()
    per_head = for_queries.repeat_interleave(heads // kv_heads, 0).repeat(2, 1, 1)
    want = torch.einsum("thd,hdr->thr", whole.double(), per_head).float()
    torch.testing.assert_close(q, want, rtol=2e-5, atol=2e-5)
    turned = gather_keys(cache[0], torch.arange(2), 64, dim)[given["slots"].long()]
    want = torch.einsum("tgd,gdr->tgr", turned.double(), for_keys).float()
    at = given["slots"].long()
    torch.testing.assert_close(keys[at], want, rtol=2e-5, atol=2e-5)
    came = given["qkv"][:, (heads + kv_heads) * dim :].unflatten(1, (kv_heads, kept))
    assert torch.equal(values[at], came)
    for token, slot in ((3, 90), (0, 64)):
        assert torch.equal(keys[slot], keys[at[token]])
        assert torch.equal(values[slot], came[token])


@needs_native
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("isa")
def test_parity(stored: str, case: tuple[int, int, int, int, int, bool]) -> None:
    dtype, kept = STORED[stored]
    op = ops.op("rotary_cache")
    got, want = (run(call, case, kept, dtype) for call in (op.call, op.reference))
    step = {"float32": 2e-5, "bfloat16": 1.6e-2, "int8": 0.05, "fp8": 0.3, "int4": 0.5}[stored]
    torch.testing.assert_close(got[0], want[0], rtol=1.6e-2, atol=min(step, 1.6e-2))
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=step, atol=step)
        near = (ours - theirs).abs().mean()  # a code apart now and then, not everywhere
        assert near < step / 20


@needs_native
def test_refusals() -> None:
    case = CASES[0]
    _, kept, heads, kv_heads, _, _ = case
    given = inputs(case, torch.float32)
    (cache,) = PagedLayout(((kv_heads, kept),), torch.float32, SIZE).allocate(2)

    def ask(bases: Tensor, qkv: Tensor = given["qkv"]) -> None:
        ops.rotary_cache(
            qkv, heads, None, None, 1e-6, given["table"], False, given["positions"],
            given["slots"], *cache, bases=bases,
        )  # fmt: skip

    ask(given["bases"])
    with pytest.raises(RuntimeError, match=r"bases must be \[2, 2, dim, kept\]"):
        ask(given["bases"][:1])
    with pytest.raises(RuntimeError, match="40 dimensions that are kept of 64 aren't a multiple"):
        ask(given["bases"][..., :40].contiguous())
    with pytest.raises(RuntimeError, match="columns aren't the 576 of 6 and 2 heads of 64"):
        ask(given["bases"][..., :32].contiguous())
    with pytest.raises(RuntimeError, match="bases"):
        ask(given["bases"].bfloat16())
