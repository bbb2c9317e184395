"""Blocks on disk: prefixes that outlive the process.

A block is known by a digest of all tokens up to its end, of whose they are (a salt) and of the
model that computed it; so whoever computes the same finds it, after a restart or in another
process. Files are written by a thread of their own, whole or not at all, and checked by their sums
when they are read. What doesn't fit is dropped: nothing waits for a disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import heapq
import logging
import os
import secrets
import stat
import struct
import threading
import time
import weakref
import zlib
from collections import deque
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
_BEGUN_S = 10.0
"""After which a file that somebody began to write is given up where they don't lock it any more."""
_ABANDONED_S = 3600.0
"""After which it is in any case."""
_LOOKS_S = 30.0
"""After which it is looked again what others have written."""
_TELLS_S = 60.0
"""Between two warnings of a disk's trouble."""
_STEP_NS = 1000
"""By which a block is older than the one before it."""


class DiskStore:
    """Blocks of one model in a folder, of at most so many bytes; those used longest ago go first.

    Its methods are the engine thread's. What is queued is written when it goes.
    """

    def __init__(self, folder: Path, model: str, rows: Sequence[torch.Tensor], limit: int) -> None:
        """model: digest of all that decides what blocks hold. rows: the cache, `block_rows`.

        Raises ConfigError for a folder that can't be written to, or a limit below a block.
        """
        self._rows = rows
        size = sum(row[0].nbytes for row in rows)
        if limit < size + _HEAD.size:
            raise ConfigError(
                f"prefix_cache_disk_space is {limit:,} bytes, and a block takes "
                f"{size + _HEAD.size:,}: none would be kept. Give it more, as GiB."
            )
        try:
            self.files = Files(folder / model, size, limit)
        except OSError as error:
            raise ConfigError(
                f"prefix_cache_dir={str(folder)!r} can't be written to: {error.strerror}. Choose "
                "another folder, or leave it out."
            ) from error
        self.close = weakref.finalize(self, self.files.close)  # at the process's end as well

    def put(self, digest: str, block: int, after: str | None) -> None:
        """Keep what `block` holds, unless it is there, or there is more to write than can be.

        after: digest of the block before it, if there is one.
        """
        if self.files.takes(digest, after):
            parts = (next(iter(read_blocks(row, [block]))) for row in self._rows)
            self.files.put(digest, b"".join(part.tobytes() for part in parts), after)

    def load(self, blocks: Sequence[int], each: Sequence[bytes]) -> None:
        """Write what `files.get` gave into blocks."""
        begin = 0
        for row in self._rows:
            dtype = np.int64 if row.dtype is torch.int64 else np.int8
            parts: list[Words] = [np.frombuffer(data, dtype, row.shape[1], begin) for data in each]
            write_blocks(row, list(blocks), parts)
            begin += row[0].nbytes


