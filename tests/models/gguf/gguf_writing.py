"""GGUF files made with the `gguf` package of transformers' models, as llama.cpp's converters do.

Names come from the package's own tables, metadata is written by its writer's methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gemma4_writing import back_gemma4, name_gemma4, rope_gemma4, stored_gemma4, write_gemma4
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from test_gguf_blocks import HALVES
from torch import Tensor

from penstock.models.gguf.blocks import BLOCKS

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2VLText": "qwen2vl",
    "Qwen3VLText": "qwen3vl",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeForCausalLM": "glm4moe",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "OlmoeForCausalLM": "olmoe",
    "MixtralForCausalLM": "llama",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Ministral3ForCausalLM": "mistral3",
    "ArceeForCausalLM": "arcee",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Dots1ForCausalLM": "dots1",
    "NemotronForCausalLM": "nemotron",
    "OlmoForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "BambaForCausalLM": "granitehybrid",
    "FalconH1ForCausalLM": "falcon-h1",
    "NemotronHForCausalLM": "nemotron_h",
    "GemmaForCausalLM": "gemma",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "Glm4ForCausalLM": "glm4",
    "Starcoder2ForCausalLM": "starcoder2",
    "Exaone4ForCausalLM": "exaone4",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "StableLmForCausalLM": "stablelm",
    "PhiForCausalLM": "phi2",
    "SmolLM3ForCausalLM": "smollm3",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gptneox",
}
HYBRID = ("qwen3next", "qwen35", "qwen35moe")
Floats = NDArray[np.float32]
Choose = Callable[[str, Floats], Kind]
Vocab = Callable[[gguf.GGUFWriter, int], None]


def write_vocab(writer: gguf.GGUFWriter, size: int) -> None:
    """A SentencePiece vocabulary: <unk> <s> </s>, the bytes, some letters, then unused rows."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefgh"]
    tokens = [*tokens, "▁a", "ab", "▁ab"][:size]
    kinds = [2, 3, 3, *[6] * 256]
    kinds += [1] * (len(tokens) - len(kinds))
    more = size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(more))])
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types([*kinds, *[5] * more])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)


