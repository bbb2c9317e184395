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
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import WeightsError
from penstock.models.gguf.blocks import Bytes
from penstock.models.gguf.container import Container, TensorInfo
from penstock.models.gguf.metadata import Metadata
from penstock.quant import Codes, Scheme

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


def delta_config(m: Metadata, c: Container, config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the rule, of which layers have it, and of experts.

    config: what it says of the rest; layers behind the last one, which guess tokens ahead, and an
    MLP that is missing are taken out of it.
    """
    config["num_hidden_layers"] -= m.integer(m.own("nextn_predict_layers"), 0)
    layers = config["num_hidden_layers"]
    if not config["intermediate_size"]:
        del config["intermediate_size"]
    found = {"partial_rotary_factor": 1.0} | config | _sizes(m) | _experts(m)
    found["attention_bias"] = any(name.endswith(".attn_q.bias") for name in c.tensors)
    every = m.integer(m.own("full_attention_interval"), 4)
    said = m.get(m.own("attention.recurrent_layers"))
    if said is None and every:
        said = [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(said, list) or len(said) < layers:
        raise m.fail(m.own("attention.recurrent_layers"), said, f"one of {layers} layers")
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
        if not self.tiled or tensor.nbytes == 0:
            return tensor.data
        if stem == "ssm_out":
            return self._columns(tensor) if self.moves_blocks(stem, tensor) else tensor.data
        before = 2 * self.key_heads * self.key_dim if stem in ("attn_qkv", "ssm_conv1d") else 0
        each = 1 if stem in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else self.value_dim
        if before == 0 and each != 1 and stem != "attn_gate":
            return tensor.data
        count = before + self.heads * each
        if tensor.shape[0] != count:
            raise _wrong(tensor, f"{count} rows")
        place = np.arange(before, count).reshape(-1, self.key_heads, each)
        order = np.concatenate((np.arange(before), place.swapaxes(0, 1).reshape(-1)))
        return np.ascontiguousarray(tensor.data.reshape(count, -1)[order]).reshape(-1)

    def moves_blocks(self, stem: str, tensor: TensorInfo) -> bool:
        """Whether columns go back into their order as whole blocks, or needn't."""
        return not self.tiled or stem != "ssm_out" or self.value_dim % tensor.block.values == 0

    def _columns(self, tensor: TensorInfo) -> Bytes:
        self._check_columns(tensor)
        blocks = tensor.data.reshape(tensor.shape[0], -1, self.key_heads, self._head_bytes(tensor))
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1)

    def _head_bytes(self, tensor: TensorInfo) -> int:
        return self.value_dim // tensor.block.values * tensor.block.nbytes

    def _check_columns(self, tensor: TensorInfo) -> None:
        if len(tensor.shape) != 2 or tensor.shape[1] != self.heads * self.value_dim:
            raise _wrong(tensor, f"{self.heads * self.value_dim} columns")

    def values(self, stem: str, tensor: TensorInfo, values: Tensor) -> Tensor:
        """What `rows` gave, as values: logarithms of rates, and what blocks were in the way of."""
        if stem == "ssm_a":
            if not (values < 0).all():
                raise WeightsError(f"{tensor.name} has values that aren't below 0.")
            return values.float().neg().log()
        if stem == "ssm_conv1d" and values.dim() == 2:
            return values.unsqueeze(1)
        if not self.moves_blocks(stem, tensor):
            self._check_columns(tensor)
            heads: Tensor = values.unflatten(1, (-1, self.key_heads, self.value_dim))
            return heads.transpose(1, 2).flatten(1)
        return values


class Mixed:
    """Queries, keys and values, and what gates them: `in_proj_qkvz`, key head by key head.

    Raises WeightsError for shapes that don't belong together.
    """

    def __init__(self, order: DeltaOrder, qkv: TensorInfo, gate: TensorInfo) -> None:
        self.parts = (qkv, gate)
        heads, values = order.key_heads, order.heads * order.value_dim
        keys, own = heads * order.key_dim, values // heads
        for part, rows in ((qkv, 2 * keys + values), (gate, values)):
            if len(part.shape) != 2 or part.shape[0] != rows:
                raise _wrong(part, f"{rows} rows")
        if qkv.shape[1] != gate.shape[1]:
            raise _wrong(gate, f"{qkv.shape[1]} columns")
        widths, starts = (order.key_dim, order.key_dim, own, own), (0, keys, 2 * keys, None)
        ends = [2 * keys + values if start is None else start for start in starts]
        place = [
            np.arange(start, start + heads * width).reshape(heads, width)
            for start, width in zip(ends, widths, strict=True)
        ]
        self._order: NDArray[np.intp] = np.concatenate(place, axis=1).reshape(-1)

    @property
    def stored_as(self) -> str:
        """The block types of both."""
        return " and ".join(dict.fromkeys(part.block.name for part in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        """[2·Hk·Dk + 2·Hv·Dv, hidden]."""
        return len(self._order), self.parts[0].shape[1]

    @property
    def scheme(self) -> Scheme | None:
        """What holds it, where both parts are stored alike."""
        qkv, gate = (part.block for part in self.parts)
        return qkv.scheme if qkv is gate else None

    def read(self) -> Tensor | Codes:
        """As a checkpoint has it."""
        qkv, gate = self.parts
        if qkv.block is gate.block:
            rows = [part.data.reshape(part.shape[0], -1) for part in self.parts]
            raw = np.concatenate(rows)[self._order]
            if self.scheme is not None:
                return qkv.block.to_codes(raw, self.shape)
            return qkv.block.tensor(raw, self.shape)
        both = torch.cat([part.block.tensor(part.data, part.shape).float() for part in self.parts])
        return both[torch.from_numpy(self._order)]


def _wrong(tensor: TensorInfo, wanted: str) -> WeightsError:
    return WeightsError(f"{tensor.name} has the shape {list(tensor.shape)}, not {wanted}.")