class Files:
    """A folder of blocks, and the thread that writes them.

    A block's time is when a prompt last began that has it, less a microsecond for each block before
    it: so of prompts those used longest ago go first, and of one the last block before the first,
    without which none behind it is found. It is its file's time as well.
    """

    def __init__(self, folder: Path, size: int, limit: int) -> None:
        """size: bytes of a block; limit: of all. Raises OSError."""
        self.folder, self.size, self._limit = folder, size, limit
        self._times: dict[str, int] = {}  # of blocks on disk or queued, in nanoseconds
        self._oldest: list[tuple[int, str]] = []  # a heap of them; what isn't its time is past
        self._queue: deque[tuple[str, bytes | None]] = deque()  # None: was used
        self._unwritten: dict[str, bytes] = {}  # of those in the queue
        self._queued = 0
        self._ended = 0  # of the queue, written or not
        self._wake = threading.Condition()
        self._ending = False
        self._seen_s = 0.0  # when it was looked around
        self._told_s = -_TELLS_S  # when of trouble
        self._own = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"  # of files that aren't whole
        self.read = self.written = self.dropped = self.damaged = 0  # blocks
        self._make_folder()
        self._look_around()
        probe = folder / f"probe.{self._own}"
        probe.write_bytes(b"")
        probe.unlink()
        self._writer = threading.Thread(target=self._write, name="penstock-disk", daemon=True)
        self._writer.start()

    def _make_folder(self) -> None:
        """For its owner alone, and so the one above it where that is made."""
        self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(0o700, exist_ok=True)

    def _look_around(self) -> None:
        """Which blocks there are; what others began and left behind is removed."""
        found: dict[str, int] = {}
        now = time.time()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process made room meanwhile
                    about = entry.stat()
                    if not stat.S_ISREG(about.st_mode):
                        continue
                    if entry.name.endswith(_SUFFIX):
                        found[entry.name.removesuffix(_SUFFIX)] = about.st_mtime_ns
                    elif entry.name.endswith(".tmp") and _is_abandoned(
                        entry.path, now - about.st_mtime
                    ):
                        os.unlink(entry.path)
        with self._wake:
            gone = [x for x in self._times if x not in found and x not in self._unwritten]
            for name in gone:
                del self._times[name]
            for name, at in found.items():
                if at > self._times.get(name, -1):
                    self._set_time(name, at)
        self._seen_s = time.monotonic()

    def _set_time(self, digest: str, at: int) -> None:
        self._times[digest] = at
        heapq.heappush(self._oldest, (at, digest))
        if len(self._oldest) > 4 * len(self._times) + 1024:
            self._oldest = [(time, name) for name, time in self._times.items()]
            heapq.heapify(self._oldest)

    @property
    def nbytes(self) -> int:
        """Of all blocks, those that are still queued included."""
        return len(self._times) * (self.size + _HEAD.size)

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, digest: str) -> bool:
        """Whether a block is there, written by whom ever."""
        if digest in self._times:
            return True
        try:
            about = self._file(digest).stat()
        except OSError:
            return False
        if not stat.S_ISREG(about.st_mode):
            return False
        with self._wake:
            self._set_time(digest, about.st_mtime_ns)
        return True

    @property
    def is_full(self) -> bool:
        """Whether a block more makes another one go."""
        return self.nbytes + self.size + _HEAD.size > self._limit

    def holds(self, blocks: int) -> bool:
        """Whether so many fit, if all others make room."""
        return blocks * (self.size + _HEAD.size) <= self._limit

    @property
    def is_busy(self) -> bool:
        """Whether as much waits to be written as may: a block at least."""
        return self._queued > 0 and self._queued + self.size > QUEUED_BYTES

    def takes(self, digest: str, after: str | None = None) -> bool:
        """Whether a block isn't there yet and can be queued; one that can't is counted.

        after: the block before it, without which nobody would find it.
        """
        with self._wake:
            if digest in self._times:
                return False
            fits = not (self.is_busy or self._ending)
            fits = fits and (after is None or after in self._times)
            self.dropped += not fits
            return fits

    def put(self, digest: str, data: bytes, after: str | None = None) -> None:
        """Queue what a block holds. after: the block before it."""
        with self._wake:
            now = time.time_ns()
            before = self._times.get(after, now) if after is not None else now
            self._set_time(digest, before - _STEP_NS)
            self._queue.append((digest, data))
            self._unwritten[digest] = data
            self._queued += len(data)
            self._wake.notify()

    def use(self, digests: Sequence[str]) -> None:
        """A prompt begins that has these blocks, one after the other."""
        with self._wake:
            now = time.time_ns()
            for depth, digest in enumerate(digests):
                if digest in self._times and not self._ending:
                    self._set_time(digest, now - depth * _STEP_NS)
                    self._queue.append((digest, None))
            self._wake.notify()

    def mark(self) -> int:
        """What `reached` is asked with whether all that is queued now was dealt with."""
        with self._wake:
            return self._ended + len(self._queue)

    def reached(self, mark: int) -> bool:
        """Whether what was queued by then is on disk, or couldn't be written. Any thread's."""
        return self._ended >= mark

    def get(self, digest: str) -> bytes | None:
        """The bytes of a block; None where there are none, or they are damaged."""
        with self._wake:
            unwritten = self._unwritten.get(digest)
        if unwritten is not None:
            return unwritten
        try:
            with open(self._file(digest), "rb") as file:
                magic, length, checksum = _HEAD.unpack(file.read(_HEAD.size))
                data = file.read(self.size + 1)
            if magic != _MAGIC or not length == len(data) == self.size:
                raise ValueError(f"{len(data):,} bytes where a block has {self.size:,}")
            if zlib.crc32(data) != checksum:
                raise ValueError("its bytes don't match their checksum")
        except FileNotFoundError:  # another process made room
            self._lose(digest)
            return None
        except OSError as error:  # of the system: it may be whole
            self._tell("%s can't be read: %s.", self._file(digest), error)
            return None
        except (ValueError, struct.error) as error:
            logger.warning("%s is damaged and is removed: %s.", self._file(digest), error)
            self.damaged += 1
            self._lose(digest)
            return None
        self.read += 1
        return data

    def _lose(self, digest: str) -> None:
        with self._wake:
            self._times.pop(digest, None)
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
                    self._touch(digest)
                else:
                    self._put(digest, data)
            except Exception as error:  # whatever it is, nobody else would write any more
                self._tell("Blocks aren't kept on disk: %s.", error)
                with self._wake:
                    self._times.pop(digest, None)
                    self.dropped += 1
            with self._wake:
                self._queue.popleft()
                self._ended += 1
                if data is not None:
                    self._queued -= len(data)
                    if self._unwritten.get(digest) is data:
                        del self._unwritten[digest]

    def _tell(self, message: str, *about: object) -> None:
        """In the log, once a minute."""
        if time.monotonic() - self._told_s > _TELLS_S:
            self._told_s = time.monotonic()
            logger.warning(message, *about)

    def _touch(self, digest: str) -> None:
        """Its file has its time, for those who look later."""
        at = self._times.get(digest)
        if at is not None:
            with contextlib.suppress(FileNotFoundError):  # another process made room meanwhile
                os.utime(self._file(digest), ns=(at, at))

    def _put(self, digest: str, data: bytes) -> None:
        if time.monotonic() - self._seen_s > _LOOKS_S:  # others may have written
            self._make_folder()
            self._look_around()
        self._make_room()
        if digest not in self._times:  # it had to go first itself
            with self._wake:
                self.dropped += 1
            return
        beside = self._file(digest).with_suffix(f".{self._own}")
        try:
            try:
                self._write_file(beside, data)
            except FileNotFoundError:  # somebody has removed the folder
                self._make_folder()
                self._write_file(beside, data)
                self._seen_s = 0.0
            os.replace(beside, self._file(digest))
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        self._touch(digest)
        self.written += 1

    def _write_file(self, path: Path, data: bytes) -> None:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as out:
            with contextlib.suppress(OSError):  # where there are no locks, nobody goes by them
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            out.write(_HEAD.pack(_MAGIC, len(data), zlib.crc32(data)))
            out.write(data)

    def _make_room(self) -> None:
        """Remove the blocks that were used longest ago, until the limit holds."""
        while True:
            with self._wake:
                if self.nbytes <= self._limit:
                    return
                at, oldest = heapq.heappop(self._oldest)
                if self._times.get(oldest) != at:
                    continue
                del self._times[oldest]
            self._file(oldest).unlink(missing_ok=True)


def _is_abandoned(path: str, age_s: float) -> bool:
    """Whether whoever began to write a file is gone. A process's number wouldn't tell: folders are
    shared among containers and machines.
    """
    if not _BEGUN_S <= age_s <= _ABANDONED_S:
        return age_s > _ABANDONED_S
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is being written, or there are no locks here
        return False
    return True


def digest_of(parent: str, tokens: Sequence[int]) -> str:
    """Of a block after the one, or the root, whose digest is `parent`."""
    data = np.array(tokens, dtype=np.int64).tobytes()
    return hashlib.sha256(parent.encode() + data).hexdigest()


def root_digest(salt: str | None) -> str:
    """Of where the sequences of one salt begin."""
    own = b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")
    return hashlib.sha256(own).hexdigest()