def write_model(
    model: Any, path: Path, choose: Choose, *, vocab: Vocab | None = write_vocab,
    heads_apart: bool = True, guesses: int = 0, **parts: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Write `model` with tensors in the types that `choose` names by (GGUF name, values).

    Returns the checkpoint's tensors as they are after a round trip through those types.
    heads_apart: of latents, and a delta rule's projections, as they are written today. guesses:
    layers behind the last one, which only say so. parts: the writer's own splitting.
    """
    config = model.config
    name = ARCHITECTURES[type(model).__name__]
    if name == "nemotron_h" and "moe" in config.layers_block_type:
        name = "nemotron_h_moe"
    writer = gguf.GGUFWriter(str(path), name, **parts)
    write_config(writer, config, name, heads_apart, guesses)
    if vocab is not None:
        vocab(writer, config.vocab_size)
    back = write_tensors(writer, model, name, choose, heads_apart)
    for i in range(guesses):
        for part in ("nextn.eh_proj", "nextn.enorm", "ffn_norm", "attn_output"):
            layer = config.num_hidden_layers + i
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def write_config(
    writer: gguf.GGUFWriter, c: Any, arch: str, heads_apart: bool = True, guesses: int = 0
) -> None:
    rope = getattr(c, "rope_parameters", None) or {}
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers + guesses)
    if guesses:
        writer.add_nextn_predict_layers(guesses)
    writer.add_head_count(c.num_attention_heads)
    if "nemotron_h" in arch:
        write_nemotron(writer, c, guesses)
        return
    if arch == "gemma4":
        write_gemma4(writer, c)
        return
    if arch == "gpt2":
        writer.add_feed_forward_length(c.n_inner or 4 * c.n_embd)
        writer.add_layer_norm_eps(c.layer_norm_epsilon)
        return
    if arch == "lfm2":
        writer.add_feed_forward_length(
            c.block_multiple_of * -(-(2 * c.intermediate_size // 3) // c.block_multiple_of)
        )
    elif hasattr(c, "intermediate_size"):
        writer.add_feed_forward_length(c.intermediate_size)
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if arch == "gptneox":
        writer.add_layer_norm_eps(c.layer_norm_eps)
        writer.add_rope_dimension_count(int(dim * rope["partial_rotary_factor"]))
        writer.add_parallel_residual(c.use_parallel_residual)
        return
    if hasattr(c, "rms_norm_eps") or "lfm2" in arch:
        writer.add_layer_norm_rms_eps(c.norm_eps if "lfm2" in arch else c.rms_norm_eps)
    else:
        own = {"starcoder2": "norm_epsilon", "nemotron": "norm_eps"}
        eps = 1e-5 if arch == "olmo" else getattr(c, own.get(arch, "layer_norm_eps"))
        writer.add_layer_norm_eps(eps)
    if arch == "deepseek2":
        write_latents(writer, c, heads_apart)
    else:
        writer.add_head_count_kv(kv_heads(c))
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if arch == "llama":
        writer.add_vocab_size(c.vocab_size)
    everywhere = rope.get("full_attention", rope)
    stretched = everywhere.get("alpha", 1.0) ** (dim / (dim - 2))
    writer.add_rope_freq_base(everywhere["rope_theta"] * stretched)
    writer.add_rope_dimension_count(int(dim * everywhere.get("partial_rotary_factor", 1.0)))
    kind = everywhere.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(everywhere["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(everywhere["original_max_position_embeddings"])
    if arch in ("qwen2vl", "qwen3vl"):
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if arch == "qwen3vl":
        writer.add_num_deepstack_layers(c.deep)
    if arch == "phi3":
        writer.add_sliding_window(c.sliding_window or 0)
        original = getattr(c, "original_max_position_embeddings", None)
        writer.add_rope_scaling_orig_ctx_len(original or c.max_position_embeddings)
        if kind == "longrope":
            ratio = c.max_position_embeddings / original
            factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
            writer.add_rope_scaling_attn_factors(factor)
    elif arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(c.sliding_window)
        if c.final_logit_softcapping:
            writer.add_final_logit_softcapping(c.final_logit_softcapping)
        if c.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
        writer.add_attention_scale(c.query_pre_attn_scalar**-0.5)
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in c.layer_types])
        if arch == "gemma3":
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    elif arch in ("olmo2", "exaone4") and getattr(c, "sliding_window", None):
        writer.add_sliding_window(c.sliding_window)
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in c.layer_types])
    elif getattr(c, "sliding_window", None) and c.model_type in ("mistral", "mixtral", "cohere2"):
        writer.add_sliding_window(c.sliding_window)
    if arch == "granite":  # a Granite 4 without states says all this of what it hasn't
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(256)
        writer.add_ssm_group_count(1)
        writer.add_ssm_inner_size(2 * c.hidden_size)
        writer.add_ssm_time_step_rank(128)
        writer.add_expert_shared_feed_forward_length(c.intermediate_size)
        writer.add_expert_used_count(0)
    if "granite" in c.model_type:
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_logit_scale(c.logits_scaling)
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(c.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch == "stablelm":
        writer.add_parallel_residual(c.use_parallel_residual)
    experts = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
    if arch in ("deepseek2", "glm4moe", "dots1"):
        write_router(writer, c)
    if arch == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(c.moe_layer_interval)
        writer.add_leading_dense_block_count(c.moe_layer_start_index)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        writer.add_expert_shared_count(c.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(c.intermediate_size // c.num_key_value_heads)
    if arch == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch in ("minimax-m2", "hunyuan-moe"):
        writer.add_expert_feed_forward_length(c.intermediate_size)
    if arch == "hunyuan-moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(c.intermediate_size)
    if arch == "gpt-oss":
        writer.add_sliding_window(c.sliding_window)
    if arch in HYBRID:
        write_delta(writer, c, arch, guesses)
    if arch in ("qwen2moe", "qwen35moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if arch in ("granitehybrid", "falcon-h1"):
        write_mamba(writer, c)
    if getattr(c, "shared_intermediate_size", 0) and experts:
        writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)
    if "lfm2" in arch:
        writer.add_shortconv_l_cache(c.conv_L_cache)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(c.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(c.routed_scaling_factor)
    if arch in ("qwen2moe", "qwen3moe", "gpt-oss", "qwen35moe", "qwen3next", "lfm2moe"):
        inner = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
        writer.add_expert_feed_forward_length(inner)


def kv_heads(c: Any) -> Any:
    """Of all layers, or 0 of each that has a convolution or Mamba 2 instead."""
    if c.model_type == "bamba":
        count = range(c.num_hidden_layers)
        return [c.num_key_value_heads * (i in c.attn_layer_indices) for i in count]
    types = getattr(c, "layer_types", None) or []
    instead = "linear_attention" if c.model_type == "granitemoehybrid" else "conv"
    if instead not in types:
        return c.num_key_value_heads
    return [0 if kind == instead else c.num_key_value_heads for kind in types]


def write_mamba(writer: gguf.GGUFWriter, c: Any) -> None:
    """Sizes of Mamba 2, and whether heads turn where layers attend."""
    writer.add_ssm_conv_kernel(c.mamba_d_conv)
    writer.add_ssm_state_size(c.mamba_d_state)
    writer.add_ssm_group_count(c.mamba_n_groups)
    writer.add_ssm_inner_size(c.mamba_n_heads * c.mamba_d_head)
    writer.add_ssm_time_step_rank(c.mamba_n_heads)
    if c.model_type == "falcon_h1":
        return
    turns = c.model_type == "bamba" or c.position_embedding_type == "rope"
    writer.add_rope_scaling_finetuned(turns)
    if not getattr(c, "num_local_experts", 1):
        writer.add_expert_count(0)
        writer.add_expert_used_count(c.num_experts_per_tok)


def write_nemotron(writer: gguf.GGUFWriter, c: Any, guesses: int) -> None:
    """Sizes of what blocks may be; which is which shows in the tensors. What guesses is both."""
    mixed, kinds = "moe" in c.layers_block_type, c.layers_block_type + ["both"] * guesses
    writer.add_layer_norm_eps(c.layer_norm_epsilon)
    attend = ("full_attention", "both")
    writer.add_head_count_kv([c.num_key_value_heads * (x in attend) for x in kinds])
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    inner = c.moe_intermediate_size if mixed else c.intermediate_size
    writer.add_feed_forward_length([inner * (x in ("mlp", "moe", "both")) for x in kinds])
    writer.add_ssm_conv_kernel(c.conv_kernel)
    writer.add_ssm_state_size(c.ssm_state_size)
    writer.add_ssm_group_count(c.n_groups)
    writer.add_ssm_inner_size(c.mamba_num_heads * c.mamba_head_dim)
    writer.add_ssm_time_step_rank(c.mamba_num_heads)
    writer.add_rope_dimension_count(c.head_dim)
    if mixed:
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(c.moe_shared_expert_intermediate_size)
        writer.add_expert_count(c.n_routed_experts)
        writer.add_expert_shared_count(c.n_shared_experts)
        writer.add_expert_weights_norm(c.norm_topk_prob)
        writer.add_expert_weights_scale(c.routed_scaling_factor)
        writer.add_expert_group_count(c.n_group)
        if c.moe_latent_size is not None:
            writer.add_moe_latent_size(c.moe_latent_size)


def write_delta(writer: gguf.GGUFWriter, c: Any, arch: str, guesses: int) -> None:
    """Sizes of a delta rule, and which layers have it."""
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_value_head_dim * c.linear_num_value_heads)
    types = [kind == "linear_attention" for kind in c.layer_types]
    writer.add_full_attention_interval(4)
    if types != [(i + 1) % 4 != 0 for i in range(len(types))]:  # first files never say it
        writer.add_array(f"{arch}.attention.recurrent_layers", types + [False] * guesses)
    if arch != "qwen3next":
        sections = c.rope_parameters.get("mrope_section", [11, 11, 10])
        writer.add_rope_dimension_sections([*sections, 0])


def write_latents(writer: gguf.GGUFWriter, c: Any, heads_apart: bool) -> None:
    """One head of keys that are latents, and what heads have of those; once, heads alone."""
    lengths = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    if heads_apart:
        writer.add_head_count_kv(1)
        writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
        writer.add_value_length(c.kv_lora_rank)
        writer.add_key_length_mla(lengths[0])
        writer.add_value_length_mla(lengths[1])
    else:
        writer.add_head_count_kv(c.num_attention_heads)
        writer.add_key_length(lengths[0])
        writer.add_value_length(lengths[1])
    writer.add_kv_lora_rank(c.kv_lora_rank)
    if c.q_lora_rank is not None:
        writer.add_q_lora_rank(c.q_lora_rank)
    sharp = c.rope_parameters.get("mscale_all_dim")
    if sharp is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * sharp)


def write_router(writer: gguf.GGUFWriter, c: Any) -> None:
    """How experts are chosen; layers behind the last one aren't written."""
    v2 = c.model_type == "deepseek_v2"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SOFTMAX if v2 else kinds.SIGMOID)
    writer.add_leading_dense_block_count(getattr(c, "first_k_dense_replace", 1))
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    if c.norm_topk_prob and not v2:
        writer.add_expert_weights_norm(True)
    if c.n_group is not None:
        writer.add_expert_group_count(c.n_group)
        writer.add_expert_group_used_count(c.topk_group)


