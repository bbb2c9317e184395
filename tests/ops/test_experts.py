"""`experts` in one native call, against the operators that it is made of."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from penstock import ops
from penstock.kernels import native
from penstock.quant import Dense, WeightFormat, format_of, parse_scheme

D, WIDE, E = 64, 36, 11
SILU, OAI, RELU2 = (ops.ACTIVATIONS.index(name) for name in ("silu", "swiglu_oai", "relu2"))
PARTS = ("weight", "scale", "zero", "outer", "input_scale")
FORMATS: dict[str, WeightFormat] = {
    "float32": Dense(torch.float32),
    "bfloat16": Dense(torch.bfloat16),
    **{
        name: format_of(parse_scheme(name))
        for name in ("w8a8", "w8a16-g32-asym", "w4a8-g32-asym", "w4a16", "fp8", "mxfp4", "nvfp4")
    },
}

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(tokens: int, name: str = "float32", seed: int = 0) -> Tensor:
    return randn(tokens, D, seed=seed).to(torch.float32 if name == "float32" else torch.bfloat16)


def arguments(
    name: str = "float32", k: int = 3, *, normalize: bool = True, activation: int = SILU,
    biased: bool = False, gated: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """All of an operator's but x, of E experts in the format `name`."""
    held, seed = FORMATS[name], count(1)
    dense = Dense(torch.float32 if name == "float32" else torch.bfloat16)
    router = dense.pack(randn(E, D, seed=99) / 4)["weight"]

    def bank(n: int, depth: int, gated: bool) -> tuple[Tensor | None, ...]:
        whole = 2 * n if gated else n
        packed = [
            held.pack(randn(whole, depth, seed=next(seed)) / depth**0.5, gated) for _ in range(E)
        ]
        parts = tuple(
            torch.stack([each[part] for each in packed]) if part in packed[0] else None
            for part in PARTS
        )
        return *parts, randn(E, whole, seed=next(seed)) if biased else None

    codes, levels = held.row_codes, held.levels
    return (
        router, randn(E, seed=98) if biased else None, *bank(WIDE, D, gated), *bank(D, WIDE, False),
        k, normalize, WIDE, D, activation, codes, levels, codes, levels,
    )  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.usefixtures("isa")
