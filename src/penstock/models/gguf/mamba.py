"""Granite with experts, Granite 4, Bamba and Falcon-H1 from GGUF, and Mamba 2 (`ops.mamba2`).

Names and values are those of llama.cpp's converters (github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

import math

from torch import Tensor

from penstock.errors import WeightsError
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
    check_scale,
    head_dim_of,
    heads_by_layer,
    rms_model,
    with_biases,
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
    attends = next(i for i, count in enumerate(each) if count)
    biased = f"blk.{attends}.attn_q.bias" in c.tensors
    if m.integer(m.own("rope.dimension_count"), head_dim_of(m)) != head_dim_of(m):
        return _bamba(m, c, each) | {"attention_bias": biased}
    config = granite_config(m, c, "GraniteMoeHybridForCausalLM", max(each))
    config = _mixed(m, config)
    if not config["num_local_experts"]:
        config["shared_intermediate_size"] = config["intermediate_size"]
    if config.pop("mlp_bias"):
        raise m.fail("blk.0.ffn_up.bias", "there", "absent: biases there aren't built")
    turns = m.flag(m.own("rope.scaling.finetuned"), True)
    return config | {
        "layer_types": ["attention" if count else "mamba" for count in each],
        "position_embedding_type": "rope" if turns else "nope",
        "attention_bias": biased,
        **_expanded(m, c, config["hidden_size"]),
    }


def _bamba(m: Metadata, c: Container, each: list[int]) -> Config:
    """What turns a part of each head is one, in Granite's name."""
    config = with_biases(c, rms_model(m, c, "BambaForCausalLM", kv_heads=max(each)))
    check_scale(m, config)
    return config | {
        "attn_layer_indices": [i for i, count in enumerate(each) if count],
        **_expanded(m, c, config["hidden_size"]),
    }


def _falcon(m: Metadata, c: Container) -> Config:
    """Its multipliers are in the tensors."""
    config = with_biases(c, rms_model(m, c, "FalconH1ForCausalLM"))
    check_scale(m, config)
    sizes = _mamba(m, c)
    return (
        config
        | sizes
        | {
            "mamba_d_ssm": sizes["mamba_n_heads"] * sizes["mamba_d_head"],
            "mamba_rms_norm": "blk.0.ssm_norm.weight" in c.tensors,
            "mamba_norm_before_gate": False,
            "projectors_bias": "blk.0.ssm_out.bias" in c.tensors,
        }
    )


def _expanded(m: Metadata, c: Container, hidden: int) -> Config:
    """`_mamba`'s, of what is a multiple of the hidden size."""
    sizes = _mamba(m, c)
    inner = sizes["mamba_n_heads"] * sizes["mamba_d_head"]
    if not hidden or inner % hidden:
        raise m.fail(m.own("ssm.inner_size"), inner, f"a multiple of the embedding's {hidden}")
    return sizes | {"mamba_expand": inner // hidden}


def _mamba(m: Metadata, c: Container) -> Config:
    """Sizes of layers with Mamba 2, and which biases they have."""
    heads, inner = m.integer(m.own("ssm.time_step_rank")), m.integer(m.own("ssm.inner_size"))
    if not heads or inner % heads:
        raise m.fail(m.own("ssm.inner_size"), inner, f"a multiple of the {heads} heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": m.integer(m.own("ssm.group_count")),
        "mamba_d_state": m.integer(m.own("ssm.state_size")),
        "mamba_d_conv": m.integer(m.own("ssm.conv_kernel")),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in c.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in c.tensors),
    }


_USUAL = OUTER | ATTENTION | NORMS | _EXPERTS
_BESIDE = OUTER | ATTENTION | NORMS | scanned_names(_AT)
_BESIDE |= {f"ffn_{x}": f"{LAYER}feed_forward.{x}_proj" for x in _PARTS} | {
    "ffn_norm": f"{LAYER}pre_ff_layernorm",
    "output_norm": "model.final_layernorm",
}
"""Bamba's and Falcon-H1's."""
MAMBA: dict[str, Architecture] = {
    "granitemoe": Architecture(_granite_moe, _USUAL, rotated=QK),
    "granitehybrid": Architecture(
        _granite_hybrid,
        _USUAL | _SCANNED,
        rotated=QK,
        scanned=True,
        others={"BambaForCausalLM": _BESIDE},
    ),
    "falcon-h1": Architecture(_falcon, _BESIDE, scanned=True),
}
"""Built architectures of Granite that have experts, or states, and of those akin to it."""
