"""Writing a checkpoint folder that other engines read, a matrix at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from penstock.errors import ConfigError, WeightsError, listed, nearest
from penstock.quant.codes import Codes
from penstock.quant.files import awq, bitsandbytes, compressed_tensors_writer, fp8, gptq
from penstock.quant.files.shards import ShardWriter
from penstock.quant.scheme import Kind, Scheme

logger = logging.getLogger("penstock")

Layout = Literal["compressed-tensors", "awq", "gptq", "fp8", "bitsandbytes"]

SHARD_BYTES = 5_000_000_000


class _Writer(Protocol):
    """A module of this package that writes."""

    def expresses(self, scheme: Scheme) -> bool: ...

    def store(self, module: str, codes: Codes) -> dict[str, Tensor]: ...

    def quantization_config(
        self, schemes: Mapping[str, Scheme], plain: Sequence[str]
    ) -> dict[str, Any]: ...


_WRITERS: dict[str, _Writer] = {
    "compressed-tensors": cast(_Writer, compressed_tensors_writer),
    "awq": cast(_Writer, awq),
    "gptq": cast(_Writer, gptq),
    "fp8": cast(_Writer, fp8),
    "bitsandbytes": cast(_Writer, bitsandbytes),
}
LAYOUTS = tuple(_WRITERS)
"""What `write_checkpoint` writes."""

_MIXES = ("compressed-tensors",)
"""Layouts in which matrices may differ in their schemes."""


_WHOLE_GROUPS: dict[str, tuple[Kind, ...]] = {
    "compressed-tensors": ("mxfp4", "nvfp4"),
    "awq": ("int4",),
    "gptq": ("int4", "int8"),
    "bitsandbytes": ("nf4",),
}


def whole_groups(layout: str) -> tuple[Kind, ...]:
    """The kinds of matrices that `layout` holds in whole groups only."""
    return _WHOLE_GROUPS.get(layout, ())


def layouts_for(scheme: Scheme) -> tuple[str, ...]:
    """The layouts that can hold matrices in `scheme`."""
    return tuple(name for name, writer in _WRITERS.items() if writer.expresses(scheme))


def _nearly(layout: str, scheme: Scheme) -> str:
    """Says so where the layout holds this scheme with a zero point."""
    if scheme.kind not in ("int8", "int4") or not scheme.symmetric:
        return ""
    other = replace(scheme, symmetric=False)
    return f" It holds {other.name}." if _WRITERS[layout].expresses(other) else ""


def check_layout(layout: str, schemes: Iterable[Scheme]) -> None:
    """Raise ConfigError where `layout` can't hold matrices in all of `schemes`."""
    if layout not in _WRITERS:
        raise ConfigError(
            f"layout={layout!r} isn't one of {', '.join(LAYOUTS)}.{nearest(layout, LAYOUTS)}"
        )
    kinds = list(dict.fromkeys(schemes))
    for scheme in kinds:
        if not _WRITERS[layout].expresses(scheme):
            raise ConfigError(
                f"The layout {layout!r} can't express {scheme.name}. Layouts that can: "
                f"{', '.join(layouts_for(scheme)) or 'none'}.{_nearly(layout, scheme)}"
            )
    if len(kinds) > 1 and layout not in _MIXES:
        raise ConfigError(
            f"The layout {layout!r} has one scheme for all its matrices, not "
            f"{', '.join(scheme.name for scheme in kinds)}. Layouts that mix: {', '.join(_MIXES)}."
        )


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor | Codes]],
    layout: Layout = "compressed-tensors",
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `tensors` and `config.json` into `folder`, which must hold no safetensors yet.

    tensors: by their names in the family's checkpoints, `Codes` for `….weight` of quantized
    matrices; each is stored before the next is asked for. config: that of the unquantized model;
    its `quantization_config` is replaced. config.json is written last. What a killed writer left is
    removed first.

    Raises ConfigError where `layout` can't express a scheme or a matrix, WeightsError for what
    can't be written; then none of the files stays.
    """
    check_layout(layout, ())
    folder.mkdir(parents=True, exist_ok=True)
    for file in ShardWriter.remains(folder):
        file.unlink()
    old = sorted(p.name for p in folder.glob("*.safetensors*"))
    if old:
        raise ConfigError(f"{folder} holds {listed(old)} already: give an empty folder.")
    schemes: dict[str, Scheme] = {}
    plain: list[str] = []
    short: list[str] = []
    with ShardWriter(folder, shard_bytes) as shards:
        for name, tensor in tensors:
            module = name.removesuffix(".weight")
            if isinstance(tensor, Tensor):
                if tensor.ndim == 2 and module != name:
                    plain.append(module)
                shards.add(name, tensor)
                continue
            if module == name:
                raise WeightsError(f"{name} is quantized, but only a …weight can be.")
            schemes[module] = tensor.scheme
            check_layout(layout, schemes.values())
            if tensor.scheme.group and tensor.shape[1] % tensor.scheme.group:
                short.append(f"{module} (K = {tensor.shape[1]})")
            for part, stored in _WRITERS[layout].store(module, tensor).items():
                shards.add(part, stored)
    if "lm_head" not in schemes and "lm_head" not in plain:
        plain.append("lm_head")  # tied: other engines have the module without its tensor
    written = {k: v for k, v in config.items() if k != "quantization_config"}
    if schemes:
        others = [module for module in plain if "embed" not in module]
        written["quantization_config"] = _WRITERS[layout].quantization_config(schemes, others)
    text = json.dumps(written, indent=2, sort_keys=True, default=_as_text) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    if short:
        logger.warning(
            "%d matrices end in a shorter group, which Penstock reads and other engines may not: "
            "%s. A group that divides their K is read by all.", len(short), listed(short),
        )  # fmt: skip


def _as_text(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise WeightsError(f"config.json can't hold {value!r}.")