@needs_native
def test_one_call_is_its_parts(tokens: int, name: str, normalize: bool, biased: bool) -> None:
    """The reference goes through `route`, `sort_tokens`, `grouped_linear` and `combine`, of which
    the products are native, too: what differs is the last bit of a softmax."""
    activation = OAI if biased else SILU
    given = arguments(name, normalize=normalize, activation=activation, biased=biased)
    x = rows(tokens, name)
    got, want = ops.experts(x, *given), ops.op("experts").reference(x, *given)
    near = 1e-5 if name == "float32" else 1e-2
    torch.testing.assert_close(got, want, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "w8a8", "w4a8-g32-asym", "mxfp4"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.usefixtures("isa", "restore")
@needs_native
def test_a_token_s_bits_are_its_own(name: str, threads: int) -> None:
    """Alone, among others, in strided rows, and with any number of threads."""
    given, x = arguments(name, biased=True), rows(70, name)
    torch.set_num_threads(1)
    want = torch.cat([ops.experts(x[t : t + 1], *given) for t in range(70)])
    torch.set_num_threads(threads)
    wide = torch.cat((rows(70, name, seed=5), x), 1)
    assert torch.equal(ops.experts(wide[:, D:], *given), want)
    for part in (slice(0, 2), slice(3, 24), slice(24, 70)):
        assert torch.equal(ops.experts(x[part], *given), want[part])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.usefixtures("isa")
@needs_native
def test_experts_without_gates(tokens: int, name: str) -> None:
    """Each token's, by plain products; and alone as among others."""
    given, x = arguments(name, activation=RELU2, gated=False), rows(tokens, name)
    got = ops.experts(x, *given, gated=False)
    near = 1e-5 if name == "float32" else 1e-2
    want = ops.op("experts").reference(x, *given, gated=False)
    torch.testing.assert_close(got, want, rtol=near, atol=near)
    alone = [ops.experts(row, *given, gated=False) for row in x.split(1)]
    assert torch.equal(got, torch.cat(alone))


@needs_native
def test_experts_without_gates_are_what_they_say() -> None:
    given, x = arguments(activation=RELU2, gated=False), rows(9)
    up, down = (
        [randn(n, k, seed=first + e) / k**0.5 for e in range(E)]
        for n, k, first in ((WIDE, D, 1), (D, WIDE, 1 + E))
    )
    shares = (x @ (randn(E, D, seed=99) / 4).T).softmax(-1).topk(3)
    weights = shares.values / shares.values.sum(-1, keepdim=True)
    want = torch.stack([
        sum(
            (w * (down[e] @ (up[e] @ row).relu().square()) for w, e in zip(ws, es, strict=True)),
            torch.zeros(D),
        )
        for row, ws, es in zip(x, weights, shares.indices.tolist(), strict=True)
    ])  # fmt: skip
    got = ops.experts(x, *given, gated=False)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


ROUTERS = {
    "sigmoid": (False, True, 1, 1),
    "corrected": (True, True, 1, 1),
    "corrected softmax": (True, False, 1, 1),
    "groups": (False, False, 4, 2),
    "sigmoid in groups": (False, True, 4, 3),
    "as DeepSeek-V3": (True, True, 4, 2),
    "groups of one": (True, True, 12, 5),
    "all groups": (True, True, 3, 3),
}
"""Whether there are corrections, sigmoids; groups, and how many can be chosen from."""


def routed(name: str, normalize: bool) -> tuple[Any, ...]:
    """Arguments for 12 experts, of which a token takes 4."""
    corrected, *rest = ROUTERS[name]
    given = list(arguments(k=4, normalize=normalize))
    given[0] = Dense(torch.float32).pack(randn(12, D, seed=99) / 4)["weight"]
    for i in (2, 8):  # up's and down's weights, of one expert more
        given[i] = torch.cat((given[i], given[i][:1])).contiguous()
    return *given, randn(12, seed=5) / 2 if corrected else None, *rest, 1.5


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.usefixtures("isa")
@needs_native
def test_routers(name: str, normalize: bool) -> None:
    given, x = routed(name, normalize), rows(40)
    got = ops.experts(x, *given)
    torch.testing.assert_close(got, ops.op("experts").reference(x, *given), rtol=1e-5, atol=1e-5)
    alone = torch.cat([ops.experts(row, *given) for row in x.split(1)])
    assert torch.equal(got, alone)


@pytest.mark.usefixtures("isa")
@needs_native
def test_small_sums_of_sigmoids_are_raised() -> None:
    """As LFM2's router has it: 1e-6 is a part of the sum where a token wants nobody."""
    given, x = routed("sigmoid", True), rows(40)
    got = ops.experts(x, *given, eps=0.5)
    want = ops.op("experts").reference(x, *given, eps=0.5)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, ops.experts(x, *given), rtol=1e-2)


