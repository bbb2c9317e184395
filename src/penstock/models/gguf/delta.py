"""Layers with a gated delta rule (`ops.delta`) from GGUF: their names, sizes, rows and columns.

Names and what converters change are llama.cpp's (github.com/ggml-org/llama.cpp, conversion/qwen.py
and src/models/): value heads lie in turns, the first of each key head, then the second, …, in
`qwen35` and `qwen35moe`, and key head by key head in `qwen3next`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.models.gguf.blocks import Bytes
from penstock.models.gguf.container import Container, TensorInfo
from penstock.models.gguf.joined import Stacked, wrong
from penstock.models.gguf.metadata import Metadata

_AT = "model.layers.{i}.linear_attn."
NAMES = {
    "post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "attn_qkv": f"{_AT}in_proj_qkv",
    "attn_gate": f"{_AT}in_proj_z",
    "ssm_in": f"{_AT}in_proj_qkvz",  # of first files
    "ssm_ba": f"{_AT}in_proj_ba",
    "ssm_alpha": f"{_AT}in_proj_a",
    "ssm_beta": f"{_AT}in_proj_b",
    "ssm_a": f"{_AT}A_log",
    "ssm_dt": f"{_AT}dt_bias",
    "ssm_conv1d": f"{_AT}conv1d",
    "ssm_norm": f"{_AT}norm",
    "ssm_out": f"{_AT}out_proj",
}
"""Of a layer's parts beside its MLP and its attention."""

_BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")
_ONE_EACH = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
"""What has rows of value heads, behind those of queries and keys; a row for each."""


