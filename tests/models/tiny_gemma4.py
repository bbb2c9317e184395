"""Gemma 4's kinds for `tiny`: their configs' own keys."""

from __future__ import annotations

from typing import Any

_TYPES = ["sliding_attention", "full_attention"]
_COMMON = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "global_head_dim": 40,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "layer_types": _TYPES * 2,
}

GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4": {
        **_COMMON,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 5.0,
    },
    "gemma4-mixed": {
        **_COMMON,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "gemma4-inputs": {
        **_COMMON,
        "num_hidden_layers": 6,
        "layer_types": _TYPES * 3,
        "hidden_size_per_layer_input": 20,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
}
"""As the 31B, the 26B with experts, and the 2B, whose last layers read earlier ones' keys."""
