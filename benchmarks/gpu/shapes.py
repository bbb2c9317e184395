"""Models by their shapes, as config.json says them."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}

LLAMA_8B: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LLAMA_1B: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def matrices(shape: dict[str, Any]) -> dict[str, tuple[int, int, bool]]:
    """[N, K] of a layer's matrices and the head's, and whether it is gate above up (N of each)."""
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    return {
        "qkv": (q + 2 * kv, hidden, False),
        "out": (hidden, q, False),
        "gate_up": (shape["intermediate_size"], hidden, True),
        "down": (hidden, shape["intermediate_size"], False),
        "head": (shape["vocab_size"], hidden, False),
    }
