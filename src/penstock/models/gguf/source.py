"""`GgufSource`: the tensors of a GGUF file under the names that a family's weight rules know."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.models.gguf.architectures import ARCHITECTURES
from penstock.models.gguf.blocks import Bytes
from penstock.models.gguf.config import generation_config, is_tied, main_dtype, read_gguf_config
from penstock.models.gguf.container import Container, TensorInfo, read_container
from penstock.models.gguf.delta import DeltaOrder, Mixed
from penstock.models.gguf.joined import HeadPair, Stacked, wrong
from penstock.models.gguf.mamba import scanned_shape, scanned_values
from penstock.models.gguf.parts import Architecture
from penstock.models.gguf.rope import FACTORS
from penstock.quant import Codes, Scheme

logger = logging.getLogger("penstock")

_LAYER = re.compile(r"blk\.(?P<i>\d+)\.(?P<stem>.+?)(?:\.(?P<p>weight|bias))?")
_OUTER = re.compile(r"(?P<stem>.+)\.(?P<p>weight|bias)")
_CONVOLUTIONS = ("ssm_conv1d", "shortconv.conv")
"""Stems of tensors [channels, width]: a checkpoint has them as [channels, 1, width]."""

_BARE = {
    "ssm_a": "",
    "ssm_d": "",
    "ffn_norm": ".weight",  # in Falcon-H1's files
    "ffn_gate_inp.scale": "",
    "ffn_down_exps.scale": "",
}
"""Stems of tensors whose names may end there, and what follows in a checkpoint."""
_UNNAMED = ("layer_output_scale",)
"""Stems of weights that no checkpoint calls so."""


def _experts(named: str, tensor: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """A tensor by its name, or each expert's part of it by its own."""
    if "{e}" not in named:
        yield named, tensor
        return
    bias = named.endswith(".bias")
    if len(tensor.shape) != (2 if bias else 3):
        raise WeightsError(
            f"{tensor.name} has the shape {list(tensor.shape)}, not that of a "
            f"{'bias' if bias else 'matrix'} for each expert."
        )
    parts = ("gate_proj", "up_proj") if ".gate_up_proj." in named else ("",)
    count, rows, *columns = tensor.shape
    if rows % len(parts):
        raise WeightsError(f"{tensor.name} has {rows} rows of each expert: not half gate, half up.")
    shape = rows // len(parts), *columns
    each = tensor.data.reshape(count, len(parts), -1)
    for e in range(count):
        for data, part in zip(each[e], parts, strict=True):
            own = replace(tensor, name=f"{tensor.name}[{e}]", shape=shape, data=data)
            there = named.replace("{e}", str(e))
            yield there.replace("gate_up_proj", part) if part else there, own