def test_the_router_of_deepseek() -> None:
    """transformers' own, with corrections that change the choice."""
    config = DeepseekV3Config(
        hidden_size=D, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=5,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router, x = DeepseekV3TopkRouter(config), rows(50)
    correction = randn(16, seed=5) / 2
    with torch.no_grad():
        router.weight.copy_(randn(16, D, seed=6) / 8)
        router.e_score_correction_bias.copy_(correction)
        logits, weights, experts = router(x)
        found = ops.route(logits, 5, True, correction, True, 4, 2, 2.5)
        plain = ops.route(logits, 5, True, None, True, 4, 2, 2.5)
    assert torch.equal(found[1].sort().values, experts.to(torch.int32).sort().values)
    torch.testing.assert_close(found[0].sort().values, weights.sort().values)
    assert not torch.equal(plain[1].sort().values, found[1].sort().values)


@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.usefixtures("isa")
@needs_native
def test_all_tokens_to_few_experts_and_to_all(k: int) -> None:
    given = list(arguments(k=k))
    x = rows(33)
    x[:] = x[:1]  # all choose the same
    got = ops.experts(x, *given)
    torch.testing.assert_close(got, ops.op("experts").reference(x, *given), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(row, got[0]) for row in got)


@pytest.mark.usefixtures("isa")
@needs_native
def test_ties_go_to_the_first_expert_and_nan_stays_in_its_row() -> None:
    """Two experts with the same router row; the second is never reached with k = 1."""
    given = list(arguments(k=1))
    router = randn(E, D, seed=99)
    router[4] = router[2] = 10 * router[2].abs()
    given[0] = Dense(torch.float32).pack(router)["weight"]
    given[8] = given[8].clone()  # down's weight
    x = rows(5).abs()
    want = ops.experts(x, *given)
    given[8][4] = float("nan")
    assert torch.equal(ops.experts(x, *given), want)
    sick = x.clone()
    sick[1, 3] = float("nan")
    found = ops.experts(sick, *given)
    well = [0, 2, 3, 4]
    assert torch.equal(found[well], want[well])
    assert found[1].isnan().all()


def test_nothing_for_no_tokens() -> None:
    assert ops.experts(rows(0), *arguments()).shape == (0, D)


def test_what_doesn_t_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match=f"{E + 1} experts a token can't be chosen of {E}"):
        ops.experts(rows(2), *arguments(k=E + 1))
    with pytest.raises(RuntimeError, match="0 experts a token can't be chosen"):
        ops.experts(rows(2), *arguments(k=0))
    for groups, top_groups in ((5, 1), (4, 5), (0, 1), (12, 3)):
        given = (*routed("as DeepSeek-V3", True)[:-3], groups, top_groups, 1.0)
        with pytest.raises(RuntimeError, match=r"experts.* can't be chosen from"):
            ops.experts(rows(2), *given)


@needs_native
def test_banks_of_other_sizes_are_refused() -> None:
    given = list(arguments())
    given[8] = given[8][:-1].contiguous()  # down, of one expert fewer
    with pytest.raises(RuntimeError, match=f"must be contiguous and of {E} experts"):
        ops.experts(rows(2), *given)
    given = list(arguments())
    given[2] = given[2].transpose(0, 1)
    with pytest.raises(RuntimeError, match="experts"):
        ops.experts(rows(2), *given)


def _of(name: str, bank: Tensor, gated: bool) -> Tensor:
    return torch.stack([FORMATS[name].pack(own.contiguous(), gated)["weight"] for own in bank])


def test_transformers_mixtral_block() -> None:
    config = MixtralConfig(
        hidden_size=D, intermediate_size=WIDE, num_local_experts=E, num_experts_per_tok=3
    )
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    own = dict(block.named_parameters())
    x = rows(20)
    with torch.inference_mode():
        found = block(x[None])
        want = (found[0] if isinstance(found, tuple) else found)[0]
        up, down = own["experts.gate_up_proj"], own["experts.down_proj"]
        router = Dense(torch.float32).pack(own["gate.weight"])["weight"]
        none = (None,) * 5
        got = ops.experts(
            x, router, None, _of("float32", up, True), *none, _of("float32", down, False), *none,
            3, True, WIDE, D, SILU,
        )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_transformers_gpt_oss_block() -> None:
    """Columns of gate and up in turns, biases, clamps: values reach well beyond 7."""
    config = GptOssConfig(
        hidden_size=D, intermediate_size=WIDE, num_local_experts=E, num_experts_per_tok=4
    )
    torch.manual_seed(0)
    block = GptOssMLP(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    own = dict(block.named_parameters())
    x = rows(20)
    with torch.inference_mode():
        want = block(x[None])[0][0]
        joined = own["experts.gate_up_proj"].transpose(1, 2)
        assert (joined @ x.t()).abs().max() > 14
        up = torch.cat((joined[:, 0::2], joined[:, 1::2]), 1)
        of_up = own["experts.gate_up_proj_bias"]
        of_up = torch.cat((of_up[:, 0::2], of_up[:, 1::2]), 1).contiguous()
        down = own["experts.down_proj"].transpose(1, 2)
        router = Dense(torch.float32).pack(own["router.weight"])["weight"]
        none = (None,) * 4
        got = ops.experts(
            x, router, own["router.bias"].detach(),
            _of("float32", up, True), *none, of_up,
            _of("float32", down, False), *none, own["experts.down_proj_bias"].detach(),
            4, True, WIDE, D, OAI,
        )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-3)