def write_tensors(
    writer: gguf.GGUFWriter, model: Any, arch: str, choose: Choose, heads_apart: bool = True
) -> dict[str, Tensor]:
    c = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], c.num_hidden_layers)
    back = {}
    for name, tensor in _as_stored(model, heads_apart).items():
        if c.tie_word_embeddings and name in ("lm_head.weight", "embed_out.weight"):
            continue
        if name.endswith("e_score_correction_bias"):
            name = name.replace("_bias", ".bias")
        name = name.replace(".expert_bias", ".expert_bias.bias")
        name = name.replace("dt_bias", "dt_proj.bias")
        ends = (".weight", ".bias")
        known = _as_mapped(name, c)
        there = names.get_name(known, ends) or names.get_name(known.removeprefix("model."), ends)
        there = there or name_gemma4(name)
        assert there is not None, name
        forward, backward = _conversion(c, arch, name)
        values = forward(tensor.float()).numpy()
        kind = choose(there, values)
        data = quantize(values, kind)
        writer.add_tensor(there, data, raw_dtype=kind)
        stored = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        name = name.replace("e_score_correction.bias", "e_score_correction_bias")
        name = name.replace(".expert_bias.bias", ".expert_bias")
        name = name.replace("dt_proj.bias", "dt_bias")
        back |= _by_expert(name, backward(stored.view(values.shape)).contiguous())
    return _joined_heads(back, c) | _rope_of(writer, c)


