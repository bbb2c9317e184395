"""Safetensors files written one tensor at a time: memory holds no more than that tensor.

A file is the header's length in 8 bytes, a JSON header that may end in spaces, and the data without
gaps. Room for the header is left in front and filled at the end. Source: the format's README,
github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import WeightsError

_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

ROOM_BYTES = 1 << 18
"""For the header: about 2,000 tensors."""

_ALIGN = 8


class ShardWriter:
    """Writes `model.safetensors`, or shards of at most `limit` bytes and their index.

    Use it as a context: files get their names when it ends well, and are removed when it doesn't.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._done: list[list[str]] = []  # names of the tensors in each finished file
        self._file: FileIO | None = None
        self._header: dict[str, Any] = {}
        self._small: list[tuple[str, Tensor]] = []
        self._size = self._text = self._total = 0
        self._seen: set[str] = set()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            try:
                self._finish()
                self._rename()
                return
            except BaseException:
                self._discard()
                raise
        self._discard()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; WeightsError where there is no room for it."""
        if name in self._seen:
            raise WeightsError(f"Tensor {name!r} is written twice.")
        self._seen.add(name)
        size = tensor.nbytes
        entry = len(json.dumps(name)) + 120
        full = self._text + entry > ROOM_BYTES - 64 or (
            self._size and self._size + size > self.limit
        )
        if self._file is not None and full:
            self._finish()
        if self._file is None:
            self._file = self._part(len(self._done)).open("wb", buffering=0)
            self._put(bytes(8 + ROOM_BYTES), "room for the header")
            self._header, self._size, self._text = {}, 0, 0
        self._text += entry
        if size % _ALIGN:  # at the end, largest elements first: those after it stay aligned
            self._small.append((name, tensor.clone()))
            self._size += size
        else:
            self._size += size
            self._write(name, tensor)

    @staticmethod
    def remains(folder: Path) -> list[Path]:
        """Files that a writer left which was killed."""
        return sorted(folder.glob("model-*.safetensors.partial"))

    def _part(self, index: int) -> Path:
        return self.folder / f"model-{index + 1:05}.safetensors.partial"

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        start = self._file.tell() - 8 - ROOM_BYTES
        flat = tensor.detach().contiguous().flatten()
        self._put(flat.view(torch.uint8).numpy().data, f"{name} ({tensor.nbytes} bytes)")
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }

    def _put(self, data: bytes | memoryview, what: str, at: int | None = None) -> None:
        assert self._file is not None
        try:
            if at is not None:
                self._file.seek(at)
            view = memoryview(data)
            while view:  # a call may take only a part
                view = view[self._file.write(view) :]
        except OSError as error:
            raise WeightsError(f"{self.folder}: {what} can't be written: {error}.") from error

    def _finish(self) -> None:
        """Complete the file that is being written."""
        if self._file is None:
            return
        for name, tensor in sorted(self._small, key=lambda pair: -pair[1].dtype.itemsize):
            self._write(name, tensor)
        self._small = []
        header = {"__metadata__": {"format": "pt"}, **self._header}
        text = json.dumps(header, separators=(",", ":")).encode()
        self._put(ROOM_BYTES.to_bytes(8, "little") + text.ljust(ROOM_BYTES), "the header", 0)
        self._file.close()
        self._file = None
        self._done.append(list(self._header))
        self._total += self._size

    def _rename(self) -> None:
        count = len(self._done)
        if count == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for i, names in enumerate(self._done):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._part(i).rename(self.folder / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True)
        (self.folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
        for i in range(len(self._done) + 1):
            self._part(i).unlink(missing_ok=True)
