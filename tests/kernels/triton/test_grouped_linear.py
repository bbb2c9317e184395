"""Experts' kernels against their references; a row's bits whatever comes along with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from penstock import ops
from penstock.kernels.triton import launchers
from penstock.kernels.triton.grouped_linear import tiles_of
from penstock.ops.rows import pack_bytes
from tests.kernels.triton.conftest import DEVICE

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """As near as values of `dtype` that were summed in another order."""
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def choices(tokens: int, k: int, low: int, high: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (tokens, k), generator=generator, dtype=torch.int32).to(DEVICE)


def experts_of(
    count: int, n: int, k: int, dtype: torch.dtype, stored: str
) -> tuple[Tensor, Tensor | None]:
    """Weights in rows and their scales."""
    weight = randn(count, n, k, seed=3) * k**-0.5
    if stored == "float":
        return weight.to(dtype), None
    top = weight.abs().amax(-1, keepdim=True)
    if stored == "fp8":
        scale = top / 448
        codes = (weight / scale).to(torch.float8_e4m3fn).view(torch.int8)
    else:
        scale = top / 127
        codes = torch.round(weight / scale).to(torch.int8)
    padded = torch.stack([pack_bytes(each, -(-k // 128) * 128) for each in codes])
    return padded.view(torch.float8_e4m3fn) if stored == "fp8" else padded, scale


def both(name: str, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:
    found = launchers()[name](*arguments, **options)
    return found, ops.op(name).reference(*arguments, **options)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top", "count", "n", "k"),
    [(1, 1, 1, 1, 1), (1, 2, 3, 40, 48), (70, 2, 3, 72, 100), (9, 2, 20, 16, 64)],
)
def test_products(
    tokens: int, top: int, count: int, n: int, k: int, gated: bool, dtype: torch.dtype
) -> None:
    x = randn(tokens, k + 8).to(dtype)[:, :k]  # strided rows
    weight, _ = experts_of(count, 2 * n if gated else n, k, dtype, "float")
    rows, starts, _ = ops.sort_tokens(choices(tokens, top, -1, count), count)
    close(*both("grouped_linear", x, weight, None, None, None, rows, starts, n, gated=gated), dtype)


WAYS = [(activation, gated) for gated in (False, True) for activation in (*range(4 + gated), 6)]


@pytest.mark.parametrize(("activation", "gated"), WAYS)
@pytest.mark.parametrize("stored", ["float", "int8", "fp8"])
def test_formats_and_activations(stored: str, activation: int, gated: bool) -> None:
    n, k, count = 24, 72, 3
    x = randn(20, k).bfloat16() * (3 if activation == 4 else 1)  # beyond what it clamps
    weight, scale = experts_of(count, 2 * n, k, torch.bfloat16, stored)
    bias = randn(count, 2 * n, seed=4)
    starts = torch.tensor([0, 7, 7, 19], dtype=torch.int32, device=DEVICE)
    found, expected = both(
        "grouped_linear", x, weight, scale, None, bias, None, starts, n if gated else 2 * n,
        activation=activation, gated=gated, out_dtype=torch.float32,
    )  # fmt: skip
    close(found, expected, torch.bfloat16)
    assert not found[19:].any()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stored", ["float", "int8"])
def test_a_row_s_bits_are_its_own(stored: str, gated: bool) -> None:
    """All rows together, each alone, and with other loads of the experts."""
    n, k, count, tokens = 20, 160, 2, 150
    x = randn(tokens, k).bfloat16()
    weight, scale = experts_of(count, 2 * n, k, torch.bfloat16, stored)
    product, out = launchers()["grouped_linear"], n if gated else 2 * n

    def outputs(x: Tensor, experts: Tensor) -> Tensor:
        """[T, top, out], of tokens in their own order."""
        rows, starts, places = ops.sort_tokens(experts, count)
        y = product(
            x, weight, scale, None, None, rows, starts, out, gated=gated, out_dtype=torch.float32
        )
        return y[places.long()]

    experts = choices(tokens, 1, 0, count)
    assert tiles_of(x, weight, tokens, gated)["ROWS"] == 128
    whole = outputs(x, experts)
    for some in (slice(3, 4), slice(0, 9), slice(40, 90)):
        assert torch.equal(outputs(x[some], experts[some]), whole[some])
    others = torch.where(torch.arange(tokens, device=DEVICE)[:, None] < 30, experts, 1)
    assert torch.equal(outputs(x, others)[:30], whole[:30])
    sums = outputs(x, torch.cat((experts, 1 - experts), 1))  # which are every expert's
    assert torch.equal(sums[:, :1], whole)


def test_weights_of_others_are_refused() -> None:
    x, starts = randn(2, 128).bfloat16(), torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    weight, scale = experts_of(2, 8, 128, torch.bfloat16, "int8")
    product = launchers()["grouped_linear"]
    for given, said in (
        ((weight, None, None, None), "have a scale a row"),
        ((weight, torch.cat((scale, scale), 2), None, None), "have a scale a row"),
        ((weight.bfloat16(), scale, None, None), "have a scale a row"),
        ((weight.float(), None, None, None), "not torch.float32"),
        ((weight, scale, scale, None), "with zero"),
        ((weight[:, :7], scale, None, None), "of 8 rows for K = 128"),
        ((weight[..., :64].bfloat16(), None, None, None), "of 8 rows for K = 128"),
        ((weight[..., :120], scale, None, None), "whose K is a multiple of 128"),
        ((weight.bfloat16(), None, None, randn(2, 8).half()), "float32 bias must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=said):
            product(x, *given, None, starts, 8)
    with pytest.raises(RuntimeError, match="with row_codes"):
        product(x, weight, scale, None, None, None, starts, 8, 1)


def test_nothing_to_multiply(dtype: torch.dtype) -> None:
    x, weight = randn(0, 32).to(dtype), randn(2, 8, 32).to(dtype)
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    product = launchers()["grouped_linear"]
    assert product(x, weight, None, None, None, None, starts, 8).shape == (0, 8)
    nobody = product(randn(3, 32).to(dtype), weight, None, None, None, None, starts, 8)
    assert torch.equal(nobody, torch.zeros_like(nobody))


@pytest.mark.parametrize(("tokens", "top", "features"), [(1, 1, 1), (5, 3, 40), (3, 8, 1100)])
def test_combine(tokens: int, top: int, features: int, dtype: torch.dtype) -> None:
    y = randn(6, features + 3).to(dtype)[:, :features]
    y[5] = torch.nan  # at no place
    places, weights = choices(tokens, top, -1, 5), torch.rand(tokens, top, device=DEVICE)
    found, expected = both("combine", y, places, weights)
    close(found, expected, dtype)
    for t in range(tokens):
        one = slice(t, t + 1)
        assert torch.equal(launchers()["combine"](y, places[one], weights[one]), found[one])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "top", "count"), [(1, 1, 1), (9, 3, 8), (4, 8, 60)])
def test_route(tokens: int, top: int, count: int, normalize: bool, dtype: torch.dtype) -> None:
    logits = randn(tokens, count + 4).to(dtype)[:, 4:]
    (weights, experts), expected = both("route", logits, top, normalize)
    assert torch.equal(experts, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=2e-6, atol=1e-7)
    alone = [launchers()["route"](row, top, normalize) for row in logits.split(1)]
    assert torch.equal(torch.cat([each for each, _ in alone]), weights)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    ("count", "groups", "top_groups", "top"),
    [(12, 1, 1, 4), (12, 4, 2, 5), (9, 3, 1, 3), (8, 8, 3, 2), (160, 8, 3, 6), (5, 5, 5, 5)],
)
def test_routers(
    count: int, groups: int, top_groups: int, top: int, corrected: bool, sigmoid: bool,
    normalize: bool,
) -> None:  # fmt: skip
    logits = randn(17, count)
    correction = randn(count, seed=3) / 2 if corrected else None
    given = top, normalize, correction, sigmoid, groups, top_groups, 1.5
    (weights, experts), expected = both("route", logits, *given)
    assert torch.equal(experts, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=2e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="can't be chosen from"):
        launchers()["route"](logits, top, normalize, correction, sigmoid, groups + count, 1)


def test_small_sums_of_sigmoids_are_raised() -> None:
    """LFM2 adds 1e-6 to what weights are divided by."""
    logits = randn(9, 8) - 6.0
    (weights, _), expected = both("route", logits, 3, True, None, True, 1, 1, 1.0, 1e-2)
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-6)
    assert (weights.sum(1) < 0.9).all()


def test_route_has_one_order() -> None:
    inf = torch.inf
    logits = torch.tensor([[1.0, 3, 3, 2], [0, -0.0, 0, -1], [-1, -inf, -9, -inf]], device=DEVICE)
    (weights, experts), expected = both("route", logits, 4, False)
    assert torch.equal(experts, expected[1])
    torch.testing.assert_close(weights, expected[0])
    logits[:, 2] = torch.nan
    (weights, experts), expected = both("route", logits, 2, True)
    assert torch.equal(experts, expected[1])
    assert weights.isnan().all()


@pytest.mark.parametrize(("tokens", "top", "count"), [(1, 1, 1), (7, 3, 4), (900, 2, 5), (0, 2, 3)])
def test_sorting(tokens: int, top: int, count: int) -> None:
    found, expected = both("sort_tokens", choices(tokens, top, -1, count + 1), count)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype is want.dtype
        assert torch.equal(got, want)


def layer(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Two experts a token, from the logits to the sum, without a reference in between."""
    run, count, inner = launchers(), gate_up.shape[0], down.shape[2]
    weights, experts = run["route"](logits, 2, True)
    rows, starts, places = run["sort_tokens"](experts, count)
    hidden = run["grouped_linear"](
        x, gate_up, None, None, None, rows, starts, inner, activation=1, gated=True
    )
    y = run["grouped_linear"](hidden, down, None, None, None, None, starts, x.shape[1])
    return run["combine"](y, places, weights)


