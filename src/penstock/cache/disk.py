"""Blocks on disk: prefixes that outlive the process.

A block is known by a digest of all tokens up to its end, of whose they are (a salt) and of the
model that computed it; so whoever computes the same finds it, after a restart or in another
process. Files are written by a thread of their own, whole or not at all, and checked by their sums
when they are read. What doesn't fit is dropped: nothing waits for a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
import time
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from penstock.cache.swap import Words, read_blocks, write_blocks
from penstock.errors import ConfigError

logger = logging.getLogger("penstock")

QUEUED_BYTES = 64 << 20
"""Of blocks that wait to be written, at most; further ones are dropped."""
_HEAD = struct.Struct("<8sQI")  # what it is, bytes that follow, their checksum
_MAGIC = b"penstkv1"
_SUFFIX = ".kv"
_ABANDONED_S = 3600.0
"""After which a file that somebody began to write is given up."""


class DiskStore:
    """Blocks of one model in a folder, of at most so many bytes; those used longest ago go first.

    Its methods are the engine thread's. What is queued is written when it goes.
    """

    def __init__(self, folder: Path, model: str, rows: Sequence[torch.Tensor], limit: int) -> None:
        """model: digest of all that decides what blocks hold. rows: the cache, `block_rows`.

        Raises ConfigError for a folder that can't be written to.
        """
        self._rows = rows
        try:
            self.files = Files(folder / model, sum(row[0].nbytes for row in rows), limit)
        except OSError as error:
            raise ConfigError(
                f"prefix_cache_dir={str(folder)!r} can't be written to: {error.strerror}. Choose "
                "another folder, or leave it out."
            ) from error
        self.close = weakref.finalize(self, self.files.close)  # at the process's end as well

    def put(self, digest: str, block: int) -> None:
        """Keep what `block` holds, unless it is there, or there is more to write than can be."""
        if self.files.takes(digest):
            parts = (next(iter(read_blocks(row, [block]))) for row in self._rows)
            self.files.put(digest, b"".join(part.tobytes() for part in parts))

    def load(self, blocks: Sequence[int], each: Sequence[bytes]) -> None:
        """Write what `files.get` gave into blocks."""
        begin = 0
        for row in self._rows:
            dtype = np.int64 if row.dtype is torch.int64 else np.int8
            parts: list[Words] = [np.frombuffer(data, dtype, row.shape[1], begin) for data in each]
            write_blocks(row, list(blocks), parts)
            begin += row[0].nbytes


class Files:
    """A folder of blocks, and the thread that writes them."""

    def __init__(self, folder: Path, size: int, limit: int) -> None:
        """size: bytes of a block; limit: of all. Raises OSError."""
        self.folder, self._size, self._limit = folder, size, limit
        self._known: OrderedDict[str, None] = OrderedDict()  # on disk or queued; oldest use first
        self._queue: deque[tuple[str, bytes | None]] = deque()  # None: was used
        self._queued = 0
        self._wake = threading.Condition()
        self._ending = False
        self.read = self.written = self.dropped = self.damaged = 0  # blocks
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self._look_around()
        probe = folder / f"{os.getpid()}.tmp"
        probe.write_bytes(b"")
        probe.unlink()
        self._writer = threading.Thread(target=self._write, name="penstock-disk", daemon=True)
        self._writer.start()

    def _look_around(self) -> None:
        """Which blocks there are; what others began and left behind is removed."""
        found: list[tuple[float, str]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                stat = entry.stat()
                if entry.name.endswith(_SUFFIX):
                    found.append((stat.st_mtime, entry.name.removesuffix(_SUFFIX)))
                elif entry.name.endswith(".tmp") and time.time() - stat.st_mtime > _ABANDONED_S:
                    os.unlink(entry.path)
        self._known = OrderedDict((name, None) for _, name in sorted(found))

    @property
    def nbytes(self) -> int:
        """Of all blocks, those that are still queued included."""
        return len(self._known) * (self._size + _HEAD.size)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def takes(self, digest: str) -> bool:
        """Whether a block isn't there yet and can be queued; one that can't is counted."""
        with self._wake:
            if digest in self._known:
                return False
            fits = self._queued + self._size <= QUEUED_BYTES and not self._ending
            self.dropped += not fits
            return fits

    def put(self, digest: str, data: bytes) -> None:
        """Queue what a block holds."""
        with self._wake:
            self._known[digest] = None
            self._queue.append((digest, data))
            self._queued += len(data)
            self._wake.notify()

    def get(self, digest: str) -> bytes | None:
        """The bytes of a block; None where there are none, or they are damaged."""
        with self._wake:
            queued = next((data for name, data in self._queue if name == digest and data), None)
        if queued is not None:
            return queued
        try:
            with open(self._file(digest), "rb") as file:
                magic, length, checksum = _HEAD.unpack(file.read(_HEAD.size))
                data = file.read(self._size + 1)
            if magic != _MAGIC or not length == len(data) == self._size:
                raise ValueError(f"{len(data):,} bytes where a block has {self._size:,}")
            if zlib.crc32(data) != checksum:
                raise ValueError("its bytes don't match their checksum")
        except FileNotFoundError:  # another process made room
            self._lose(digest)
            return None
        except (OSError, ValueError, struct.error) as error:
            logger.warning("%s is damaged and is removed: %s.", self._file(digest), error)
            self.damaged += 1
            self._lose(digest)
            return None
        self.read += 1
        with self._wake:
            self._queue.append((digest, None))
            self._wake.notify()
        return data

    def _lose(self, digest: str) -> None:
        with self._wake:
            self._known.pop(digest, None)
        with contextlib.suppress(OSError):  # it isn't there, or can't be removed: nobody reads it
            self._file(digest).unlink()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued, for so long at most, and stop."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        self._writer.join(timeout_s)

    # ── the thread that writes ───────────────────────────────────────────────────────────────

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}{_SUFFIX}"

    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._ending:
                    self._wake.wait()
                if not self._queue:
                    return
                digest, data = self._queue[0]
            try:
                if data is None:
                    self._used(digest)
                else:
                    self._put(digest, data)
            except OSError as error:
                logger.warning("A block isn't kept on disk: %s.", error)
                with self._wake:
                    self._known.pop(digest, None)
                    self.dropped += 1
            with self._wake:
                self._queue.popleft()
                self._queued -= len(data or b"")

    def _used(self, digest: str) -> None:
        """It goes later than others, also where another process looks."""
        with self._wake:
            if digest in self._known:
                self._known.move_to_end(digest)
        with contextlib.suppress(FileNotFoundError):  # another process made room meanwhile
            os.utime(self._file(digest))

    def _put(self, digest: str, data: bytes) -> None:
        self._make_room()
        file = self._file(digest)
        beside = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(beside, "wb") as out:
                out.write(_HEAD.pack(_MAGIC, len(data), zlib.crc32(data)))
                out.write(data)
            os.replace(beside, file)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        self.written += 1

    def _make_room(self) -> None:
        """Remove the blocks that were used longest ago, until the limit holds."""
        while True:
            with self._wake:
                if self.nbytes <= self._limit:
                    return
                queued = {name for name, data in self._queue if data is not None}
                oldest = next((name for name in self._known if name not in queued), None)
                if oldest is None:
                    return
                del self._known[oldest]
            self._file(oldest).unlink(missing_ok=True)


def digest_of(parent: str, tokens: Sequence[int]) -> str:
    """Of a block after the one, or the root, whose digest is `parent`."""
    data = np.array(tokens, dtype=np.int64).tobytes()
    return hashlib.sha256(parent.encode() + data).hexdigest()


def root_digest(salt: str | None) -> str:
    """Of where the sequences of one salt begin."""
    return hashlib.sha256(b"" if salt is None else b"salt " + salt.encode()).hexdigest()
