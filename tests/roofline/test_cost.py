"""The floor's bytes and FLOPs, against counts made another way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from penstock.cache import PagedLayout
from penstock.hardware import Compute, Peaks
from penstock.nn import NormSpec
from penstock.quant import Dense, WeightFormats
from penstock.roofline import OPS, Cost, CostModel, StepSize, floor_of, floor_s, op_floor, total
from penstock.roofline.cost import pairs
from penstock.step import Step

from .shapes import BF16, costs, mixed, of_inputs, of_latents, of_states, qwen

PEAKS = Peaks(1e9, 1e12, 0.0, 2, "")
SMALL = 24 * (2 * 896 + 1152) + 896
"""Qwen's norms and biases, which aren't counted."""


@dataclass(frozen=True, slots=True)
class Eighth(Dense):
    """Stands for a quantized format: a byte a weight, products in int8."""

    @property
    def compute(self) -> Compute:
        return "int8"

    def nbytes(self, out_features: int, in_features: int) -> int:
        return out_features * in_features


def test_decode_reads_every_matrix_once_and_the_visible_cache() -> None:
    cost = costs(qwen()).cost(StepSize([1], [100], 1))
    assert cost.weight_bytes == 2 * (494_032_768 - SMALL)
    assert cost.kv_bytes == 24 * 2 * 2 * 64 * 2 * (100 + 1)  # read 100, write 1
    assert cost.bytes_moved == cost.weight_bytes + cost.kv_bytes
    assert cost.flops == 2 * (494_032_768 - SMALL) + 24 * 4 * 14 * 64 * 100
    assert cost.intensity == pytest.approx(1.0, rel=0.01)  # a product and a sum for two bytes
    assert floor_s(cost, PEAKS) == cost.bytes_moved / 1e9


def test_a_batch_reads_the_weights_once() -> None:
    model = costs(qwen())
    one, many = model.cost(StepSize([1], [100], 1)), model.cost(StepSize([1] * 8, [100] * 8, 8))
    assert many.weight_bytes == one.weight_bytes
    assert (many.kv_bytes, many.flops) == (8 * one.kv_bytes, 8 * one.flops)


@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize(("queries", "context"), [(1, 1), (1, 30), (7, 30), (7, 9), (30, 30)])
def test_attention_counts_the_pairs_that_are_visible(
    window: int, queries: int, context: int
) -> None:
    at = torch.arange(context - queries, context)[:, None]
    seen = torch.arange(context)[None]
    mask = (seen <= at) & ((seen > at - window) if window else torch.tensor(True))
    cost = costs(qwen(window)).cost(StepSize([queries], [context], 0))
    matrices = 24 * (896 * 1152 + 896 * 896 + 3 * 896 * 4864)
    assert pairs(queries, context, window) == int(mask.sum())
    assert cost.flops == 2 * queries * matrices + 24 * 4 * 14 * 64 * int(mask.sum())
    read = int(mask.any(0).sum())
    assert cost.kv_bytes == 24 * 2 * 2 * 64 * 2 * (read + queries)


@pytest.mark.parametrize("local", [0, 20, 70, 80, 90, 200])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([1, 1], [1, 300]), ([1], [97]), ([40], [40]), ([100, 1, 33], [300, 64, 33])],
)
def test_recent_tokens_are_read_as_they_were_written(
    local: int, queries: list[int], contexts: list[int]
) -> None:
    """A cache with a window of 64: as codes and in bfloat16, whatever some query sees so."""
    spec = qwen(local)
    layout = PagedLayout(((2, 64),) * 24, torch.uint8, 32, 64, 99)
    model = CostModel(spec, BF16, layout, torch.bfloat16)
    size = StepSize(queries, contexts, 0)
    coded = recent = 0
    for count, context in zip(queries, contexts, strict=True):
        at = torch.arange(context - count, context)[:, None]
        seen = torch.arange(context)[None]
        visible = (seen <= at) & ((seen > at - local) if local else torch.tensor(True))
        old = seen < (at - 64).clamp(min=0) // 32 * 32
        coded += int((visible & old).any(0).sum())
        recent += int((visible & ~old).any(0).sum())
    codes, full = 2 * 2 * (32 + 8), 2 * 2 * 64 * 2  # keys and values of 2 heads of 64
    written = sum(queries) * (codes + full)
    assert model.cost(size).kv_bytes == 24 * (coded * codes + recent * full + written)
    assert total(model.ops(size)).kv_bytes == model.cost(size).kv_bytes


@pytest.mark.parametrize(
    "spec",
    [qwen(), qwen(window=7), mixed(), of_latents(), of_states(), of_inputs()],
    ids=["full", "window", "mixed", "latents", "states", "inputs"],
)
@pytest.mark.parametrize(
    "size",
    [
        StepSize([1, 1, 1], [1, 20, 40], 3),
        StepSize([8, 1, 20], [8, 30, 25], 2),
        StepSize([16], [48], 0),
    ],
    ids=["decode", "mixed", "chunk"],
)
def test_the_rows_add_up_to_the_step(spec: object, size: StepSize) -> None:
    """What the ledger takes from coefficients is what the operators add up to."""
    formats = WeightFormats(Eighth(torch.bfloat16), Dense(torch.bfloat16))
    for chosen in (BF16, formats):
        model = costs(spec, chosen)  # type: ignore[arg-type]
        rows = model.ops(size)
        assert tuple(row.op for row in rows) == OPS
        added, whole = total(rows), model.cost(size)
        assert (added.weight_bytes, added.kv_bytes) == (whole.weight_bytes, whole.kv_bytes)
        assert {k: v for k, v in added.products.items() if v} == {
            k: v for k, v in whole.products.items() if v
        }


def test_each_operator_of_a_prompt() -> None:
    """Qwen's shape, 10 tokens of a prompt of 30, its last one sampled."""
    rows = {row.op: row for row in costs(qwen()).ops(StepSize([10], [30], 1))}
    assert {name: row.calls for name, row in rows.items()} == {
        "embedding": 2, "norm": 0, "experts": 0, "head": 1, "softcap": 0,
        **dict.fromkeys(("conv", "delta", "gate", "gates", "mamba", "mixed", "narrow", "widen"), 0),
        **dict.fromkeys(("q", "q_down", "q_up", "kv", "heads", "shared_up", "shared_down"), 0),
        **dict.fromkeys(("projection", "input_gate", "input_out"), 0),
        **dict.fromkeys(("qkv", "rotary", "attention", "out", "up", "down"), 24),
    }  # fmt: skip
    up = rows["up"]
    assert up.weight_bytes == 24 * 2 * 9728 * 896
    assert up.activation_bytes == 24 * 10 * 2 * (896 + 4864)  # act(gate) · up comes out
    assert (up.flops, up.kv_bytes) == (24 * 2 * 10 * 9728 * 896, 0)
    assert up.intensity == pytest.approx(10.0)
    head = rows["head"]
    assert head.activation_bytes == 2 * 896 + 4 * 151936  # one row in, float32 logits out
    assert head.weight_bytes == 2 * 151936 * 896
    assert rows["embedding"].weight_bytes == 0  # its rows are the head's, read once
    assert rows["embedding"].activation_bytes == 2 * (10 + 2) * 896  # and the sampled row, copied
    assert rows["rotary"].kv_bytes == 24 * 10 * 512  # 2 heads of 64, keys and values, 2 bytes
    assert rows["rotary"].flops == 24 * 10 * 3 * 16 * 64
    assert rows["attention"].kv_bytes == 24 * 30 * 512
    assert rows["attention"].flops == 24 * 4 * 14 * 64 * sum(range(21, 31))


