"""More families for `tiny`: what their checkpoints are called, and what differs from `COMMON`."""

from __future__ import annotations

from typing import Any

LATER_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MELLUM_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {**LATER_YARN, "rope_theta": 500000.0},
}
GPTJ = {
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "rotary_dim": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FALCON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 100,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.21,
    "residual_multiplier": 0.33,
    "logits_scaling": 1.7,
    "rms_norm_eps": 0.05,
}

ALONE = ("gptj", "codegen", "falcon", "falcon-40b", "falcon-11b", "falcon-serial")
"""Those that have nothing in common."""

LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "moe_layer_end_index": 2,
        },
    ),
    "nemotron": ("Nemotron", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "olmo": ("Olmo", {"tie_word_embeddings": True}),
    "dots1": (
        "Dots1",
        {
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 19,
            "max_window_layers": 2,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 24,
            "rotary_dim": 12,
            "intermediate_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"head_dim": 24, "intermediate_size": 40, "num_experts": 6, "moe_topk": 2},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "sliding_window": 19,
            "routed_scaling_factor": 1.3,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "helium": ("Helium", {"head_dim": 16, "mlp_bias": True, "attention_bias": True}),
    "cwm": ("Cwm", {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 19}),
    "solar-open": (
        "SolarOpen",
        {
            "head_dim": 24,
            "intermediate_size": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "rope_parameters": LATER_YARN,
        },
    ),
    "youtu": (
        "Youtu",
        {
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 18,
            "q_lora_rank": 20,
            "num_key_value_heads": 4,
        },
    ),
    "granite-swa": (
        "GraniteSWA",
        {
            **MULTIPLIERS,
            "num_hidden_layers": 4,
            "sliding_window": 19,
            "layer_rope_theta": [0, 10000.0, 10000.0, 50000.0],
        },
    ),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        {
            **MULTIPLIERS,
            "logits_scaling": 1.1,
            "sliding_window": 19,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 72,
        },
    ),
    "cohere2-moe": (
        "Cohere2Moe",
        {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "logit_scale": 1.3,
            "sliding_window": 19,
            "intermediate_size": 40,
            "prefix_dense_intermediate_size": 100,
            "first_k_dense_replace": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
        },
    ),
    "cohere2-moe-sigmoid": (
        "Cohere2Moe",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "logit_scale": 1.3,
            "sliding_window": 19,
            "intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "moe_intermediate_size": 24,
            "route_scale": 1.5,
            "sliding_window": 19,
            "mup_enabled": True,
        },
    ),
    "mellum": (
        "Mellum",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": MELLUM_ROPE,
        },
    ),
    "vaultgemma": (
        "VaultGemma",
        {
            "hidden_size": 72,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "nanochat": ("NanoChat", {"final_logit_softcapping": 12.0}),
    "flex-olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gptj": ("GPTJ", GPTJ),
    "codegen": ("CodeGen", GPTJ),
    "falcon": ("Falcon", FALCON),
    "falcon-40b": (
        "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
    "falcon-11b": (
        "Falcon",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-serial": (
        "Falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True}
    ),
}  # fmt: skip
LATER_SEEDS = {"solar-open": 0, "cohere2-moe-sigmoid": 0, "dots1": 1}
"""As `PROMPT_SEEDS`."""
LATER_FAMILIES = [
    name for name in LATER if name not in ("cohere2-moe-sigmoid", "falcon-11b", "falcon-serial")
]
"""As `FAMILIES`."""
LATER_ALIKE = ("helium", "cwm", "solar-open", "granite-swa", "codegen", "falcon-40b", "youtu")
"""As `ALIKE`."""
