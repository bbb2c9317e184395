"""Block types against the `gguf` package's own dequantization, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.errors import WeightsError
from penstock.models.gguf.blocks import BLOCKS, Block

QUANTIZED = [kind for kind, block in BLOCKS.items() if block.plain is None]
HALVES = {  # where a block's float16 values are, by the type's name
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(block: Block, rows: int, per_row: int, seed: int = 0) -> NDArray[np.uint8]:
    """[rows, bytes]: every code and scale there is, with finite float16 values."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * per_row, block.nbytes), dtype=np.uint8)
    for at in HALVES[block.name]:
        halves = random.normal(0, 0.02, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    if block.name == "MXFP4":
        raw[:, 0] = random.integers(0, 250, len(raw), dtype=np.uint8)  # 4 · 2^127 is too much
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: BLOCKS[kind].name)
def test_dequantizes_as_gguf_does(kind: int) -> None:
    block = BLOCKS[kind]
    raw = random_blocks(block, 48, 7)
    shape = (48, 7 * block.values)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    assert np.array_equal(block.tensor(raw, shape).numpy(), expected)
    if block.scheme is not None:
        codes = block.to_codes(raw, shape)
        assert codes.scheme == block.scheme
        assert np.array_equal(codes.dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: BLOCKS[kind].name)
def test_sizes_are_ggmls(kind: int) -> None:
    own = BLOCKS[kind]
    kind_there = gguf.GGMLQuantizationType(kind)
    assert kind_there.name == own.name
    assert gguf.GGML_QUANT_SIZES[kind_there] == (own.values, own.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_values_are_views(dtype: torch.dtype) -> None:
    (block,) = [block for block in BLOCKS.values() if block.plain is dtype]
    values = torch.randn(6, 10).to(dtype)
    raw = values.view(torch.uint8).numpy()
    seen = block.tensor(raw, (6, 10))
    assert torch.equal(seen, values)
    assert seen.data_ptr() == values.data_ptr()


def test_a_chunk_ends_within_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.gguf.blocks._CHUNK", 256)
    block = BLOCKS[12]
    raw = random_blocks(block, 5, 3)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(block.tensor(raw, (5, 768)).numpy(), expected)


def test_nan_scales_of_mxfp4_are_refused() -> None:
    (block,) = [block for block in BLOCKS.values() if block.name == "MXFP4"]
    raw = np.full((1, 17), 255, dtype=np.uint8)
    with pytest.raises(WeightsError, match="exponent 255"):
        block.tensor(raw, (1, 32))
