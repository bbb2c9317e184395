"""The floor of attention over latents: one row a token for all heads, and matrices of heads."""

from __future__ import annotations

from penstock.roofline import StepSize

from .shapes import costs, of_latents

D, H, RANK, TURNED, PLAIN, VALUE = 2048, 16, 512, 64, 128, 128
HEADS = H * RANK * (PLAIN + VALUE)
EXPERT, SHARED, DENSE = 3 * D * 1408, 3 * D * 2816, 3 * D * 10944
QUERIES = H * (PLAIN + TURNED)
ATTENTION = (QUERIES + RANK + TURNED) * D + HEADS + D * H * VALUE
TIGHT = ATTENTION - QUERIES * D + 1536 * (D + QUERIES)
HEAD = 102400 * D


def test_one_token() -> None:
    cost = costs(of_latents()).cost(StepSize([1], [100], 1))
    experts = 2 * (64 * D + 6 * EXPERT + SHARED)
    values = 2 * ATTENTION + TIGHT + DENSE + experts + HEAD
    assert cost.weight_bytes == 2 * values + 2 * D  # and a row of the embedding
    seen = 3 * 2 * H * (RANK + TURNED + RANK) * 100
    assert cost.products["bfloat16"] == 2 * values + seen
    assert cost.kv_bytes == 3 * 2 * (RANK + TURNED) * (100 + 1)  # read, and written


def test_rows_of_a_prompt() -> None:
    rows = {row.op: row for row in costs(of_latents()).ops(StepSize([10], [30], 1))}
    calls = {name: row.calls for name, row in rows.items()}
    assert (calls["q"], calls["q_down"], calls["q_up"], calls["kv"]) == (2, 1, 1, 3)
    assert (calls["heads"], calls["attention"], calls["rotary"]) == (6, 3, 3)
    assert (calls["shared_up"], calls["shared_down"], calls["up"], calls["experts"]) == (2, 2, 1, 2)
    assert "qkv" in calls and calls["qkv"] == 0
    assert rows["heads"].products == {"bfloat16": 3 * 2 * 10 * HEADS}
    assert rows["heads"].weight_bytes == 3 * 2 * HEADS
    assert rows["shared_up"].activation_bytes == 2 * 10 * 2 * (D + 2816)
    assert rows["attention"].kv_bytes == 3 * 30 * 2 * (RANK + TURNED)
    pairs = sum(range(21, 31))
    assert rows["attention"].flops == 3 * 2 * H * (RANK + TURNED + RANK) * pairs
