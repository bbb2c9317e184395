"""Tiny random checkpoints of every family, made with transformers, and a paged cache to run on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.tiny_gemma4 import GEMMA4
from tests.models.tiny_later import ALONE, LATER, LATER_ALIKE, LATER_FAMILIES, LATER_SEEDS
from torch import Tensor

from penstock.cache import StateCache
from penstock.models.load import LoadedModel, load_model
from penstock.nn import Decoder, DecoderSpec
from penstock.ops.panels import COLUMNS, round_up, vnni_factor
from penstock.step import KV, StatefulStep, Step

BLOCK = 32
TABLE = [5, 2, 7, 1, 4, 6, 3]  # blocks in no order; block 0 stays unused
PROMPT, CHUNK, NEW = 70, 40, 64
MAX_LEN = PROMPT + NEW + 26

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {  # 12 of 16 dimensions turn
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0],
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 30.0}
MINISTRAL3_ROPE = {
    **YARN_ROPE,
    "original_max_position_embeddings": 2000,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": YARN_ROPE,
}
LATENT = {
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
}


@dataclass(frozen=True)
class Case:
    """One kind of checkpoint: transformers' model and config classes, and what differs."""

    model: str
    config: str
    changes: dict[str, Any]
    max_len: int = MAX_LEN
    common: bool = True

    def make_config(self) -> Any:
        values = {**(COMMON if self.common else {}), **copy.deepcopy(self.changes)}
        return getattr(transformers, self.config)(**values)


def _case(family: str, **changes: Any) -> Case:
    return Case(f"{family}ForCausalLM", f"{family}Config", changes)


CASES: dict[str, Case] = {
    "llama": _case("Llama", head_dim=24, attention_bias=True, mlp_bias=True),
    "llama3-rope": _case("Llama", rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral": _case("Mistral", sliding_window=19, head_dim=24),
    "mistral-full": _case("Mistral", sliding_window=None),
    "qwen2": _case("Qwen2", rope_parameters=YARN_ROPE, tie_word_embeddings=True),
    "qwen2-window": _case("Qwen2", use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "qwen3": _case("Qwen3", head_dim=24),
    "gemma2": _case(
        "Gemma2",
        hidden_size=72,
        num_hidden_layers=4,
        head_dim=24,
        query_pre_attn_scalar=40,
        sliding_window=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "hidden_size": 72,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3": _case("Phi3", sliding_window=33),
    "phi3-short": _case(
        "Phi3",
        rope_parameters=LONGROPE,
        max_position_embeddings=640,
        original_max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
    ),
    "phi3-long": _case("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "olmo2": _case("Olmo2", attention_bias=True),
    "olmo3": _case("Olmo3", num_hidden_layers=4, sliding_window=19, rope_parameters=OLMO3_ROPE),
    "granite": _case(
        "Granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.21,
        residual_multiplier=0.33,
        logits_scaling=1.7,
        rms_norm_eps=0.05,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "gemma": _case("Gemma", hidden_size=72, head_dim=24),
    "cohere": _case("Cohere", logit_scale=1.3),
    "cohere2": _case("Cohere2", num_hidden_layers=4, logit_scale=1.3, sliding_window=19),
    "glm": _case("Glm", head_dim=24),
    "glm4": _case("Glm4", head_dim=24, attention_bias=False),
    "starcoder2": _case("Starcoder2", sliding_window=21),
    "starcoder2-full": _case("Starcoder2", tie_word_embeddings=False, use_bias=False),
    "exaone4": _case("Exaone4", num_hidden_layers=4, sliding_window=19, sliding_window_pattern=4),
    "exaone4-full": _case(
        "Exaone4", sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True
    ),
    "seed-oss": _case("SeedOss", head_dim=24),
    "ernie4_5": _case("Ernie4_5", head_dim=24, use_bias=True),
    "ministral": _case("Ministral", head_dim=24, sliding_window=19),
    "ministral3": _case(
        "Ministral3", head_dim=24, rope_parameters=MINISTRAL3_ROPE, max_position_embeddings=2500
    ),
    "arcee": _case("Arcee", mlp_bias=True),
    "hunyuan": _case("HunYuanDenseV1", head_dim=24),
    "hunyuan-alpha": _case(
        "HunYuanDenseV1", head_dim=16, rope_parameters=ALPHA_ROPE, tie_word_embeddings=True
    ),
    "phi": _case("Phi"),
    "stablelm": _case("StableLm", use_qkv_bias=True),
    "stablelm-parallel": _case("StableLm", use_parallel_residual=True, tie_word_embeddings=True),
    "smollm3": _case("SmolLM3", num_hidden_layers=4),
    "smollm3-window": _case(
        "SmolLM3",
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 0],
        use_sliding_window=True,
        sliding_window=21,
    ),
    "mixtral": _case("Mixtral", num_local_experts=6, head_dim=24, sliding_window=21),
    "olmoe": _case("Olmoe", num_experts=12, num_experts_per_tok=3, attention_bias=True),
    "qwen2-moe": _case(
        "Qwen2Moe",
        num_hidden_layers=4,
        num_experts=10,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=21,
        max_window_layers=2,
    ),
    "qwen3-moe": _case(
        "Qwen3Moe",
        num_hidden_layers=4,
        head_dim=24,
        num_experts=10,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    ),
    "deepseek-v2": _case(
        "DeepseekV2",
        **LATENT,
        num_key_value_heads=4,
        q_lora_rank=None,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rope_parameters={**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.9},
    ),
    "deepseek-v2-groups": _case(
        "DeepseekV2",
        **LATENT,
        num_key_value_heads=4,
        q_lora_rank=20,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    "deepseek-v3": _case(
        "DeepseekV3",
        **LATENT,
        num_key_value_heads=4,
        q_lora_rank=20,
        n_routed_experts=12,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.3,
        rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4-moe": _case(
        "Glm4Moe",
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    "glm4-moe-lite": _case(
        "Glm4MoeLite",
        **LATENT,
        num_key_value_heads=4,
        q_lora_rank=20,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        attention_bias=True,
        routed_scaling_factor=1.2,
        rope_interleave=False,
    ),
    "qwen3-moe-window": _case(
        "Qwen3Moe",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        use_sliding_window=True,
        sliding_window=13,
    ),
    "gpt-oss": _case(
        "GptOss", head_dim=24, num_local_experts=6, num_experts_per_tok=2, sliding_window=18
    ),
    "gpt2": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 320,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "scale_attn_by_inverse_layer_idx": True,
        },
        common=False,
    ),
    "gpt-neox": _case("GPTNeoX", num_attention_heads=2, num_key_value_heads=2),
    "gpt-neox-serial": _case(
        "GPTNeoX", num_key_value_heads=4, use_parallel_residual=False, hidden_act="gelu_new"
    ),
}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
CASES |= {
    "qwen3-next": _case(
        "Qwen3Next",
        **HYBRID,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3_5": Case(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **HYBRID,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", *["linear_attention"] * 3],
        },
    ),
    "qwen3_5-moe": Case(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            **HYBRID,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
}
CASES |= {
    "lfm2": _case(
        "Lfm2",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_bias=True,
        block_multiple_of=16,
        tie_word_embeddings=False,
    ),
    "lfm2-moe": _case(
        "Lfm2Moe",
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=4,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
}
MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 4,
    "mamba_d_state": 32,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.21,
    "residual_multiplier": 0.33,
    "logits_scaling": 1.7,
    "rms_norm_eps": 0.05,
}
FALCON = {
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.75, 0.5],
    "rms_norm_eps": 0.01,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
}
CASES |= {
    "granite-moe": _case(
        "GraniteMoe",
        **{**GRANITE, "logits_scaling": 1.1},
        num_local_experts=6,
        num_experts_per_tok=3,
    ),
    "granite-moe-shared": _case(
        "GraniteMoeShared", **GRANITE, num_local_experts=5, shared_intermediate_size=72
    ),
    "granite-hybrid": _case(
        "GraniteMoeHybrid",
        **MAMBA,
        **GRANITE,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=100,
        position_embedding_type="nope",
        tie_word_embeddings=True,
    ),
    "granite-hybrid-moe": _case(
        "GraniteMoeHybrid",
        **MAMBA,
        **GRANITE,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        mamba_n_groups=2,
        mamba_proj_bias=True,
        num_local_experts=6,
        intermediate_size=40,
        shared_intermediate_size=72,
        position_embedding_type="rope",
        attention_bias=True,
    ),
    "nemotron-h": _case(
        "NemotronH",
        layers_block_type=[
            *("linear_attention", "mlp", "mlp", "linear_attention", "full_attention", "mlp"),
            *("linear_attention", "linear_attention", "mlp"),
        ],
        num_hidden_layers=9,
        head_dim=24,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=32,
        layer_norm_epsilon=0.01,
        time_step_min=1e-9,  # transformers keeps steps above it, nobody else does
    ),
    "nemotron-h-moe": _case(
        "NemotronH",
        layers_block_type=[
            *("moe", "linear_attention", "moe", "full_attention", "linear_attention", "moe", "moe"),
        ],
        num_hidden_layers=7,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        use_bias=True,
        time_step_min=1e-9,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=72,
        routed_scaling_factor=1.7,
    ),
    "nemotron-h-latent": _case(
        "NemotronH",
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        num_hidden_layers=4,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        time_step_min=1e-9,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        moe_latent_size=32,
        moe_shared_expert_intermediate_size=72,
        routed_scaling_factor=1.7,
    ),
    "bamba": _case("Bamba", **MAMBA, attn_layer_indices=[1], mamba_conv_bias=False, mlp_bias=True),
    "falcon-h1": _case(
        "FalconH1",
        **FALCON,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_state=32,
        mamba_n_groups=2,
        head_dim=24,
        ssm_multipliers=[0.7, 0.6, 1.3, 1.6, 0.8],
    ),
    "falcon-h1-normed": _case(
        "FalconH1",
        mamba_d_ssm=None,
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_conv_bias=False,
        ssm_multipliers=[1.25, 0.6, 1.0, 1.25, 1.25],
        tie_word_embeddings=True,
    ),
}
CASES |= {
    name: Case(f"{family}ForCausalLM", f"{family}Config", changes, common=name not in ALONE)
    for name, (family, changes) in LATER.items()
}
CASES |= {
    "olmo-hybrid": _case(
        "OlmoHybrid",
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "olmo-hybrid-rope": _case(
        "OlmoHybrid",
        num_hidden_layers=4,
        layer_types=["full_attention", *["linear_attention"] * 3],
        linear_key_head_dim=16,
        linear_allow_neg_eigval=False,
        linear_conv_kernel_dim=3,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
}
CASES |= {
    name: Case("Gemma4ForCausalLM", "Gemma4TextConfig", changes) for name, changes in GEMMA4.items()
}
PROMPT_SEEDS = {
    "nemotron-h": 1,
    "nemotron-h-moe": 0,
    "qwen2-window": 3,
    "qwen3": 7,
    "gemma2": 7,
    "olmo2": 0,
    "smollm3": 1,
    "cohere": 1,
    "cohere2": 1,
    "exaone4": 1,
    "ministral3": 0,
    "gemma4-mixed": 10,
} | LATER_SEEDS
"""Prompts whose greedy continuation hangs on no rounding; of the others 5 is one."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-long", "olmo2")
FAMILIES += ("smollm3", "gpt2", "gpt-neox", "mixtral", "olmoe", "qwen3-moe", "gpt-oss")
FAMILIES += ("olmo3", "granite", "gemma", "cohere", "cohere2", "glm", "glm4", "starcoder2")
FAMILIES += ("exaone4", "seed-oss", "ernie4_5", "ministral", "ministral3", "phi", "stablelm")
FAMILIES += ("arcee", "hunyuan")
FAMILIES += ("qwen2-moe", "deepseek-v2", "deepseek-v3", "glm4-moe", "glm4-moe-lite")
FAMILIES += ("granite-moe", "granite-moe-shared", *LATER_FAMILIES)
STATED = ("qwen3-next", "qwen3_5", "qwen3_5-moe", "lfm2", "lfm2-moe")
STATED += ("granite-hybrid", "granite-hybrid-moe", "bamba", "nemotron-h")
STATED += ("nemotron-h-moe", "falcon-h1", "falcon-h1-normed", "olmo-hybrid", "olmo-hybrid-rope")
STATED += ("nemotron-h-latent",)
"""Those whose layers have states."""
DIVISIBLE = [name for name in CASES if name not in (*STATED, *GEMMA4)]
"""Those that ranks can share."""
FAMILIES += (*STATED, *GEMMA4)
ALIKE = ("llama", "qwen2", "smollm3", "olmoe", "olmo3", "gemma", "cohere", "glm", "seed-oss")
ALIKE += ("ministral", "ministral3", "exaone4", "granite-moe", "granite-moe-shared", "bamba")
ALIKE += LATER_ALIKE
"""Families whose operators others call with the same choices: mistral, qwen3, qwen3-moe, olmo2,
gemma2, cohere2, glm4, granite-hybrid, and gpt-oss and granite together.
"""


def each_kind(names: Iterable[str] = FAMILIES) -> list[Any]:
    """Families, of which those that are like others are for slow runs."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=slow if name in ALIKE else ()) for name in names]


def make_model(case: Case, seed: int = 0) -> Any:
    """A transformers model in float32 with random weights, norms and biases that matter."""
    config = case.make_config()
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model)(config).eval()
    random = torch.Generator().manual_seed(seed)
    gemma, fourth = "Gemma" in case.model, "Gemma4" in case.model
    more = ("Qwen3Next", "Qwen3_5", "NemotronFor")
    plus_one = any(name in case.model for name in more)
    offset = plus_one or (gemma and not fourth)  # 1 is added to norms
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if name.endswith("weight") and ("norm" in name or ".ln_" in name):
                after_block = gemma and "post_" in name  # or its large embeddings drown the layers
                added = offset and "linear_attn" not in name
                parameter.copy_(0.3 * noise + (2.0 if after_block else 0.0 if added else 1.0))
                if fourth and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.copy_(0.3 * parameter)  # its scores aren't divided by anything
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith("A_log"):  # from hardly any to half a token's memory
                parameter.copy_(noise - 1.5)
            elif name.endswith((".mamba.D", ".mixer.D")):
                parameter.copy_(1.0 + noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
                parameter.copy_(0.25 * noise)
            else:
                inputs = parameter.shape[0 if "GPT2" in case.model else -1]
                parameter.copy_(noise / inputs**0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=random))
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.9 + 0.2 * torch.randn(buffer.shape, generator=random))
    return model


@dataclass
class Tiny:
    """A checkpoint on disk, and transformers' model of it."""

    case: Case
    folder: Path
    oracle: Any
    prompt: Tensor  # [PROMPT]
    loaded: dict[str, LoadedModel] = field(default_factory=dict)

    def load(self, dtype: str = "float32") -> LoadedModel:
        if dtype not in self.loaded:
            self.loaded[dtype] = load_model(
                self.folder, dtype=dtype, max_model_len=self.case.max_len, strict=True
            )
        return self.loaded[dtype]

    def expect(self, tokens: Tensor) -> Tensor:
        """transformers' logits after each of `tokens`, [T, V] float32."""
        with torch.inference_mode():
            logits: Tensor = self.oracle(tokens[None]).logits[0]
        return logits.clone()


def make_tiny(name: str, folder: Path) -> Tiny:
    """Save a checkpoint of the case called `name`."""
    case = CASES[name]
    model = make_model(case)
    model.save_pretrained(folder)
    random = torch.Generator().manual_seed(PROMPT_SEEDS.get(name, 5))
    return Tiny(case, folder, model, torch.randint(3, 320, (PROMPT,), generator=random))


def makes_once(factory: pytest.TempPathFactory) -> Make:
    """Makes tiny checkpoints by name, each once."""
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = make_tiny(name, factory.mktemp(name))
        return made[name]

    return get


def make_cache(spec: DecoderSpec, dtype: torch.dtype) -> KV:
    """Paged caches of len(TABLE) + 1 blocks, a pair a layer (`ops.rotary_cache`) or, of latents,
    one (`ops.mla`)."""
    v, kv = vnni_factor(dtype), []
    for layer in spec.layers:
        if layer.attention.reads is not None:
            kv.append(())
            continue
        if (shapes := layer.attention.state_shapes) is not None:
            state, inputs = shapes
            kv.append(StateCache(torch.zeros((2, *state)), torch.zeros((2, *inputs), dtype=dtype)))
            continue
        heads, dim = layer.attention.cached
        if layer.attention.is_absent:
            kv.append(())
            continue
        width, blocks = round_up(dim, 16), len(TABLE) + 1
        key = (blocks, heads, BLOCK // COLUMNS, width // v, COLUMNS, v)
        value = (blocks, heads, width // COLUMNS, BLOCK // v, COLUMNS, v)
        shapes = [key] if layer.attention.latent else [key, value]
        kv.append(tuple(torch.zeros(shape, dtype=dtype) for shape in shapes))
    return kv


class Sequence:
    """One sequence that grows in a paged cache."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.length, self.slot = model, 0, 0
        self.kv = make_cache(model.spec, model.dtype)

    def feed(self, tokens: Tensor) -> Tensor:
        """Logits after each of `tokens`, [T, V]."""
        count, table = len(tokens), torch.tensor(TABLE, dtype=torch.int32)
        at = torch.arange(self.length, self.length + count, dtype=torch.int32)
        self.length += count
        make, more = Step, {}
        if any(isinstance(layer, StateCache) for layer in self.kv):
            self.slot, before = 1 - self.slot, self.slot if self.length > count else -1
            states = torch.tensor([before], dtype=torch.int32)
            kept = torch.tensor([[count - 1, self.slot]], dtype=torch.int32)
            make, more = StatefulStep, {"states": states, "kept": kept}
        step = make(
            tokens=tokens.to(torch.int32),
            positions=at,
            slots=table[at // BLOCK] * BLOCK + at % BLOCK,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_len=torch.tensor([self.length], dtype=torch.int32),
            block_table=table[None],
            sample_at=torch.arange(count, dtype=torch.int32),
            **more,
        )
        with torch.inference_mode():
            return self.model(step, self.kv)


Make = Callable[[str], Tiny]