def _as_mapped(name: str, c: Any) -> str:
    """A name of Granite's, or of Nemotron's experts, as the package's table knows it."""
    if c.model_type == "nemotron_h" and ".experts." in name:
        return name.replace("backbone.", "model.").replace("mixer.", "mlp.")
    name = name.replace("mlp.gate.moe_statics", "mlp.moe_statics")
    if "granite" not in c.model_type:
        return name
    block = "mlp.shared_expert" if getattr(c, "num_local_experts", 0) else "mlp"
    name = name.replace("block_sparse_moe.router", "mlp.gate").replace("shared_mlp", block)
    return name.replace("block_sparse_moe.experts", "mlp.experts")


def _rope_of(writer: gguf.GGUFWriter, c: Any) -> dict[str, Tensor]:
    """Writes what divides frequencies, which no checkpoint has."""
    for name, divisors in rope_tensors(c).items():
        writer.add_tensor(name, divisors)
    return {}


def _joined_heads(back: dict[str, Tensor], c: Any) -> dict[str, Tensor]:
    """With the keys' and the values' matrices of heads in one again, and the projections."""
    for name in [name for name in back if "qwen3_next" in c.model_type and "proj_qkv.w" in name]:
        qkv, z = back.pop(name), back.pop(name.replace("proj_qkv", "proj_z"))
        keys = c.linear_num_key_heads
        whole = keys * c.linear_key_head_dim
        parts = (*qkv.split((whole, whole, len(z))), z)
        rows = torch.cat([part.unflatten(0, (keys, -1)) for part in parts], 1).flatten(0, 1)
        back[name.replace("proj_qkv", "proj_qkvz")] = rows.contiguous()
    if c.model_type == "gemma4_text":
        return back_gemma4(back)
    granite = "granite" in c.model_type
    for name in [name for name in back if granite and "shared_mlp.gate_proj" in name]:
        parts = back.pop(name), back.pop(name.replace("gate_proj", "up_proj"))
        back[name.replace("gate_proj", "input_linear")] = torch.cat(parts)
        down = back.pop(name.replace("gate_proj", "down_proj"))
        back[name.replace("gate_proj", "output_linear")] = down
    for name in [name for name in back if "k_b_proj" in name]:
        keys, values = back.pop(name), back.pop(name.replace("k_b_proj", "v_b_proj"))
        heads = torch.cat((keys.transpose(1, 2), values), 1)
        back[name.replace("k_b_proj", "kv_b_proj")] = heads.flatten(0, 1).contiguous()
    return back


