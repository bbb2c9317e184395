"""Write a random-weight Hugging Face checkpoint of a known shape, to measure speed on.

    python benchmarks/make_checkpoint.py qwen2.5-0.5b checkpoints/qwen

The folder holds config.json and bfloat16 safetensors in shards, as the hub would give them, and
no tokenizer: `penstock bench` needs none. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STD = 0.02
SHARD_BYTES = 512 << 20

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b-4l": {  # four of its 48 layers; a vocabulary that doesn't outweigh them
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
    },
    "glm-4.7-flash-4l": {  # four of its 47 layers, the first without experts
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.8,
        "scoring_func": "sigmoid",  # as llama.cpp's converter wants it of so few layers
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 256,
        "vocab_size": 32768,
    },
    "granite-4.0-h-1b": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "bos_token_id": 100257,
        "embedding_multiplier": 12,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "logits_scaling": 6,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "num_attention_heads": 12,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "shared_intermediate_size": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "eos_token_id": 7,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "layer_types": [
            "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
        ],
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 65536,
    },
    "qwen3.5-0.8b": {  # its text model
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 248320,
    },
    "tiny": {
        **_QWEN,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of `config`, by its name in the hub's format."""
    hidden = config["hidden_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    rows = {
        "q": config["num_attention_heads"] * dim,
        "k": config["num_key_value_heads"] * dim,
        "v": config["num_key_value_heads"] * dim,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    last = "norm"
    if config["model_type"] == "lfm2":
        norms, last = ["operator_norm", "ffn_norm"], "embedding_norm"
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        if "layer_types" in config:
            shapes |= {f"{layer}{n}": s for n, s in _mixer(config, i).items()}
        elif "kv_lora_rank" in config:
            shapes |= {f"{layer}self_attn.{n}": s for n, s in _latent_attention(config).items()}
        else:
            for name, count in rows.items():
                shapes[f"{layer}self_attn.{name}_proj.weight"] = (count, hidden)
                if config["model_type"] == "qwen2":
                    shapes[f"{layer}self_attn.{name}_proj.bias"] = (count,)
            shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, rows["q"])
        if config["model_type"] == "qwen3_moe":
            shapes[f"{layer}self_attn.q_norm.weight"] = (dim,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (dim,)
        count = config.get("num_experts", config.get("n_routed_experts"))
        if count is not None and i >= config.get("first_k_dense_replace", 0):
            shapes[f"{layer}mlp.gate.weight"] = (count, hidden)
            if config.get("topk_method") == "noaux_tc":
                shapes[f"{layer}mlp.gate.e_score_correction_bias"] = (count,)
        shapes |= {f"{layer}{n}": s for n, s in _feed_forwards(config, i).items()}
        shapes |= {f"{layer}{norm}.weight": (hidden,) for norm in norms}
    shapes[f"model.{last}.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _latent_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """A layer's attention over latents, whose queries are compressed, too."""
    hidden, heads, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    plain, turned, values = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    tight = config["q_lora_rank"]
    return {
        "q_a_proj.weight": (tight, hidden),
        "q_a_layernorm.weight": (tight,),
        "q_b_proj.weight": (heads * (plain + turned), tight),
        "kv_a_proj_with_mqa.weight": (rank + turned, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (plain + values), rank),
        "o_proj.weight": (hidden, heads * values),
    }


def _mixer(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """What a layer of a hybrid mixes its tokens by: attention, or what its kind of state needs."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kind, family = config["layer_types"][layer], config["model_type"]
    if kind == "linear_attention":
        return {f"linear_attn.{n}": s for n, s in _delta_rule(config).items()}
    if kind == "mamba":
        return {f"mamba.{n}": s for n, s in _mamba(config).items()}
    if kind == "conv":
        return {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, 1, config["conv_L_cache"]),
            "conv.out_proj.weight": (hidden, hidden),
        }
    dim, keys = config.get("head_dim", hidden // heads), config["num_key_value_heads"]
    gated = 2 if config.get("attn_output_gate") else 1
    found: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (gated * heads * dim, hidden),
        "k_proj.weight": (keys * dim, hidden),
        "v_proj.weight": (keys * dim, hidden),
        ("out_proj" if family == "lfm2" else "o_proj") + ".weight": (hidden, heads * dim),
    }
    if family != "granitemoehybrid":
        norm = "layernorm" if family == "lfm2" else "norm"
        found |= {f"q_{norm}.weight": (dim,), f"k_{norm}.weight": (dim,)}
    return {f"self_attn.{n}": s for n, s in found.items()}


def _delta_rule(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """A layer's gated delta rule."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    turned = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    return {
        "in_proj_qkv.weight": (turned, hidden),
        "in_proj_z.weight": (values, hidden),
        "in_proj_a.weight": (heads, hidden),
        "in_proj_b.weight": (heads, hidden),
        "conv1d.weight": (turned, 1, config["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }


def _mamba(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """A layer's Mamba 2."""
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    values = heads * config["mamba_d_head"]
    turned = values + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    return {
        "in_proj.weight": (values + turned + heads, hidden),
        "conv1d.weight": (turned, 1, config["mamba_d_conv"]),
        "conv1d.bias": (turned,),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (values,),
        "out_proj.weight": (hidden, values),
    }


def _feed_forwards(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """A layer's feed-forward blocks: one, or each expert's and what they share."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "granitemoehybrid":  # gates and what they gate are one matrix
        width = config["shared_intermediate_size"]
        return {
            "shared_mlp.input_linear.weight": (2 * width, hidden),
            "shared_mlp.output_linear.weight": (hidden, width),
        }
    names = ["gate_proj", "up_proj", "down_proj"]
    blocks = [("mlp", width)]
    count = config.get("num_experts", config.get("n_routed_experts"))
    if config["model_type"] == "lfm2":  # two thirds of what is said, in whole multiples
        step = config["block_multiple_of"]
        names, blocks = ["w1", "w3", "w2"], [("feed_forward", -(-(2 * width // 3) // step) * step)]
    elif count is not None and layer >= config.get("first_k_dense_replace", 0):
        width, shared = config["moe_intermediate_size"], config.get("n_shared_experts", 0)
        blocks = [(f"mlp.experts.{e}", width) for e in range(count)]
        blocks += [("mlp.shared_experts", shared * width)] * bool(shared)
    found: dict[str, tuple[int, ...]] = {}
    for block, wide in blocks:
        shapes = [(wide, hidden), (wide, hidden), (hidden, wide)]
        found |= {f"{block}.{n}.weight": s for n, s in zip(names, shapes, strict=True)}
    return found


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names in groups of at most SHARD_BYTES; a larger tensor has a group of its own."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if group and size + nbytes > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    yield group


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape).normal_(0.0, STD, generator=generator).bfloat16()


def write_checkpoint(shape: str, folder: Path, *, seed: int = 0) -> int:
    """Write the checkpoint of `shape` into `folder`, made if need be; returns its parameters."""
    config = SHAPES[shape]
    shapes = tensor_shapes(config)
    folder.mkdir(parents=True, exist_ok=True)
    groups = list(_shards(shapes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {name: _tensor(name, shapes[name], seed) for name in group}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    count = sum(math.prod(s) for s in shapes.values())
    index = {"metadata": {"total_size": 2 * count}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return count


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        sys.exit(f"error: {arguments.folder} isn't empty.")
    count = write_checkpoint(arguments.shape, arguments.folder, seed=arguments.seed)
    print(f"{arguments.folder}: {count / 1e6:.1f} M random parameters in bfloat16")


if __name__ == "__main__":
    main()
