"""Where tensors are read from: checkpoints on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelNotFoundError, WeightsError
from penstock.models.registry import read_config
from penstock.quant import Codes, Scheme

_STORED = (torch.float32, torch.bfloat16, torch.float16)
"""Elements of plain values."""

_ELEMENTS = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""By safetensors' names."""


class Source(Protocol):
    """Tensors by the names that a family's weight rules know, read one at a time.

    What belongs to a quantized matrix (scales, zero points, the order of columns) has no name of
    its own: it is in the `Codes` of the matrix.
    """

    @property
    def path(self) -> Path:
        """The folder or the file."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` says, or would say."""
        ...

    def files(self) -> list[Path]:
        """The files that tensors are read from, sorted."""
        ...

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it; of a quantized matrix [N, K]."""
        ...

    def dtype(self) -> torch.dtype:
        """What most of the unquantized tensors are stored in."""
        ...

    def scheme(self, name: str) -> Scheme | None:
        """How the matrix `name` is quantized; None where it isn't."""
        ...

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or the codes of one that is quantized."""
        ...


class Checkpoint:
    """A folder's safetensors, memory-mapped; names are known before any tensor is read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in self._shards(folder):
            handle = self._open(file)
            self._files[file.name] = handle
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in self._where:
                    raise WeightsError(
                        f"Tensor {name!r} is in {self._where[name]} and in {file.name}."
                    )
                self._where[name] = file.name

    @staticmethod
    def _shards(folder: Path) -> list[Path]:
        whole = folder / "model.safetensors"  # beside it may lie an adapter or another layout
        if whole.exists():  # before the index of an earlier save, as in transformers
            return [whole]
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                text = index.read_text(encoding="utf-8")
                names = sorted({str(name) for name in json.loads(text)["weight_map"].values()})
            except (
                OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
            ) as error:  # fmt: skip
                raise WeightsError(f"{index} is not a valid index: {error!r}") from error
            missing = [n for n in names if not (folder / n).exists()]
            if missing:
                raise WeightsError(
                    f"{index.name} names {len(names)} files, {len(missing)} of them missing in "
                    f"{folder}: {', '.join(missing[:5])}. Download them again."
                )
            return [folder / n for n in names]
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            other = [p.name for p in folder.glob("*.bin")]
            hint = f" It has {', '.join(other[:3])}, which isn't read." if other else ""
            raise ModelNotFoundError(f"{folder} has no *.safetensors file.{hint}")
        return files

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{file} ({file.stat().st_size} bytes) can't be read: {error}. "
                "It is corrupt or was cut off: download or convert it again."
            ) from error

    @property
    def config(self) -> dict[str, Any]:
        """Of config.json."""
        return read_config(self.path)

    def scheme(self, name: str) -> Scheme | None:
        """None: every tensor holds plain values."""
        return None

    def files(self) -> list[Path]:
        """The files in the folder that hold tensors, sorted."""
        return [self.path / name for name in sorted(self._files)]

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> torch.dtype:
        """What a tensor's elements are."""
        text = str(self._files[self._where[name]].get_slice(name).get_dtype())
        if text not in _ELEMENTS:
            raise WeightsError(f"Tensor {name!r} has elements {text!r}, which aren't read.")
        return _ELEMENTS[text]

    def stored_as(self, name: str) -> str:
        """The name of a tensor's elements: `bfloat16`."""
        return str(self.stored_dtype(name)).removeprefix("torch.")

    def dtype(self) -> torch.dtype:
        """What most of the tensors are stored in."""
        return self.dtype_of(self._where)

    def dtype_of(self, names: Iterable[str]) -> torch.dtype:
        """What most of the tensors called `names` are stored in."""
        counts: dict[torch.dtype, int] = {}
        for name in names:
            stored = self.stored_dtype(name)
            if stored in _STORED:
                size = math.prod(self.shape(name))
                counts[stored] = counts.get(stored, 0) + size
        if not counts:
            raise WeightsError(f"{self.path} has no float32, bfloat16 or float16 tensor.")
        return max(counts, key=lambda stored: counts[stored])

    def read(self, name: str) -> Tensor:
        """A tensor, mapped from its file where that is possible."""
        tensor = self.raw(name)
        if tensor.dtype not in _STORED:
            more = ""
            if tensor.dtype.itemsize == 1:  # what is known as quantized isn't read here
                more = " Codes of a quantized matrix need scales beside them: none are there."
            raise WeightsError(
                f"Tensor {name!r} is {tensor.dtype}; float32, bfloat16 and float16 load.{more}"
            )
        return tensor

    def raw(self, name: str) -> Tensor:
        """A tensor of whatever elements, mapped from its file where that is possible."""
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor
