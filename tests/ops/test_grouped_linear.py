"""Mixtures of experts: against plain loops, against `linear`, and against transformers' blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import MixtralConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from penstock import ops
from penstock.kernels import native
from penstock.quant import Dense, WeightFormat, format_of, parse_scheme

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")
SILU = ops.ACTIVATIONS.index("silu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chosen(tokens: int, k: int, num_experts: int) -> Tensor:
    """k different experts for each token; the last is nobody's."""
    return ops.route(randn(tokens, num_experts - 1, seed=1), k, True)[1]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_products_are_each_row_s_own(tokens: int, gated: bool) -> None:
    n, k, count = 12, 24, 7
    x, weight = randn(tokens, k + 5)[:, 5:], randn(count, 2 * n, k, seed=2)
    bias, experts = randn(count, 2 * n, seed=3), chosen(tokens, 2, count)
    rows, starts, places = ops.sort_tokens(experts, count)
    out = n if gated else 2 * n
    y = ops.grouped_linear(
        x, weight, None, None, bias, rows, starts, out, activation=SILU, gated=gated
    )
    for t in range(tokens):
        for j, e in enumerate(experts[t].tolist()):
            want = weight[e].double() @ x[t].double() + bias[e].double()
            gate, up = want.chunk(2) if gated else (want, torch.ones(()))
            want = gate * torch.sigmoid(gate) * up
            torch.testing.assert_close(y[places[t, j]].double(), want, rtol=2e-5, atol=2e-5)


