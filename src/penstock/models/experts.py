"""Checkpoints whose experts lie in one tensor: each by its own name, as weight rules know them.

transformers keeps a layer's experts as `gate_up_proj` [E, 2·I, D], gate above up, and `down_proj`
[E, D, I]; gpt-oss has both transposed, the columns of gate and up in turns, and biases beside them.
Qwen3-VL's files have both transposed, too, or neither. Granite's call them `input_linear` and
`output_linear`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.models.checkpoint import Checkpoint
from penstock.models.over import Over
from penstock.models.quantized import QuantizedCheckpoint
from penstock.quant import Codes, Scheme

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of a config."""

_JOINED = re.compile(r"(?P<at>.+\.experts)\.(?P<what>gate_up_proj|down_proj)(?P<bias>_bias)?")

_GRANITE = re.compile(r"(.+\.block_sparse_moe)\.(input|output)_linear\.weight")
_MEANT = {"input": "gate_up_proj", "output": "down_proj"}

logger = logging.getLogger("penstock")

Half = Literal["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one expert's matrix or bias lies."""

    joined: str
    expert: int
    half: Half


def has_joined_experts(checkpoint: Checkpoint | QuantizedCheckpoint) -> bool:
    """Whether any layer's experts lie in one tensor."""
    return any(_joined(name) for name in checkpoint.names())


def _joined(name: str) -> re.Match[str] | None:
    """The parts of a joined tensor's name, if it is one."""
    granite = _GRANITE.fullmatch(name)
    return _JOINED.fullmatch(f"{granite[1]}.experts.{_MEANT[granite[2]]}" if granite else name)


def are_in_turns(config: Mapping[str, Any]) -> bool:
    """Whether `config` describes a gpt-oss, whose joined experts are transposed and in turns."""
    names = config.get("architectures")
    return config.get("model_type") == "gpt_oss" or (
        isinstance(names, list) and "GptOssForCausalLM" in names
    )


def hidden_beside(config: Mapping[str, Any]) -> int:
    """The decoder's hidden size where joined experts are transposed, if their shape says so
    (Qwen3-VL's); 0: they aren't.
    """
    text = config.get("text_config")
    if config.get("model_type") != "qwen3_vl_moe" or not isinstance(text, dict):
        return 0
    hidden = text.get("hidden_size")
    return hidden if type(hidden) is int else 0


def warn_of_names(config: Mapping[str, Any]) -> None:
    """Say so where experts are written one by one, which no other engine expects."""
    text = config.get("text_config")
    own = text if isinstance(text, dict) else config
    granite = "granitemoe" in str(config.get("model_type")) and config.get("num_local_experts", 8)
    gemma = "gemma4" in str(own.get("model_type")) and own.get("enable_moe_block")
    if granite or gemma or are_in_turns(config):
        logger.warning(
            "Experts of a %s are written one by one (experts.0.gate_proj.weight, …), which "
            "Penstock reads and transformers doesn't: there they would be left out.",
            "Granite" if granite else "Gemma 4" if gemma else "gpt-oss",
        )


class SplitExperts(Over):
    """`base` with each expert's `gate_proj`, `up_proj` and `down_proj` by themselves."""

    def __init__(
        self, base: Checkpoint | QuantizedCheckpoint, *, in_turns: bool, hidden: int = 0
    ) -> None:
        """in_turns: matrices are transposed, and gate's columns and up's alternate. hidden:
        `hidden_beside`.

        Raises WeightsError for a tensor that isn't one of experts.
        """
        super().__init__(base)
        self._stored, self._in_turns, self._hidden = base, in_turns, hidden
        self._parts: dict[str, _Part] = {}
        self._whole: list[str] = []
        self._last: tuple[str, Tensor] = ("", torch.empty(0))
        for name in base.names():
            match = _joined(name)
            if match is None:
                self._whole.append(name)
                continue
            shape, dims = base.shape(name), 2 if match["bias"] else 3
            if (
                not all(shape)
                or len(shape) != dims
                or (match["what"] == "gate_up_proj" and self._rows(name, shape) % 2)
            ):
                raise WeightsError(
                    f"{name} has the shape {list(shape)}, which isn't that of experts' "
                    f"{match['what']}."
                )
            count = next(
                (base.config[key] for key in _COUNTS if base.config.get(key) is not None), None
            )
            if count not in (None, shape[0]):
                raise WeightsError(
                    f"{name} {list(shape)} holds {shape[0]} experts, but config.json says {count}. "
                    "They disagree: download both again."
                )
            halves: tuple[Half, ...] = ("down_proj",)
            if match["what"] == "gate_up_proj":
                halves = ("gate_proj", "up_proj")
            last = "bias" if match["bias"] else "weight"
            for e in range(shape[0]):
                for half in halves:
                    self._parts[f"{match['at']}.{e}.{half}.{last}"] = _Part(name, e, half)

    def _turned(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a joined tensor's matrices are transposed."""
        if len(shape) == 2 or not self._hidden:
            return self._in_turns
        return shape[2 if name.endswith("gate_up_proj") else 1] != self._hidden

    def _rows(self, name: str, shape: tuple[int, ...]) -> int:
        """N of an expert's matrix, or of its bias."""
        return shape[-1] if len(shape) == 2 or self._turned(name, shape) else shape[1]

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted([*self._whole, *self._parts])

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        part = self._parts.get(name)
        if part is None:
            return self._base.shape(name)
        shape = self._base.shape(part.joined)
        rows = self._rows(part.joined, shape) // (1 if part.half == "down_proj" else 2)
        if len(shape) == 2:
            return (rows,)
        return rows, shape[1] if self._turned(part.joined, shape) else shape[2]

    def stored_as(self, name: str) -> str:
        """The name of a tensor's elements, or a matrix's scheme."""
        part = self._parts.get(name)
        return self._stored.stored_as(name if part is None else part.joined)

    def scheme(self, name: str) -> Scheme | None:
        """How a tensor is quantized; those that are split aren't."""
        return None if name in self._parts else self._base.scheme(name)

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or codes."""
        part = self._parts.get(name)
        if part is None:
            return self._base.read(name)
        if self._last[0] != part.joined:
            found = self._base.read(part.joined)
            assert isinstance(found, Tensor)
            self._last = part.joined, found
        whole = self._last[1]
        own = whole[part.expert]
        if own.dim() == 2 and self._turned(part.joined, tuple(whole.shape)):
            own = own.t()
        return self._half(own, part.half).contiguous()

    def _half(self, rows: Tensor, half: Half) -> Tensor:
        if half == "down_proj":
            return rows
        i = 0 if half == "gate_proj" else 1
        return rows[i::2] if self._in_turns else rows.chunk(2)[i]