def test_a_layer() -> None:
    config = MixtralConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=6, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config).to(DEVICE).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, experts = randn(20, 48), block.experts
    with torch.no_grad():
        want = block(x[None])[0]
        logits = x @ block.gate.weight.t()
        found = layer(x, logits, experts.gate_up_proj, experts.down_proj)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        alone = layer(x[5:6], logits[5:6], experts.gate_up_proj, experts.down_proj)
    assert torch.equal(alone, found[5:6])


class Calls(TorchDispatchMode):
    """The names of torch's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.add(str(func))
        return func(*args, **kwargs or {})


def test_nothing_reads_what_a_gpu_computes() -> None:
    """A value that Python asks for, or a result as long as values say, would wait for the GPU."""
    x, weight = randn(6, 16), randn(3, 16, 16)
    adapters, scaling = choices(6, 3, -1, 3)[:, 0].contiguous(), torch.rand(3, device=DEVICE)
    waiting = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten._unique2.default"}
    with Calls() as reference:
        ops.op("lora_add_").reference(x.clone(), x, weight, weight, adapters, scaling)
    assert reference.names & waiting
    with Calls() as launched:
        layer(x, randn(6, 3), torch.cat((weight, weight), 1), weight)
        launchers()["lora_add_"](x.clone(), x, weight, weight, adapters, scaling)
    assert launched.names
    assert not launched.names & waiting
