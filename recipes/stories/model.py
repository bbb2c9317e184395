"""The model's shape, and its export to the Hugging Face layout that every engine reads."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512


def shape(vocab_size: int, hidden_size: int = 256, num_layers: int = 6) -> dict[str, Any]:
    """config.json of a Llama: head_dim 32, two query heads to a key/value head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 11 // 4,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 64,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def build(config: dict[str, Any], seed: int = 0) -> LlamaForCausalLM:
    """A freshly initialised float32 model of that shape."""
    torch.manual_seed(seed)
    fields = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    return LlamaForCausalLM(LlamaConfig(**fields | {"use_cache": False, "dtype": "float32"}))


def export(model: LlamaForCausalLM, config: dict[str, Any], folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors in bfloat16.

    The weights go to a temporary name first, so an interrupted run leaves the previous file.
    """
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to model.embed_tokens.weight
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    generation = {
        "bos_token_id": 0,
        "eos_token_id": [0, 2],  # <|endoftext|> and <|im_end|>
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Two-space indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")
