"""Nemotron-H: what its files say in several ways, and what of it other parts ask about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.tiny import CASES, Sequence, Tiny, make_model, make_tiny

from penstock.errors import UnsupportedModelError
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.nemotron import _experts
from penstock.models.load import load_model
from penstock.models.lora import Merged
from penstock.models.registry import read_spec
from penstock.models.sources import open_source
from penstock.nn import DecoderSpec
from penstock.pipeline.prune.prune import _why_not


def said(folder: Path, **changes: Any) -> DecoderSpec:
    """What config.json means with these values; None: without the key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return read_spec(folder).decoder


@pytest.fixture
def dense(tmp_path: Path) -> Tiny:
    return make_tiny("nemotron-h", tmp_path)


def test_a_pattern_in_letters(dense: Tiny, tmp_path: Path) -> None:
    """As NVIDIA's own files have it, whose attention has another key for its heads."""
    want = read_spec(tmp_path)
    got = said(
        tmp_path, layers_block_type=None, hybrid_override_pattern="M--M*-MM-", head_dim=None,
        attention_head_dim=24, rms_norm_eps=0.01,
    )  # fmt: skip
    assert got == want.decoder
    assert [bool(layer.mlp.intermediate) for layer in got.layers] == [1, 1, 0, 1, 0, 1]
    assert [layer.attention.is_absent for layer in got.layers] == [0, 1, 0, 0, 0, 0]


def test_earlier_keys_of_mamba(dense: Tiny, tmp_path: Path) -> None:
    want = read_spec(tmp_path).decoder
    more = {"n_groups": None, "conv_kernel": None, "use_conv_bias": None}
    assert said(tmp_path, mamba_n_groups=2, mamba_d_conv=4, mamba_conv_bias=True, **more) == want


def test_one_group_is_chosen_from(tmp_path: Path) -> None:
    """Where the config doesn't say of how many groups of experts: transformers' default."""
    make_tiny("nemotron-h-moe", tmp_path)
    spec = said(tmp_path, n_group=2, topk_group=None, hidden_act="relu2")
    experts = spec.layers[0].mlp.experts
    assert experts is not None
    assert (experts.groups, experts.top_groups) == (2, 1)


def test_groups_that_a_file_leaves_out() -> None:
    values: dict[str, Any] = {
        "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 40,
        "expert_shared_feed_forward_length": 72, "expert_group_count": 4,
    }  # fmt: skip
    own = {f"nemotron_h_moe.{key}": value for key, value in values.items()}
    m = Metadata({"general.architecture": "nemotron_h_moe", **own}, "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"has no \w+\.expert_group_used_count"):
        _experts(m)


def test_experts_by_a_softmax() -> None:
    values = {"general.architecture": "x", "x.expert_gating_func": 1}
    with pytest.raises(UnsupportedModelError, match="expert_gating_func must be 2"):
        _experts(Metadata(values, "m.gguf"))


@pytest.mark.parametrize("prefix", ["backbone", "model"])
def test_an_adapter_by_either_name(dense: Tiny, prefix: str, tmp_path: Path) -> None:
    """transformers calls the model otherwise than its files do."""
    at = f"base_model.model.{prefix}.layers.1.mixer.up_proj"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    down, up = torch.randn(2, 64), torch.randn(100, 2)
    save_file(
        {f"{at}.lora_A.weight": down, f"{at}.lora_B.weight": up},
        adapter / "adapter_model.safetensors",
    )
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    base = open_source(tmp_path)
    name = "backbone.layers.1.mixer.up_proj.weight"
    merged = Merged(base, adapter)
    assert merged.modules == [name]
    torch.testing.assert_close(merged.read(name), base.read(name) + 2 * up @ down)


def test_attention_alone(tmp_path: Path) -> None:
    """No layer has states, and one has no feed-forward block: what needs one says so."""
    case = CASES["nemotron-h"]
    kinds = ["mlp", "full_attention", "full_attention", "mlp"]
    changes = {**case.changes, "layers_block_type": kinds, "num_hidden_layers": 4}
    theirs = make_model(replace(case, changes=changes))
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32", max_model_len=64).model
    tokens = torch.arange(3, 23)
    with torch.inference_mode():
        want = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(Sequence(model).feed(tokens), want, atol=2e-4, rtol=2e-4)
    assert _why_not(model.spec) == "layers without a feed-forward block"
