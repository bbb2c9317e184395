"""What memory a loaded model takes, beside its weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_RESIDENT = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from penstock.config import EngineConfig
from penstock.runtime import load_runtime
from penstock.models.hub import resolve

folder = Path(sys.argv[1])
config = json.loads((resolve("stories") / "config.json").read_text())
config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 64,
           "num_attention_heads": 16, "num_key_value_heads": 4, "dtype": "bfloat16"}
(folder / "config.json").write_text(json.dumps(config))
sizes = {"mlp.gate_proj": (4096, 1024), "mlp.up_proj": (4096, 1024), "mlp.down_proj": (1024, 4096),
         "self_attn.q_proj": (1024, 1024), "self_attn.k_proj": (256, 1024),
         "self_attn.v_proj": (256, 1024), "self_attn.o_proj": (1024, 1024),
         "input_layernorm": (1024,), "post_attention_layernorm": (1024,)}
tensors = {f"model.layers.{i}.{name}.weight": torch.ones(size, dtype=torch.bfloat16)
           for i in range(8) for name, size in sizes.items()}
tensors["model.norm.weight"] = torch.ones(1024, dtype=torch.bfloat16)
table = torch.ones((config["vocab_size"], 1024), dtype=torch.bfloat16)
tensors["model.embed_tokens.weight"] = table
save_file(tensors, folder / "model.safetensors")
del tensors, table

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

load_runtime(EngineConfig.of(model="stories", quantization="w8a8"))
before = resident()
asked = dict(model=str(folder), quantization="w8a8", skip_tokenizer_init=True, max_model_len=64)
runtime = load_runtime(EngineConfig.of(**asked, max_num_seqs=1, num_gpu_blocks_override=8))
model = runtime.model.model
print(sum(p.nbytes for p in {id(t): t for t in (*model.parameters(), *model.buffers())}.values()))
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_what_packing_freed_is_given_back(tmp_path: Path) -> None:
    """Of 138 M weights, packed one by one, nothing stays but what they became."""
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held, grown = map(int, done.stdout.split())
    assert held > 100e6
    assert grown < 1.15 * held
