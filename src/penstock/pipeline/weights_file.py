"""Packed tensors, written one after the other as a model is read: none is kept in memory."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from penstock.models.finite import check_finite
from penstock.nn.parameters import Loadable
from penstock.runtime.mapping import PAGE

_TRIM_BYTES = 16 << 20
"""glibc keeps what is freed: without trimming, half of a model piles up while it is packed."""

_HUGE = 2 << 20
"""Bytes of a huge page. Written piece by piece of that, a file lies in such pages in the page cache
(ext4 from Linux 6.16 on, xfs), and mapped weights are streamed up to 1.5 times as fast."""

_libc = ctypes.CDLL(None)


class WeightsFile:
    """Writes tensors from multiples of 4,096 bytes on, and their index."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=_HUGE)  # noqa: SIM115 (closed by __exit__)
        self._tensors: dict[str, dict[str, Any]] = {}
        self._untrimmed = 0  # bytes that were packed and freed since the heap was trimmed

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, contiguous. Raises WeightsError where a value isn't finite."""
        check_finite(name, tensor)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        start = -(-self._file.tell() // PAGE) * PAGE
        self._write(memoryview(bytes(start - self._file.tell())))
        self._write(data)
        self._tensors[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "offset": start,
            "bytes": data.nbytes,
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    def _write(self, data: memoryview) -> None:
        """Up to the end of a huge page at a time, so that each leaves the buffer as a whole."""
        while data:
            room = _HUGE - self._file.tell() % _HUGE
            self._file.write(data[:room])
            data = data[room:]

    def take(self, name: str, module: Loadable) -> None:
        """Write what a module has packed since the last time, and leave its shapes only."""
        for part, tensor in list(module._parameters.items()):
            if tensor is not None and not tensor.is_meta:
                self.add(f"{name}.{part}", tensor)
                module.restore(part, torch.empty_like(tensor, device="meta"))
                self._untrimmed += tensor.nbytes
        if self._untrimmed >= _TRIM_BYTES:
            self._untrimmed = 0
            if hasattr(_libc, "malloc_trim"):
                _libc.malloc_trim(0)

    def index(self, file: str) -> Mapping[str, Any]:
        """What a manifest says of this file; ends it with a whole page."""
        size = -(-self._file.tell() // PAGE) * PAGE
        self._file.truncate(size)
        self._file.flush()
        return {"file": file, "bytes": size, "tensors": self._tensors}
