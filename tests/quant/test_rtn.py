"""Round to nearest: packed halves of a gate, what is refused, and what stays in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.errors import WeightsError
from penstock.quant import parse_quantization

NAMES = ["w8a8", "w4a8", "w4a16-g128", "w4a8-g64-asym"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [48, 50])
def test_a_gate_is_packed_as_its_halves_are(name: str, n: int) -> None:
    fmt = parse_quantization(name)
    w = torch.randn(2 * n, 172, generator=torch.Generator().manual_seed(1)).bfloat16()
    both, gate, up = fmt.pack(w, gated=True), fmt.pack(w[:n]), fmt.pack(w[n:])
    assert both.keys() == gate.keys()
    assert ("zero" in both) == name.endswith("asym")
    for part, stored in both.items():
        assert torch.equal(stored[::2], gate[part])
        assert torch.equal(stored[1::2], up[part])
    assert sum(t.nbytes for t in both.values()) == 2 * fmt.nbytes(n, 172)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_damaged_weight(name: str, bad: float) -> None:
    w = torch.ones(40, 100)
    w[3, 7] = bad
    with pytest.raises(WeightsError, match=r"1 of 4000 values .* \[40, 100\] are NaN or infinite"):
        parse_quantization(name).pack(w)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_weight_beyond_the_scales(name: str) -> None:
    with pytest.raises(WeightsError, match=r"of 1e\+07 needs a scale beyond float16"):
        parse_quantization(name).pack(torch.full((4, 64), 1e7))


_MEASURE = """
import gc, sys
from pathlib import Path
import torch
from penstock import kernels
from penstock.hardware import release_freed_memory
from penstock.models.load import load_model

def resident() -> int:
    gc.collect()  # what was freed may stay with the process, or not: 10 MB either way
    release_freed_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

folder = Path(sys.argv[1])
load_model(folder, quantization=sys.argv[2])  # what a first load brings along for good
before = resident()
model = load_model(folder, quantization=sys.argv[2]).model
packed = sum(p.nbytes for p in model.parameters())
print(packed, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_nothing_but_the_packed_weights_stays(name: str) -> None:
    """Neither the mapped checkpoint nor a copy of a weight."""
    import penstock

    folder = Path(penstock.__file__).parent / "assets" / "stories"
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), name],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    packed, grown = map(int, done.stdout.split())
    checkpoint = (folder / "model.safetensors").stat().st_size
    assert packed < 0.65 * checkpoint
    assert grown < packed + checkpoint // 3