def delta_config(m: Metadata, c: Container, config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the rule, of which layers have it, and of experts.

    config: what it says of the rest; layers behind the last one, which guess tokens ahead, and an
    MLP that is missing are taken out of it.
    """
    guesses = m.integer(m.own("nextn_predict_layers"), 0)
    layers = config["num_hidden_layers"] - guesses
    if layers < 1:
        raise m.fail(m.own("nextn_predict_layers"), guesses, f"below the {layers + guesses} layers")
    config["num_hidden_layers"] = layers
    if not config["intermediate_size"]:
        del config["intermediate_size"]
    found = {"partial_rotary_factor": 1.0} | config | _sizes(m) | _experts(m)
    found["attention_bias"] = any(name.endswith(".attn_q.bias") for name in c.tensors)
    every = m.integer(m.own("full_attention_interval"), 4)
    said = m.get(m.own("attention.recurrent_layers"))
    if said is None and every:
        said = [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(said, list) or len(said) < layers:
        raise m.fail(
            m.own("attention.recurrent_layers"), said, f"one entry for each of {layers} layers"
        )
    m.get(m.own("rope.dimension_sections"))  # of pictures: a text's tokens are at one place
    kinds = ["linear_attention" if x else "full_attention" for x in said[:layers]]
    return found | {"layer_types": kinds}


def _sizes(m: Metadata) -> dict[str, Any]:
    heads, inner = m.integer(m.own("ssm.time_step_rank")), m.integer(m.own("ssm.inner_size"))
    keys = m.integer(m.own("ssm.group_count"))
    if not heads or inner % heads:
        raise m.fail(m.own("ssm.inner_size"), inner, f"a multiple of the {heads} value heads")
    if not keys or heads % keys:
        raise m.fail(m.own("ssm.time_step_rank"), heads, f"a multiple of the {keys} key heads")
    return {
        "linear_conv_kernel_dim": m.integer(m.own("ssm.conv_kernel")),
        "linear_key_head_dim": m.integer(m.own("ssm.state_size")),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def _experts(m: Metadata) -> dict[str, Any]:
    experts = m.integer(m.own("expert_count"), 0)
    if not experts:
        return {}
    return {
        **({"norm_topk_prob": True} if m.architecture == "qwen3next" else {}),  # of all there are
        "num_experts": experts,
        "moe_intermediate_size": m.integer(m.own("expert_feed_forward_length")),
        "shared_expert_intermediate_size": m.integer(m.own("expert_shared_feed_forward_length")),
    }


@dataclass(frozen=True, slots=True)
class DeltaOrder:
    """How a model's rule is laid out in a file, and in a checkpoint."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    tiled: bool  # value heads lie in turns

    @staticmethod
    def of(config: dict[str, Any], tiled: bool) -> DeltaOrder:
        """Of what `delta_config` says."""
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        keys, heads, *dims = (int(config[f"linear_{name}"]) for name in names)
        return DeltaOrder(keys, heads, dims[0], dims[1], tiled and keys != heads)

    def rows(self, stem: str, tensor: TensorInfo) -> Bytes:
        """The tensor's bytes with rows, and blocks of columns, as in a checkpoint."""
        if not self.tiled:
            return tensor.data
        if stem == "ssm_out":
            return self._columns(tensor) if self.moves_blocks(stem, tensor) else tensor.data
        if stem not in (*_BEHIND_KEYS, *_ONE_EACH, "attn_gate"):
            return tensor.data
        before = 2 * self.key_heads * self.key_dim if stem in _BEHIND_KEYS else 0
        each = 1 if stem in _ONE_EACH else self.value_dim
        count = before + self.heads * each
        if tensor.shape[0] != count:
            raise wrong(tensor, f"{count} rows")
        place = np.arange(before, count).reshape(-1, self.key_heads, each)
        order = np.concatenate((np.arange(before), place.swapaxes(0, 1).reshape(-1)))
        return np.ascontiguousarray(tensor.data.reshape(count, -1)[order]).reshape(-1)

    def moves_blocks(self, stem: str, tensor: TensorInfo) -> bool:
        """Whether columns go back into their order as whole blocks, or needn't."""
        return not self.tiled or stem != "ssm_out" or self.value_dim % tensor.block.values == 0

    def _columns(self, tensor: TensorInfo) -> Bytes:
        self._check_columns(tensor)
        head = self.value_dim // tensor.block.values * tensor.block.nbytes
        blocks = tensor.data.reshape(tensor.shape[0], -1, self.key_heads, head)
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1)

    def _check_columns(self, tensor: TensorInfo) -> None:
        if len(tensor.shape) != 2 or tensor.shape[1] != self.heads * self.value_dim:
            raise wrong(tensor, f"{self.heads * self.value_dim} columns")

    def values(self, stem: str, tensor: TensorInfo, values: Tensor) -> Tensor:
        """What `rows` gave, as values: logarithms of rates, and what blocks were in the way of."""
        if stem == "ssm_a":
            if (values > 0).any():
                raise WeightsError(f"{tensor.name} has values above 0, which no rates have there.")
            return values.float().neg().log()
        if not self.moves_blocks(stem, tensor):
            self._check_columns(tensor)
            heads: Tensor = values.unflatten(1, (-1, self.key_heads, self.value_dim))
            return heads.transpose(1, 2).flatten(1)
        return values


class Mixed(Stacked):
    """Queries, keys and values, and what gates them: `in_proj_qkvz`, key head by key head.

    Raises WeightsError for shapes that don't belong together.
    """

    def __init__(self, order: DeltaOrder, qkv: TensorInfo, gate: TensorInfo) -> None:
        heads, values = order.key_heads, order.heads * order.value_dim
        keys, own = heads * order.key_dim, values // heads
        for part, rows in ((qkv, 2 * keys + values), (gate, values)):
            if len(part.shape) != 2 or part.shape[0] != rows:
                raise wrong(part, f"{rows} rows")
        widths = (order.key_dim, order.key_dim, own, own)
        starts = (0, keys, 2 * keys, 2 * keys + values)
        place = [
            torch.arange(start, start + heads * width).view(heads, width)
            for start, width in zip(starts, widths, strict=True)
        ]
        super().__init__((qkv, gate), torch.cat(place, 1).flatten())
