"""What `config.json` and `generation_config.json` would say, from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.errors import UnsupportedModelError, WeightsError, nearest
from penstock.models.gguf.architectures import ARCHITECTURES
from penstock.models.gguf.container import Container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.projector import ARCHITECTURE as PROJECTOR

_REFUSED = {
    "expert_count": ("num_local_experts", 0),
    "logit_scale": ("logit_scale", 1.0),
    "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "attention.clamp_kqv": ("clip_qkv", 0.0),
    "attention.max_alibi_bias": ("alibi", 0.0),
}
"""Keys that any architecture may carry: what config.json calls them (which refuses them) and the
value, beside 0, that asks for nothing."""

_SAID = {
    "expert_count": ("n_routed_experts", "top_k_experts"),
    "logit_scale": ("logits_scaling",),
}
"""Names beside which some families say those in a way of their own."""

_MODEL_TYPES = {
    "CohereForCausalLM": "cohere",
    "Olmo3ForCausalLM": "olmo3",
    "PhiForCausalLM": "phi",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "GPTNeoXForCausalLM": "gpt_neox",
    "BambaForCausalLM": "bamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "NemotronHForCausalLM": "nemotron_h",
    "Ministral3ForCausalLM": "ministral3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
"""Where `config.json` says another `model_type` than GGUF's architecture."""

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_STOPS = ("eos", "eot", "eom")
_STOP_NAMES = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|>".split()
)
"""Control tokens that end a text whatever the ids say, as in llama.cpp."""
_GEMMA4 = _STOP_NAMES | {"<eos>", "<turn|>", "<|tool_response>"}
"""The same of a `gemma4` vocabulary, which calls some of them a user's own."""
_CONTROL, _USER = 3, 4  # tokenizer.ggml.token_type

CHUNK = 1 << 24
"""Bytes of two tensors that are compared at once."""


def read_gguf_config(container: Container) -> dict[str, Any]:
    """`config.json` of a file, for the reader of its family.

    Keys of the architecture that nothing reads stand in it by their own names, where the reader
    names them.
    """
    m = Metadata(container.metadata, str(container.path))
    if m.architecture == PROJECTOR:
        raise UnsupportedModelError(
            f"{container.path} is a projector of pictures, no model: give the language model's "
            f"file, and this one beside it as mmproj={container.path.name!r} (--mmproj)."
        )
    if m.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{container.path} holds the architecture {m.architecture!r}, which isn't built."
            f"{nearest(m.architecture, ARCHITECTURES)} Built: {', '.join(ARCHITECTURES)}."
        )
    vocab_size = _vocab_size(m, container)
    config = ARCHITECTURES[m.architecture].read_config(m, container)
    (architecture,) = config["architectures"]
    config["model_type"] = _MODEL_TYPES.get(architecture, m.architecture)
    config["vocab_size"] = vocab_size
    config["tie_word_embeddings"] = is_tied(container)
    config["dtype"] = str(main_dtype(container)).removeprefix("torch.")
    config |= _special_tokens(m)
    for theirs, (ours, off) in _REFUSED.items():
        value = m.get(m.own(theirs), off)
        said = any(name in config for name in _SAID.get(theirs, ()))
        if value not in (0, off) and not said:
            config[ours] = value
    if "num_local_experts" not in config:
        m.get(m.own("expert_used_count"))
    config.setdefault("use_bidirectional_attention", not m.flag(m.own("attention.causal"), True))
    return config | m.unread()


def generation_config(container: Container) -> dict[str, Any]:
    """Sampling that the file recommends, by the names of `generation_config.json`."""
    found = {
        ours: container.metadata.get(f"general.sampling.{theirs}")
        for theirs, ours in _SAMPLING.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def main_dtype(container: Container) -> torch.dtype:
    """What most of the values are stored in; bfloat16 where they are quantized."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in container.tensors.values():
        dtype = tensor.block.plain or torch.bfloat16
        values = tensor.nbytes // tensor.block.nbytes * tensor.block.values
        sizes[dtype] = sizes.get(dtype, 0) + values
    if not sizes:
        raise WeightsError(f"{container.path} has no tensors: it holds a vocabulary alone.")
    return max(sizes, key=lambda dtype: sizes[dtype])


def is_tied(container: Container) -> bool:
    """Whether the head is the embedding: it is missing, or the same byte for byte."""
    head, table = (container.tensors.get(f"{name}.weight") for name in ("output", "token_embd"))
    if head is None or table is None:
        return head is None
    if head.block is not table.block or head.shape != table.shape:
        return False
    return all(
        np.array_equal(head.data[at : at + CHUNK], table.data[at : at + CHUNK])
        for at in range(0, head.nbytes, CHUNK)
    )


def _vocab_size(m: Metadata, container: Container) -> int:
    table = container.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise WeightsError(f"{container.path} has no token_embd.weight [vocabulary, embedding].")
    given = m.integer(m.own("vocab_size"), table.shape[0])
    if given != table.shape[0]:
        raise WeightsError(
            f"{container.path}: {m.own('vocab_size')} is {given}, but token_embd.weight has "
            f"{table.shape[0]} rows."
        )
    return table.shape[0]


def _special_tokens(m: Metadata) -> dict[str, Any]:
    """`bos_token_id`, `pad_token_id`, and as `eos_token_id` everything that ends a text."""
    *stops, bos, padding = (_token_id(m, name) for name in (*_STOPS, "bos", "padding"))
    tokens, types = (m.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        gemma4 = m.get("tokenizer.ggml.model") == "gemma4"
        kinds, names = ((_CONTROL, _USER), _GEMMA4) if gemma4 else ((_CONTROL,), _STOP_NAMES)
        pairs = enumerate(zip(tokens, types, strict=False))
        stops += [i for i, (token, kind) in pairs if kind in kinds and _is_stop(token, names)]
    return {
        "bos_token_id": bos,
        "pad_token_id": padding,
        "eos_token_id": list(dict.fromkeys(stop for stop in stops if stop is not None)),
    }


def _is_stop(token: Any, names: frozenset[str]) -> bool:
    return isinstance(token, str) and token in names


def _token_id(m: Metadata, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return None if m.get(key) is None else m.integer(key)