class GgufSource:
    """One GGUF file, mapped. A tensor is read when it is asked for, and nothing is kept of it.

    Quantized matrices come as `Codes` where a scheme means the same to the bit, else as their
    values in float32. What converters do to a checkpoint's tensors is undone: rows go back into
    their order, norms lose what was added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._container: Container = read_container(path)
        self._text: dict[str, Any] = read_gguf_config(self._container)
        self.config = self._text
        self.generation: dict[str, Any] = generation_config(self._container)
        name = self._container.metadata["general.architecture"]
        self._architecture: Architecture = ARCHITECTURES[name]
        self._names = self._architecture.names_of(self._text)
        self._delta: DeltaOrder | None = None
        if self._architecture.value_heads is not None:
            tiled = self._architecture.value_heads == "in turns"
            self._delta = DeltaOrder.of(self._text, tiled)
        dropped = {*FACTORS, *(("output.weight",) if is_tied(self._container) else ())}
        scanned = self._architecture.scanned and self._text.get("num_nextn_predict_layers")
        guess = self._delta is not None or scanned  # some layers do, and are left out
        self._where: dict[str, tuple[str, TensorInfo]] = {}
        for name, tensor in self._container.tensors.items():
            if name in dropped or (guess and self._guesses(name)):
                continue
            stem, named = self._translate(name)
            for there, part in _experts(named, tensor):
                if there in self._where:
                    raise WeightsError(f"{path}: two tensors are {there}; {name} is one of them.")
                self._where[there] = stem, part
        self._joined: dict[str, HeadPair | Stacked] = dict(self._joined_heads())
        if self._delta and self._architecture.value_heads == "by key head":
            self._joined |= self._joined_projections(self._delta)
        self._joined |= self._joined_blocks()

    @property
    def quantization(self) -> str | None:
        """The block type of most values, where they are quantized: `Q4_K`."""
        sizes = Counter[str]()
        joined = (part for pair in self._joined.values() for part in pair.parts)
        for tensor in (*(tensor for _, tensor in self._where.values()), *joined):
            if tensor.block.plain is None:
                sizes[tensor.block.name] += tensor.nbytes
        return sizes.most_common(1)[0][0] if sizes else None

    def files(self) -> list[Path]:
        """All parts of the model."""
        return list(self._container.files)

    def names(self) -> list[str]:
        """Every tensor's name in a checkpoint of the family, sorted."""
        return sorted([*self._where, *self._joined])

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        if name in self._joined:
            return self._joined[name].shape
        stem, tensor = self._where[name]
        if stem in _CONVOLUTIONS and len(tensor.shape) == 2:
            return tensor.shape[0], 1, tensor.shape[1]
        if self._architecture.scanned:
            return scanned_shape(stem, tensor)
        return tensor.shape[::-1] if self._is_transposed(stem, tensor) else tensor.shape

    def dtype(self) -> torch.dtype:
        """What most of the values are stored in; bfloat16 where they are quantized."""
        return main_dtype(self._container)

    def scheme(self, name: str) -> Scheme | None:
        """What holds the matrix exactly as it is quantized; None: its values are read."""
        if name in self._joined:
            return self._joined[name].scheme
        stem, tensor = self._where[name]
        kept = len(tensor.shape) == 2 and not self._is_transposed(stem, tensor)
        kept = kept and stem not in _CONVOLUTIONS and tensor.shape == self.shape(name)
        kept = kept and not (self._delta and not self._delta.moves_blocks(stem, tensor))
        return tensor.block.scheme if kept else None

    def read(self, name: str) -> Tensor | Codes:
        """A tensor's values, as a view of the file or in float32, or its codes."""
        if name in self._joined:
            return self._joined[name].read()
        stem, tensor = self._where[name]
        raw = self._rows_in_order(stem, tensor)
        if self.scheme(name) is not None:
            return tensor.block.to_codes(raw, tensor.shape)
        values = tensor.block.tensor(raw, tensor.shape)
        weighs = stem.endswith("norm") and stem != "ssm_norm" and name.endswith(".weight")
        if self._architecture.norm_shift and weighs:
            return values.float() - self._architecture.norm_shift
        if stem in _CONVOLUTIONS and values.dim() == 2:
            return values.unsqueeze(1)
        if self._architecture.scanned:
            return scanned_values(stem, tensor, values)
        if self._delta:
            return self._delta.values(stem, tensor, values)
        return values.t() if self._is_transposed(stem, tensor) else values

    @property
    def table(self) -> str:
        """The embedding's name."""
        return f"{self._names['token_embd']}.weight"

    @property
    def head(self) -> str:
        """The name of the output head, where it isn't tied."""
        return f"{self._names['output']}.weight"

    def stored_as(self, name: str) -> str:
        """The name of a tensor's block type: `Q4_K`, `BF16`."""
        if name in self._joined:
            return self._joined[name].stored_as
        return self._where[name][1].block.name

    def is_widened(self, name: str) -> bool:
        """Whether a tensor is quantized in a way that no scheme holds: its values are read."""
        if name in self._joined:
            pair = self._joined[name]
            return pair.scheme is None and any(part.block.plain is None for part in pair.parts)
        return self._where[name][1].block.plain is None and self.scheme(name) is None

    def announce(self) -> None:
        """Say once what no scheme holds, and what its values take instead."""
        widened = [tensor for name, (_, tensor) in self._where.items() if self.is_widened(name)]
        pairs = [pair for name, pair in self._joined.items() if self.is_widened(name)]
        widened += [part for pair in pairs for part in pair.parts if part.block.plain is None]
        if not widened:
            return
        kinds = Counter(tensor.block.name for tensor in widened)
        stored = sum(tensor.nbytes for tensor in widened)
        values = sum(
            tensor.nbytes // tensor.block.nbytes * tensor.block.values for tensor in widened
        )
        logger.warning(
            "%s: %d tensors (%s) are widened as they are read, as no scheme means exactly the "
            "same: %.1f MB in bfloat16, or twice that in float32, instead of %.1f.",
            self.path, len(widened), ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
            2 * values / 1e6, stored / 1e6,
        )  # fmt: skip

    def _joined_heads(self) -> Iterator[tuple[str, HeadPair]]:
        """`kv_b_proj` of the two parts that converters make of it, which are taken away."""
        for name in [name for name in self._where if name.endswith("self_attn.k_b_proj.weight")]:
            other = name.replace("k_b_proj", "v_b_proj")
            if other in self._where:
                pair = HeadPair(self._where.pop(name)[1], self._where.pop(other)[1])
                yield name.replace("k_b_proj", "kv_b_proj"), pair

    def _joined_projections(self, order: DeltaOrder) -> Iterator[tuple[str, Mixed]]:
        """`in_proj_qkvz` of its two parts, which are taken away."""
        at = "linear_attn.in_proj_"
        for name in [name for name in self._where if name.endswith(f"{at}qkv.weight")]:
            whole, other = (name.replace(f"{at}qkv", f"{at}{x}") for x in ("qkvz", "z"))
            if other in self._where and whole not in self._where:
                qkv, gate = self._where.pop(name)[1], self._where.pop(other)[1]
                yield whole, Mixed(order, qkv, gate)

    def _joined_blocks(self) -> Iterator[tuple[str, Stacked]]:
        """Granite's `input_linear` of gate and up, which are taken away."""
        at = re.compile(r"model\.layers\.\d+\.shared_mlp\.gate_proj\.weight")
        for name in [name for name in self._where if at.fullmatch(name)]:
            other, gate = name.replace("gate_proj", "up_proj"), self._where.pop(name)[1]
            if other not in self._where:
                lacks = gate.name.replace("_gate", "_up")
                raise WeightsError(f"{self.path} has {gate.name}, but lacks {lacks}.")
            up = self._where.pop(other)[1]
            if up.shape != gate.shape:
                raise wrong(up, f"{list(gate.shape)}, that of {gate.name}")
            yield name.replace("gate_proj", "input_linear"), Stacked((gate, up))

    def _guesses(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the last one, which guesses tokens ahead."""
        match = _LAYER.fullmatch(name)
        return match is not None and int(match["i"]) >= int(self._text["num_hidden_layers"])

    def _translate(self, name: str) -> tuple[str, str]:
        """(stem, name in a checkpoint); a name that the architecture hasn't stays as it is."""
        match = _LAYER.fullmatch(name) or _OUTER.fullmatch(name)
        if match is None or match["stem"] not in self._names:
            return name, name
        there = self._names[match["stem"]]
        layer = match.groupdict().get("i")
        if ("{i}" in there) != (layer is not None):
            return name, name
        there, part = there.replace("{i}", layer or ""), match["p"]
        if part is None:
            stem = match["stem"]
            return (stem, there + _BARE[stem]) if stem in _BARE else (name, name)
        whole = there.endswith(f"_{part}") or match["stem"] in _UNNAMED
        return match["stem"], there if whole else f"{there}.{part}"

    def _is_transposed(self, stem: str, tensor: TensorInfo) -> bool:
        return stem in self._architecture.transposed and len(tensor.shape) == 2

    def _rows_in_order(self, stem: str, tensor: TensorInfo) -> Bytes:
        """The tensor's bytes with its rows as in a checkpoint: whole rows move, of codes too."""
        if stem in self._architecture.rotated:
            heads = self._heads(stem)
            return self._regroup(tensor, (heads, -1, 2), (0, 2, 1))
        if stem in self._architecture.by_head:
            return self._regroup(tensor, (3, self._heads("attn_q"), -1), (1, 0, 2))
        return tensor.data if self._delta is None else self._delta.rows(stem, tensor)

    def _heads(self, stem: str) -> int:
        key = "num_key_value_heads" if stem == "attn_k" else "num_attention_heads"
        return int(self._text[key])

    def _regroup(
        self, tensor: TensorInfo, groups: tuple[int, int, int], order: tuple[int, int, int]
    ) -> Bytes:
        rows, known = tensor.shape[0], abs(int(np.prod(groups)))
        if known == 0 or rows % known:
            raise WeightsError(
                f"{self.path}: {tensor.name} has {rows} rows, no multiple of {known}."
            )
        each = tensor.data.reshape(*groups, tensor.nbytes // rows)
        return np.ascontiguousarray(each.transpose(*order, 3)).reshape(-1)
