"""Granite with experts and Granite 4 from GGUF, and its layers with Mamba 2 (`ops.mamba2`).

Names and values are those of llama.cpp's converters (github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

import math

from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.models.gguf.container import Container, TensorInfo
from penstock.models.gguf.dense import granite_config
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import (
    ATTENTION,
    LAYER,
    NORMS,
    OUTER,
    QK,
    Architecture,
    Config,
    heads_by_layer,
)

_AT = f"{LAYER}mamba."
_PARTS = ("gate", "up", "down")
_BLOCK = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))  # two are joined
_EXPERTS = {f"ffn_{x}_exps": f"{LAYER}block_sparse_moe.experts.{{e}}.{x}_proj" for x in _PARTS} | {
    "ffn_gate_inp": f"{LAYER}block_sparse_moe.router",
    **{f"ffn_{x}_shexp": f"{LAYER}shared_mlp.{at}" for x, at in _BLOCK},
}


def scanned_names(at: str) -> dict[str, str]:
    """What a checkpoint calls Mamba 2's tensors, whose names begin with `at`."""
    return {
        "ssm_in": f"{at}in_proj",
        "ssm_conv1d": f"{at}conv1d",
        "ssm_dt": f"{at}dt_bias",
        "ssm_a": f"{at}A_log",
        "ssm_d": f"{at}D",
        "ssm_norm": f"{at}norm",
        "ssm_out": f"{at}out_proj",
    }


_SCANNED = scanned_names(_AT) | {f"ffn_{x}": f"{LAYER}shared_mlp.{at}" for x, at in _BLOCK}
_FLAT = ("ssm_a", "ssm_d", "ssm_norm")
"""Stems of what has one number of each head, or of each channel, in more than one dimension."""


def scanned_shape(stem: str, tensor: TensorInfo) -> tuple[int, ...]:
    """A tensor's shape as a checkpoint has it."""
    return (math.prod(tensor.shape),) if stem in _FLAT else tensor.shape


def scanned_values(stem: str, tensor: TensorInfo, values: Tensor) -> Tensor:
    """A tensor's values as a checkpoint has them: logarithms of rates."""
    if stem == "ssm_a":
        if (values > 0).any():
            raise WeightsError(f"{tensor.name} has values above 0, which no rates have there.")
        values = values.float().neg().log()
    return values.flatten() if stem in _FLAT else values


def _mixed(m: Metadata, config: Config) -> Config:
    """With experts, and what all tokens go through beside them."""
    shared = m.integer(m.own("expert_shared_feed_forward_length"), 0)
    experts = m.integer(m.own("expert_count"), 0)
    chosen = m.integer(m.own("expert_used_count"), 0)  # said of models without any, too
    config["num_local_experts"] = experts
    config["shared_intermediate_size"] = shared
    return config | ({"num_experts_per_tok": chosen} if experts else {})


def _granite_moe(m: Metadata, c: Container) -> Config:
    config = _mixed(m, granite_config(m, c, "GraniteMoeForCausalLM"))
    del config["mlp_bias"]
    if config["shared_intermediate_size"]:
        return config | {"architectures": ["GraniteMoeSharedForCausalLM"]}
    del config["shared_intermediate_size"]
    return config


def _granite_hybrid(m: Metadata, c: Container) -> Config:
    """Layers without heads of keys have states."""
    each = heads_by_layer(m, c, "states")
    config = granite_config(m, c, "GraniteMoeHybridForCausalLM", max(each))
    config = _mixed(m, config)
    if not config["num_local_experts"]:
        config["shared_intermediate_size"] = config["intermediate_size"]
    if "partial_rotary_factor" in config:
        raise UnsupportedModelError(
            f"{c.path} turns a part of each head, as Bamba does, which isn't built from GGUF: "
            "take its safetensors."
        )
    if config.pop("mlp_bias"):
        raise m.fail("blk.0.ffn_up.bias", "there", "absent: biases there aren't built")
    heads, inner = m.integer(m.own("ssm.time_step_rank")), m.integer(m.own("ssm.inner_size"))
    hidden = config["hidden_size"]
    if not heads or inner % heads or not hidden or inner % hidden:
        raise m.fail(
            m.own("ssm.inner_size"), inner,
            f"a multiple of the {heads} heads and of the embedding's {hidden}",
        )  # fmt: skip
    turns = m.flag(m.own("rope.scaling.finetuned"), True)
    attends = next(i for i, count in enumerate(each) if count)
    return config | {
        "layer_types": ["attention" if count else "mamba" for count in each],
        "position_embedding_type": "rope" if turns else "nope",
        "attention_bias": f"blk.{attends}.attn_q.bias" in c.tensors,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": m.integer(m.own("ssm.group_count")),
        "mamba_d_state": m.integer(m.own("ssm.state_size")),
        "mamba_d_conv": m.integer(m.own("ssm.conv_kernel")),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in c.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in c.tensors),
    }


_USUAL = OUTER | ATTENTION | NORMS | _EXPERTS
MAMBA: dict[str, Architecture] = {
    "granitemoe": Architecture(_granite_moe, _USUAL, rotated=QK),
    "granitehybrid": Architecture(_granite_hybrid, _USUAL | _SCANNED, rotated=QK, scanned=True),
}
"""Built architectures of Granite that have experts, or states."""
