"""What llama.cpp's converter makes of a Gemma 4: metadata, tensors' names, divisors of angles."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

UNMAPPED = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_proj.weight": "ffn_gate_exps.weight",
    "experts.up_proj.weight": "ffn_up_exps.weight",
}
"""Names that the package's table of this architecture hasn't."""


def write_gemma4(writer: gguf.GGUFWriter, c: Any) -> None:
    """Both kinds of layers' sizes; c: the model's config."""
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    own = [c.per_layer_config[i] for i in range(c.num_hidden_layers)]
    whole, local = (own[slides.index(which)].head_dim for which in (False, True))
    wide = [
        c.intermediate_size * (2 if c.use_double_wide_mlp and mode == "reuse" else 1)
        for mode in c.kv_sharing_modes
    ]
    heads = [layer.num_key_value_heads for layer in own]
    writer.add_feed_forward_length(wide if c.use_double_wide_mlp else wide[0])
    writer.add_head_count_kv(heads if c.attention_k_eq_v else heads[0])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(whole)
    writer.add_rope_dimension_count_swa(local)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(c.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input or 0)
    if c.final_logit_softcapping:
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    if c.enable_moe_block:
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.top_k_experts)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)


def stored_gemma4(model: Any) -> dict[str, Tensor]:
    """The tensors as the converter names them: gate and up of all experts stay one."""
    ends = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
    state = model.state_dict()
    return {name + ".weight" * name.endswith(ends): tensor for name, tensor in state.items()}


def name_gemma4(name: str) -> str | None:
    """What is `UNMAPPED`, of the layer that `name` says."""
    parts = name.split(".", 3)
    return f"blk.{parts[2]}.{UNMAPPED[parts[3]]}" if parts[-1] in UNMAPPED else None


def back_gemma4(back: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a checkpoint has them: gate and up of each expert apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in back.items():
        if "gate_up_proj" in name:
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                found[name.replace("gate_up_proj", part)] = half.clone()
        else:
            found[name.replace("layer_scalar.weight", "layer_scalar")] = tensor
    return found


def rope_gemma4(c: Any) -> dict[str, NDArray[np.float32]]:
    """1 for pairs that turn where everything is seen, and what leaves the others where they are."""
    dim = c.per_layer_config[c.layer_types.index("full_attention")].head_dim
    moves = int(dim * c.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * moves + [1e30] * (dim // 2 - moves)
    return {"rope_freqs.weight": np.array(divisors, np.float32)}
