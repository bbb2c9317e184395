"""States in the floor: read and written once a step and sequence, however long the text."""

from __future__ import annotations

from penstock.roofline import StepSize

from .shapes import costs, of_mamba, of_states

STATE = 4 * 16 * 128 * 128 + 2 * 3 * 6144
"""Bytes of a layer's state, and of the inputs that its convolution still needs."""
KV = 6 * 2 * 2 * 256 * 2
"""Bytes of a token in the layers that attend."""
MATRICES = {
    "mixed": 18 * 1024 * (6144 + 2048),
    "gates": 18 * 1024 * 32,
    "qkv": 6 * 1024 * (2048 + 2 * 512),
    "gate": 6 * 1024 * 2048,
    "out": 24 * 1024 * 2048,
    "up": 24 * 1024 * 2 * 3584,
    "down": 24 * 1024 * 3584,
    "head": 1024 * 248320,
}


def test_a_token_reads_every_matrix_and_its_states() -> None:
    model = costs(of_states())
    for context in (1, 100, 100_000):
        cost = model.cost(StepSize([1], [context], 1))
        assert cost.weight_bytes == 2 * sum(MATRICES.values())
        assert cost.kv_bytes == 18 * 2 * STATE + KV * (context + 1)
        assert cost.flops == 2 * sum(MATRICES.values()) + 6 * 4 * 8 * 256 * context


def test_a_prompt_reads_its_states_once() -> None:
    model = costs(of_states())
    size = StepSize([500, 1, 1], [500, 7, 9], 3)
    assert model.cost(size).kv_bytes == 3 * 18 * 2 * STATE + KV * (516 + 502)


def test_operators() -> None:
    rows = {row.op: row for row in costs(of_states()).ops(StepSize([10], [30], 1))}
    for name, values in MATRICES.items():
        assert rows[name].weight_bytes == 2 * values
    assert rows["delta"].calls == 18 and rows["delta"].kv_bytes == 18 * 2 * STATE
    assert rows["delta"].flops == 18 * 10 * (7 * 16 * 128 * 128 + 2 * 4 * 6144)
    assert rows["delta"].weight_bytes == 0 and rows["delta"].unit == "vector"
    assert rows["attention"].calls == 12 and rows["rotary"].calls == 6


def test_mamba() -> None:
    """Of 48 heads of 64 with states of 128 each, in float32; a step's length is one number each."""
    state = 4 * 48 * 64 * 128 + 2 * 3 * (3072 + 2 * 128)
    rows = {row.op: row for row in costs(of_mamba()).ops(StepSize([10, 1], [30, 1], 1))}
    assert rows["mamba"].calls == rows["mixed"].calls == 36
    assert rows["mamba"].kv_bytes == 36 * 2 * 2 * state
    assert rows["mamba"].flops == 36 * 11 * (5 * 48 * 64 * 128 + 2 * 4 * (3072 + 2 * 128))
    assert rows["mixed"].weight_bytes == 36 * 2 * 1536 * (2 * 3072 + 2 * 128)
    assert rows["gates"].weight_bytes == 36 * 2 * 1536 * 48
    assert rows["attention"].calls == rows["qkv"].calls == 4