def _as_stored(model: Any, heads_apart: bool) -> dict[str, Tensor]:
    """The tensors as a converter meets them: gate and up apart, under the names of the Hub."""
    found: dict[str, Tensor] = {}
    if model.config.model_type == "gemma4_text":
        return stored_gemma4(model)
    for name, tensor in model.state_dict().items():
        oss, last = model.config.model_type == "gpt_oss", "weight"
        if ".experts." in name and name.endswith("_bias"):
            name, last = name.removesuffix("_bias"), "bias"
        elif ".experts." in name and oss:
            tensor = tensor.transpose(1, 2)
        if model.config.model_type == "nemotron_h":
            name = name.replace("model.", "backbone.")
            last_of = ".weight" if name.endswith(("experts.up_proj", "experts.down_proj")) else ""
            found[name + last_of] = tensor
        elif name.endswith("experts.gate_up_proj"):
            gate, up = (tensor[:, i::2] for i in (0, 1)) if oss else tensor.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.{last}": gate, f"{stem}up_proj.{last}": up}
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2)
            at = name.removesuffix("input_linear.weight")
            found |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        elif name.endswith("shared_mlp.output_linear.weight"):
            found[name.replace("output_linear", "down_proj")] = tensor
        elif name.endswith("experts.down_proj"):
            found[f"{name}.{last}"] = tensor
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = tensor
        elif name.endswith("in_proj_qkvz.weight") and heads_apart:
            found |= _projections(name, tensor, model.config)
        elif name.endswith("kv_b_proj.weight") and heads_apart:
            c = model.config
            heads = tensor.unflatten(0, (c.num_attention_heads, -1))
            keys, values = heads.split((c.qk_nope_head_dim, c.v_head_dim), 1)
            at = name.removesuffix("kv_b_proj.weight")
            found |= {
                f"{at}k_b_proj.weight": keys.transpose(1, 2).contiguous(),
                f"{at}v_b_proj.weight": values.contiguous(),
            }
        else:
            found[name] = tensor
    if type(model).__name__ not in ("MixtralForCausalLM", "Lfm2MoeForCausalLM"):
        return found
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    as_named = {}
    for name, tensor in found.items():
        for theirs, ours in renamed.items():
            name = name.replace(f"experts.{theirs}", f"experts.{ours}")
        as_named[name.replace(".mlp.", ".block_sparse_moe.")] = tensor
    return as_named