def test_norms_that_no_matrix_takes_along() -> None:
    rows = {row.op: row for row in costs(mixed()).ops(StepSize([10], [10], 1))}
    # two after the blocks of the first layer, each with an add, and the add of the positions
    assert rows["norm"].calls == 5
    assert rows["norm"].flops == 10 * (2 * 4 * 64 + 2 * 64 + 64)
    assert rows["norm"].activation_bytes == 2 * 10 * (2 * 2 * 64 + 6 * 64 + 3 * 64)
    assert (rows["softcap"].calls, rows["softcap"].activation_bytes) == (1, 8 * 512)
    layer_norms = replace(qwen(), norm=NormSpec("layer"))
    assert {r.op: r.calls for r in costs(layer_norms).ops(StepSize([10], [30], 1))}["norm"] == 49


def test_an_untied_embedding_reads_its_rows_and_a_chunk_reads_no_head() -> None:
    model = costs(mixed())
    chunk = {row.op: row for row in model.ops(StepSize([16], [16], 0))}
    assert chunk["embedding"].weight_bytes == 2 * 16 * 64 * 2  # its table's rows, and positions
    assert (chunk["head"].calls, chunk["head"].weight_bytes) == (0, 0)
    tied = costs(qwen())
    read = tied.cost(StepSize([16], [16], 1)).weight_bytes
    left = tied.cost(StepSize([16], [16], 0)).weight_bytes
    assert read - left == 2 * 896 * (151936 - 16)


