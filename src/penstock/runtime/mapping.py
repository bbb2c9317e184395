"""A file of tensors in memory: read-only pages that all who map it share.

Contexts of one process share one mapping, processes share the page cache.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import EngineFolderError

PAGE = 4096
"""Where tensors begin: a multiple of this many bytes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_WILLNEED, _MADV_HUGEPAGE = 3, 14
_FAILED = ctypes.c_void_p(-1).value

_Key = tuple[int, int, int, int]
_guard = threading.Lock()
_mapped: weakref.WeakValueDictionary[_Key, Any] = weakref.WeakValueDictionary()


def map_file(path: Path, size: int) -> Tensor:
    """The file's bytes, uint8 [size]; it stays mapped as long as any view of them lives.

    The same file (by device, inode, size and time of change) is mapped once in a process. Its pages
    can't be written to. Raises EngineFolderError where the file isn't `size` bytes long.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size != size:
            raise EngineFolderError(f"{path} has {status.st_size:,} bytes instead of {size:,}")
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        with _guard:
            pages = _mapped.get(key)
            if pages is None:
                pages = _map(file.fileno(), size)
                _mapped[key] = pages
    return torch.frombuffer(pages, dtype=torch.uint8)


def _map(descriptor: int, size: int) -> Any:
    """The pages as a ctypes array, unmapped when it is gone."""
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {size:,} bytes failed: {os.strerror(error)}")
    # in pages of 2 MB where the file system has them, of which a stream looks up fewer; what isn't
    # in the page cache begins to be read
    _libc.madvise(address, size, _MADV_HUGEPAGE)
    _libc.madvise(address, size, _MADV_WILLNEED)
    pages = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(pages, _libc.munmap, address, size).atexit = False  # tensors may outlive us
    return pages


def mapped_files() -> int:
    """How many files are mapped in this process."""
    with _guard:
        return len(_mapped)