FORMATS: dict[str, WeightFormat] = {
    "float32": Dense(torch.float32),
    "bfloat16": Dense(torch.bfloat16),
    **{name: format_of(parse_scheme(name)) for name in ("w8a16", "w4a8-g32-asym", "mxfp4")},
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@needs_native
def test_panels_of_every_format(name: str, gated: bool) -> None:
    """Natively, and so the same bits as each expert's `linear`, whatever rows come together."""
    n, k, count, tokens = 36, 64, 5, 20
    x = randn(tokens, k).to(torch.float32 if name == "float32" else torch.bfloat16)
    packed = [FORMATS[name].pack(randn(2 * n, k, seed=e), gated) for e in range(count)]
    code = getattr(FORMATS[name], "row_codes", 0)
    levels = getattr(FORMATS[name], "levels", 0)
    stacked = {key: torch.stack([each[key] for each in packed]) for key in packed[0]}
    experts = chosen(tokens, 2, count)
    rows, starts, places = ops.sort_tokens(experts, count)
    out = n if gated else 2 * n
    given = (stacked["weight"], stacked.get("scale"), stacked.get("zero"), None)
    how = (code, SILU, gated, torch.float32, levels)
    y = ops.grouped_linear(x, *given, rows, starts, out, *how)
    for t in range(tokens):
        for j, e in enumerate(experts[t].tolist()):
            alone = ops.linear(
                x[t : t + 1], *(None if part is None else part[e] for part in given), out, code,
                None, 0.0, *how[1:],
            )  # fmt: skip
            assert torch.equal(y[places[t, j]], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_belong_to_nobody(dtype: torch.dtype) -> None:
    """Experts of another machine: no product, zeros, and nothing added."""
    x, weight = randn(6, 16).to(dtype), randn(2, 8, 16, seed=1).to(dtype)
    experts = torch.tensor([[0, 5], [1, 0], [3, -1], [7, 1], [0, 1], [9, 9]], dtype=torch.int32)
    rows, starts, places = ops.sort_tokens(experts, 2)
    assert starts.tolist() == [0, 3, 6]
    y = ops.grouped_linear(x, weight, None, None, None, rows, starts, 8)
    assert not y[6:].any()
    y[6:] = torch.nan  # isn't read
    whole = ops.combine(y, places, torch.ones(experts.shape))
    assert not whole[[2, 5]].any()
    want = ops.grouped_linear(
        x[3:4], weight[1:], None, None, None, None, torch.tensor([0, 1], dtype=torch.int32), 8
    )
    torch.testing.assert_close(whole[3], want[0])


def test_mixtral_s_block() -> None:
    config = MixtralConfig(
        hidden_size=48, intermediate_size=72, num_local_experts=6, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = randn(1, 33, 48)
    with torch.no_grad():
        want = block(x)[0]
        logits = functional.linear(x[0], block.gate.weight)
        weights, experts = ops.route(logits, 2, True)
        rows, starts, places = ops.sort_tokens(experts, 6)
        hidden = ops.grouped_linear(
            x[0], block.experts.gate_up_proj, None, None, None, rows, starts, 72,
            activation=SILU, gated=True,
        )  # fmt: skip
        y = ops.grouped_linear(hidden, block.experts.down_proj, None, None, None, None, starts, 48)
        found = ops.combine(y, places, weights)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_qwen_s_router(normalize: bool) -> None:
    config = Qwen2MoeConfig(
        hidden_size=32, num_experts=9, num_experts_per_tok=4, norm_topk_prob=normalize
    )
    router = Qwen2MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    x = randn(20, 32)
    with torch.no_grad():
        _, want, numbers = router(x)
        weights, experts = ops.route(functional.linear(x, router.weight), 4, normalize)
    assert torch.equal(experts.long(), numbers)
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-7)


def test_route_has_one_order() -> None:
    nan = torch.nan
    logits = torch.tensor([[1.0, 3, 3, 2], [0, -0.0, 0, -1], [nan, 1, 9, 2], [-9, -9, -9, -9]])
    weights, experts = ops.route(logits, 3, False)
    assert experts.tolist() == [[1, 2, 3], [0, 1, 2], [0, 2, 3], [0, 1, 2]]
    assert weights[2].isnan().all()
    assert torch.equal(weights[3], torch.full((3,), 0.25))
    half = ops.route(logits.bfloat16(), 3, True)
    assert torch.equal(half[1], experts)
    torch.testing.assert_close(half[0][0], torch.tensor([3.0, 3, 2]).softmax(0))
    with pytest.raises(RuntimeError, match="5 experts a token can't be chosen of 4"):
        ops.route(logits, 5, True)


@pytest.mark.parametrize(("tokens", "k", "count"), [(1, 1, 1), (7, 3, 4), (300, 2, 64), (0, 2, 3)])
def test_sorting(tokens: int, k: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.randint(-1, count + 1, (tokens, k), generator=generator, dtype=torch.int32)
    rows, starts, places = ops.sort_tokens(experts, count)
    flat = [e if 0 <= e < count else count for e in experts.flatten().tolist()]
    order = sorted(range(len(flat)), key=lambda i: (flat[i], i))
    assert rows.tolist() == [i // k for i in order]
    assert starts.tolist() == [sum(e < n for e in flat) for n in range(count + 1)]
    where = {i: r if flat[i] < count else -1 for r, i in enumerate(order)}
    assert places.flatten().tolist() == [where[i] for i in range(len(flat))]
    assert all(each.dtype is torch.int32 for each in (rows, starts, places))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combining_adds_in_order(dtype: torch.dtype) -> None:
    y = torch.tensor([[2.0**40], [1.0], [-(2.0**40)], [torch.nan]], dtype=dtype)
    places = torch.tensor([[0, 1, 2], [0, 2, 1], [-1, 1, -1], [-1, -1, -1]], dtype=torch.int32)
    weights = torch.tensor([1.0, 1.0, 1.0, 0.5]).view(4, 1).expand(4, 3)
    weights = weights * torch.tensor([[1.0], [1.0], [0.5], [1.0]])
    found = ops.combine(y, places, weights)
    assert torch.equal(found, torch.tensor([[0.0], [1.0], [0.5], [0.0]], dtype=dtype))
    assert ops.combine(y[:0], places[3:], weights[3:]).tolist() == [[0.0]]


def test_schemas() -> None:
    """What exports see: shapes and dtypes of results, and that no argument is written."""
    x, weight = randn(5, 8), randn(3, 4, 8)
    experts = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]], dtype=torch.int32)
    rows, starts, places = ops.sort_tokens(experts, 3)
    y = ops.grouped_linear(x, weight, None, None, None, rows, starts, 4, out_dtype=torch.bfloat16)
    for call, arguments in (
        (ops.route, (randn(5, 3), 2, False)),
        (ops.sort_tokens, (experts, 3)),
        (ops.grouped_linear, (x, weight, None, None, None, rows, starts, 4)),
        (ops.combine, (y, places, torch.rand(5, 2))),
    ):
        torch.library.opcheck(call, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_does_not_fit() -> None:
    x, weight = randn(4, 8), randn(2, 6, 8)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)

    def product(x: Tensor = x, rows: Tensor | None = None, starts: Tensor = starts) -> Tensor:
        return ops.grouped_linear(x, weight, None, None, None, rows, starts, 6)

    for given, said in (
        ({"starts": starts[:2]}, r"starts must be int32 \[3\], one more than"),
        ({"starts": starts.long()}, "not torch.int64"),
        ({"starts": starts + 1}, r"at most 4 products, not \[1, 3, 5\]"),
        ({"starts": starts.flip(0)}, "must go from 0"),
        ({"rows": starts.long()}, r"rows must be int32 \[R\]"),
        ({"x": randn(8, 4).t()}, "x must be .* with whole rows"),
    ):
        with pytest.raises(RuntimeError, match=said):
            product(**given)
    with pytest.raises(RuntimeError, match="places must be int32 and weights float32"):
        ops.combine(x, torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(RuntimeError, match="don't fit"):
        ops.combine(x, torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="experts must be int32"):
        ops.sort_tokens(torch.zeros(4, 2), 2)
