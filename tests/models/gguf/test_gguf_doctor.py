"""`penstock doctor FILE.gguf`: how its matrices are stored, and what they run as."""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind
from gguf_writing import write_model
from test_gguf_models import make

from penstock.cli.examined import examine
from penstock.kernels import native

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def choose(name: str, values: object) -> gguf.GGMLQuantizationType:
    if "ffn_down" in name:
        return Kind.Q4_1
    return Kind.Q4_0 if "ffn" in name else Kind.Q8_0 if "attn" in name else Kind.F16


def test_what_is_kept_and_what_is_dequantized(tmp_path: Path) -> None:
    write_model(make("qwen2", **SIZES), tmp_path / "m.gguf", choose)
    for path in (tmp_path / "m.gguf", tmp_path):  # a folder that holds nothing else
        found = examine(str(path))
        assert found.kind == "GGUF file" and found.runs and found.path.endswith("m.gguf")
        rows = {row.stored: row for row in found.weights}
        assert rows["Q4_0"].runs_as == "w4a8-g32-blocks" and rows["Q4_0"].matrices == 4
        assert rows["Q8_0"].runs_as == "w8a8-g32-blocks" and rows["Q8_0"].matrices == 8
        assert rows["Q4_1"].runs_as == "bfloat16" and rows["Q4_1"].values == 2 * 256 * 512
        assert rows["Q4_1"].how.startswith("dequantized as it is loaded")
        assert not any("dequantized" in rows[kind].how for kind in ("Q4_0", "Q8_0", "F16"))
        if native.handle is not None:
            assert rows["Q4_0"].how == f"native, {native.isa}"
    broken = bytearray((tmp_path / "m.gguf").read_bytes()[:2000])
    (tmp_path / "broken.gguf").write_bytes(broken)
    found = examine(str(tmp_path / "broken.gguf"))
    assert not found.runs and "broken.gguf" in found.why