def test_formats_of_matrices_and_head_differ() -> None:
    formats = WeightFormats(Eighth(torch.bfloat16), Dense(torch.bfloat16))
    cost = costs(qwen(), formats).cost(StepSize([4], [4], 1))
    matrices, head = 494_032_768 - SMALL - 151936 * 896, 151936 * 896
    assert cost.weight_bytes == matrices + 2 * head
    attention = 24 * 4 * 14 * 64 * 10
    assert cost.products == {"int8": 2 * 4 * matrices, "bfloat16": 2 * head + attention}


def test_each_kind_of_product_has_its_peak() -> None:
    peaks = Peaks(1e9, fma_flops=1e10, tile_flops=4e10, threads=2, measured_at="", int8_ops=8e10)
    assert [peaks.of(c) for c in ("float32", "bfloat16", "int8")] == [1e10, 4e10, 8e10]
    floor = floor_of(Cost(1, 1, {"float32": 10**10, "bfloat16": 10**10, "int8": 10**10}), peaks)
    assert floor.compute_s == pytest.approx(1 + 1 / 4 + 1 / 8)
    assert (floor.bound, floor.seconds) == ("compute", floor.compute_s)
    slow = Peaks(1e9, 1e10, 0.0, 2, "")
    assert [slow.of(c) for c in ("float32", "bfloat16", "int8")] == [1e10] * 3
    row = costs(qwen()).ops(StepSize([1], [9], 1))[OPS.index("rotary")]
    assert op_floor(row, peaks).compute_s == pytest.approx(row.flops / 1e10)


def test_prefill_is_bound_by_compute() -> None:
    cost = costs(qwen()).cost(StepSize([2048], [2048], 1))
    peaks = Peaks(1e12, 1e9, 0.0, 2, "")
    assert floor_s(cost, peaks) == pytest.approx(cost.flops / 1e9)
    full = WeightFormats(Dense(torch.float32), Dense(torch.float32))
    half = Peaks(1e12, 1e9, 1e10, 2, "")
    single = costs(qwen(), full, torch.float32).cost(StepSize([2048], [2048], 1))
    assert floor_s(single, half) == pytest.approx(10 * floor_s(cost, half))


def test_the_size_of_a_step() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    step = Step(
        tokens=ints(1, 2, 3, 4), positions=ints(0, 1, 2, 7), slots=ints(0, 1, 2, 39),
        query_start=ints(0, 3, 4), context_len=ints(3, 8), block_table=ints(0, 1)[:, None],
        sample_at=ints(2, 3),
    )  # fmt: skip
    size = StepSize.of(step)
    assert size == StepSize([3, 1], [3, 8], 2)
    assert size.tokens == 4
    assert not StepSize([4, 1], [9, 8], 2).is_prefill  # tokens that a grammar has forced
    assert StepSize([1, 1], [9, 8], 2, prefill_tokens=1).is_prefill  # a prompt's last token
