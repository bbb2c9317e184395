"""How `linear` goes over a matrix changes no bit: every variant, format, shape, number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels import native
from penstock.ops.linear import ACTIVATIONS
from penstock.quant import Dense, Packed, WeightFormat, format_of, parse_scheme
from penstock.runtime.plan import Array, Operator, Plan, Value, Weight
from penstock.runtime.program import LinearVariant, Program
from penstock.step import Step

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

QUANTIZED = (
    "w8a16", "w8a8", "w4a16", "w4a8", "w4a16-g128", "w4a8-g128-asym", "w8a8-asym",
    "w8a8-g32-asym", "w8a16-g128-asym", "fp8", "nf4", "mxfp4", "nvfp4",
)  # fmt: skip
FORMATS: dict[str, WeightFormat] = {
    "float32": Dense(torch.float32),
    "bfloat16": Dense(torch.bfloat16),
    **{name: format_of(parse_scheme(name)) for name in QUANTIZED},
}
ROWS = (1, 2, 3, 4, 5, 7, 9, 16, 17, 33, 70)
SHAPES = ((172, 64, False), (300, 50, True), (1000, 100, False))  # K, N, gated
LARGE = 1 << 30
VARIANTS = [
    LinearVariant(**{field.name: value})
    for field in fields(LinearVariant)
    for value in ((1, 2, 3) if field.name == "ahead_cache" else (1, 5, 1 << 14, LARGE))
] + [LinearVariant(1, 1, LARGE, 1, 64, 2), LinearVariant(LARGE, LARGE, 1, LARGE, LARGE, 3)]


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def program_of(fmt: WeightFormat, x: Tensor, packed: Packed, n: int, gated: bool) -> Program:
    """Of one product alone: rows of `x` are looked up, multiplied and given back in float32."""
    none = dict.fromkeys(("weight_scale", "zero", "levels", "outer"))
    rows = {"scale": 1.0, **none, "levels": 0}
    weights = {
        name: Weight(name) if packed.get(name) is not None else None
        for name in ("weight", "scale", "zero", "outer", "input_scale")
    }
    product = {
        "x": Value(0), "weight": weights["weight"], "scale": weights["scale"],
        "zero": weights["zero"], "bias": None, "out_features": n,
        "row_codes": getattr(fmt, "row_codes", 0), "norm": None, "eps": 0.0,
        "activation": ACTIVATIONS.index("silu") if gated else 0, "gated": gated,
        "out_dtype": torch.float32, "levels": getattr(fmt, "levels", 0),
        "outer": weights["outer"], "input_scale": weights["input_scale"],
    }  # fmt: skip
    k = x.shape[1]
    looked_up = {"tokens": Array("tokens"), "weight": Weight("x"), "dim": k, **rows}
    sampled = {"tokens": Array("sample_at"), "weight": Value(1), "dim": n, **rows}
    operators = (
        Operator("embedding", looked_up, ("T", k)),
        Operator("linear", product, ("T", n)),
        Operator("embedding", sampled, ("S", n)),
    )
    tensors = {"x": x} | {name: packed[name] for name, used in weights.items() if used}
    return Program.of_plan(Plan(operators, 2), tensors, [])


def step_of(rows: int) -> Step:
    every = torch.arange(rows, dtype=torch.int32)
    return Step(
        tokens=every, positions=every, slots=every, sample_at=every,
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        context_len=torch.tensor([rows], dtype=torch.int32),
        block_table=torch.zeros((1, 1), dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("isa")
def test_no_bit_changes(name: str) -> None:
    fmt = FORMATS[name]
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    for k, n, gated in SHAPES:
        x = randn(max(ROWS), k).to(dtype)
        packed = fmt.pack(randn(2 * n if gated else n, k, seed=1) / k**0.5, gated)
        activation = "silu" if gated else "none"
        program = program_of(fmt, x, packed, n, gated)
        (form,) = program.products
        for rows in ROWS:
            want = fmt.matmul(
                x[:rows], packed, None, n,
                activation=activation, gated=gated, out_dtype=torch.float32,
            )  # fmt: skip
            for variant in VARIANTS:
                program.use_variants([(form, max(ROWS), variant)])
                assert torch.equal(program(step_of(rows), program._kv), want), (rows, variant)


def test_the_rows_it_is_for() -> None:
    """The first entry that fits; more rows as the last; a later table replaces an earlier."""
    fmt, k, n = FORMATS["w8a8"], 172, 64
    program = program_of(fmt, randn(8, k).bfloat16(), fmt.pack(randn(n, k)), n, False)
    (form,) = program.products
    assert form == "linear int8[4, 48, 16, 4] scale float32[4, 1, 16] of int8 rows"
    assert program.products[form] == [1]
    before = program(step_of(8), program._kv).clone()
    program.use_variants([(form, 4, LinearVariant(pair_rows=1)), (form, 1, LinearVariant())])
    assert torch.equal(program(step_of(8), program._kv), before)
    program.use_variants([])
    with pytest.raises(
        KernelError, match=r"chosen for 'linear of nothing', which isn't in the plan"
    ):
        program.use_variants([("linear of nothing", 1, LinearVariant())])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"part_bytes": -1}, r"part_bytes=-1 isn't a number from 0 to 1,073,741,824"),
        ({"ahead_cache": 4}, r"ahead_cache=4 isn't a number from 0 to 3"),
        ({"rows_bytes": 1.5}, r"rows_bytes=1\.5 isn't"),
        ({"pair_rows": True}, r"pair_rows=True isn't"),
    ],
)
def test_numbers_that_mean_nothing(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LinearVariant(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([0, 1, 0, 0, 0, 0, 0, 0], "Operator 0 is no product"),
        ([9, 1, 0, 0, 0, 0, 0, 0], "There is no operator 9"),
        ([1, 1, 0, 0, 0, 0, 0, 4], "its cache is 3 at most"),
        ([1, 1, -1, 0, 0, 0, 0, 0], "numbers aren't negative"),
        ([1, 1], r"table must be \[n, 8\]"),
    ],
)
def test_the_library_checks_too(entry: list[int], words: str) -> None:
    fmt, k, n = FORMATS["w8a8"], 172, 64
    program = program_of(fmt, randn(8, k).bfloat16(), fmt.pack(randn(n, k)), n, False)
    with pytest.raises(RuntimeError, match=words):
        torch.ops.penstock.program_variants(
            program._handle, torch.tensor([entry], dtype=torch.int32)
        )