def _projections(name: str, tensor: Tensor, c: Any) -> dict[str, Tensor]:
    """Of all heads' queries, keys and values, and of what gates them, from each key head's."""
    keys, dim = c.linear_num_key_heads, c.linear_key_head_dim
    own = c.linear_num_value_heads // keys * c.linear_value_head_dim
    parts = tensor.unflatten(0, (keys, -1)).split((dim, dim, own, own), 1)
    *qkv, z = (part.flatten(0, 1) for part in parts)
    return {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor as a checkpoint has it: each expert's matrix by itself."""
    if ".experts." not in name:
        return {name: tensor}
    before, after = name.split(".experts.")
    return {f"{before}.experts.{e}.{after}": own.clone() for e, own in enumerate(tensor)}


def quantize(values: Floats, kind: Kind) -> NDArray[Any]:
    """By the package where it can, else random codes: what counts is what they are read as."""
    block = BLOCKS[kind]
    try:
        return gguf.quants.quantize(np.ascontiguousarray(values), kind)
    except NotImplementedError:
        random = np.random.default_rng(values.size)
        raw = random.integers(0, 256, (values.size // block.values, block.nbytes), dtype=np.uint8)
        spread = float(values.std()) / {"Q6_K": 2000, "IQ4_XS": 1000, "IQ4_NL": 60}.get(
            block.name, 200
        )
        for at in HALVES[block.name]:
            half = random.normal(0, spread, (len(raw), 1)).astype(np.float16)
            raw[:, at : at + 2] = half.view(np.uint8)
        return raw.reshape(*values.shape[:-1], -1)


def _conversion(
    c: Any, arch: str, name: str
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(what a converter does to a tensor, how a reader undoes it)."""
    heads = c.num_attention_heads
    granite = "granite" in arch or "nemotron_h" in arch
    if (granite or arch in ("llama", "smollm3", "mistral3", "arcee", "olmo")) and (
        "q_proj" in name or "k_proj" in name
    ):
        count = heads if "q_proj" in name else c.num_key_value_heads
        return (
            lambda t: t.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2),
            lambda t: t.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2),
        )
    if name.endswith(("mamba.A_log", "mixer.A_log")):
        return lambda t: -t.exp()[:, None], lambda t: t[:, 0].neg().log()
    if name.endswith(("mamba.D", "mixer.D")):
        return lambda t: t[:, None], lambda t: t[:, 0]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = c.n_groups if "mixer" in name else c.mamba_n_groups
        return lambda t: t.view(groups, -1), lambda t: t.flatten()
    if name.endswith(("conv.conv.weight", "mamba.conv1d.weight", "mixer.conv1d.weight")):
        return lambda t: t.squeeze(1), lambda t: t.unsqueeze(1)
    if arch in HYBRID and "linear_attn" in name:
        return _delta_conversion(c, arch, name)
    if arch in ("gemma", "gemma2", "gemma3", "nemotron", *HYBRID) and name.endswith("norm.weight"):
        return lambda t: t + 1, lambda t: t - 1
    if arch == "gpt2" and any(p in name for p in ("c_attn.w", "c_proj.w", "c_fc.w")):
        return lambda t: t.t(), lambda t: t.t()
    if arch == "gptneox" and "query_key_value" in name:
        return (
            lambda t: t.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2),
            lambda t: t.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),
        )
    return lambda t: t, lambda t: t


def _delta_conversion(
    c: Any, arch: str, name: str
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Value heads in turns, but for Qwen3-Next; rates as they are, convolutions [C, W]."""
    keys, each = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads

    def tiled(back: bool, t: Tensor) -> Tensor:
        if arch == "qwen3next" or name.endswith("linear_attn.norm.weight"):
            return t
        at = 1 if "out_proj" in name else 0
        first = 2 * keys * c.linear_key_head_dim if "_qkv" in name or "conv" in name else 0
        shape = (each, keys, -1) if back else (keys, each, -1)
        kept, moved = t.split((first, t.shape[at] - first), at)
        moved = moved.unflatten(at, shape).transpose(at, at + 1).flatten(at, at + 2)
        return torch.cat((kept, moved), at).contiguous()

    if name.endswith("A_log"):
        return lambda t: -tiled(False, t).exp(), lambda t: tiled(True, t).neg().log()
    if "conv1d" in name:
        return lambda t: tiled(False, t.squeeze(1)), lambda t: tiled(True, t).unsqueeze(1)
    return lambda t: tiled(False, t), lambda t: tiled(True, t)


def rope_tensors(c: Any) -> dict[str, Floats]:
    """Divisors of the frequencies: Llama 3.1's by its own formula, Phi 3's as they are given."""
    if c.model_type == "gemma4_text":
        return rope_gemma4(c)
    rope = getattr(c, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        lists = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {f"rope_factors_{n}.weight": np.array(v, np.float32) for n, v in lists.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    freqs = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    low, high, old = (
        rope[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    divisors = []
    for wavelength in (2 * math.pi / freqs).tolist():
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def scores_of(model: dict[str, Any]) -> list[float]:
    """Of each piece, minus the place of the first merge that makes it."""
    first: dict[str, int] = {}
    for place, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        first.setdefault(left + right, place)
    scores = {i: -float(first.get(token, 0)) for token, i in model["vocab"].items()}
    return [scores[i] for i in range(len(scores))]


def types_of(tokens: list[str]) -> list[int]:
    kinds = [2, 3, 3, *[6] * 256]
    return [*kinds, *[1] * (len(tokens) - len(kinds))]
