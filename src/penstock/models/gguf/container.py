"""The container: metadata and tensors of a GGUF file, mapped, each length checked before use.

Source: the format's specification, docs/gguf.md of github.com/ggml-org/ggml, versions 2 and 3.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from penstock.models.gguf.blocks import BLOCKS, TYPE_NAMES, Block
from penstock.models.gguf.cursor import Cursor

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
"""In the name of a file that continues another."""


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that is, or by its name should be, GGUF."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its block type, and where its bytes are."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as everywhere but in the file
    block: Block
    data: NDArray[np.uint8]  # [nbytes], a view of the mapped file

    @property
    def nbytes(self) -> int:
        """As stored."""
        return int(self.data.size)


@dataclass(frozen=True, slots=True)
class Container:
    """What a GGUF file holds, all of its parts together."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]  # all parts


_Info = tuple[str, tuple[int, ...], Block, int]
"""Name, shape, block type, offset in the data."""


def read_container(path: Path) -> Container:
    """Read the file `path`, and its siblings where it is one part of several.

    Nothing but the metadata is copied. Raises WeightsError for a damaged file,
    UnsupportedModelError for a version or block type that isn't built.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise WeightsError(f"{path}: split.count is {count!r}, not a number of files.")
    if count == 1:
        return first
    return _join(path, count)


def _join(path: Path, count: int) -> Container:
    """The `count` parts that `path` is one of, as one container; the first has the metadata."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelNotFoundError(
            f"{path} is one of {count} files, so its name must end in -00001-of-{count:05}.gguf "
            "for the others to be found. Give the files their first names again."
        )
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{path} is one of {count} files, {len(missing)} of them missing in {path.parent}: "
            f"{', '.join(missing[:5])}. Download them again."
        )
    parts = [_read_part(path.parent / name) for name in names]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        found = part.metadata.get("split.no"), part.metadata.get("split.count")
        if found != (number, count):
            raise WeightsError(
                f"{part.path} says it is part {found[0]} of {found[1]}, not {number} of {count}. "
                "The files belong to different models."
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise WeightsError(f"Tensor {name!r} is in {part.path.name} and in one before.")
            tensors[name] = tensor
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise WeightsError(
            f"{path}: {total} tensors should be in {count} files; {len(tensors)} are."
        )
    files = tuple(part.path for part in parts)
    return Container(parts[0].path, parts[0].metadata, tensors, files)


def _read_part(path: Path) -> Container:
    view = _map(path)
    cursor = Cursor(view, str(path))
    _check_version(path, view, cursor)
    num_tensors = cursor.count("tensors", 24)
    metadata = _metadata(cursor)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two from 8 on")
    infos = [_info(cursor) for _ in range(num_tensors)]
    return Container(path, metadata, _tensors(infos, view, cursor, alignment), (path,))


def _check_version(path: Path, view: memoryview, cursor: Cursor) -> None:
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise WeightsError(
            f"{path} ({len(view):,} bytes) isn't a GGUF file: it begins with "
            f"{bytes(view[:4])!r}, not {MAGIC!r}."
        )
    cursor.at = len(MAGIC)
    version = cursor.uint32("the version")
    if version in _VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise UnsupportedModelError(
            f"{path} is a GGUF file for machines of the other byte order. Convert it to little "
            "endian."
        )
    raise UnsupportedModelError(
        f"{path} has version {version} of GGUF; 2 and 3 are read. Convert it again."
    )


def _tensors(
    infos: list[_Info], view: memoryview, cursor: Cursor, alignment: int
) -> dict[str, TensorInfo]:
    """Tensors with their bytes, none of them beyond the end or over another."""
    start = -(-cursor.at // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    data = np.frombuffer(view, np.uint8)
    spans: list[tuple[int, int, str]] = []
    for name, shape, block, offset in infos:
        nbytes = math.prod(shape) // block.values * block.nbytes
        if name in found:
            raise cursor.fail(f"tensor {name!r} is there twice")
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} begins at {offset:,}, no multiple of {alignment}")
        if start + offset + nbytes > len(view):
            raise cursor.fail(
                f"tensor {name!r} {list(shape)} in {block.name} takes {nbytes:,} bytes from "
                f"{start + offset:,} on, beyond the end"
            )
        spans.append((offset, offset + nbytes, name))
        at = start + offset
        found[name] = TensorInfo(name, shape, block, data[at : at + nbytes])
    spans.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise cursor.fail(f"tensors {first!r} and {second!r} overlap by {end - begin:,} bytes")
    return found


def _map(path: Path) -> memoryview:
    """The file, mapped. Copy-on-write, as torch doesn't take memory that can't be written to."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except ValueError as error:  # nothing to map
        raise WeightsError(f"{path} is empty. Download it again.") from error
    except OSError as error:
        raise ModelNotFoundError(f"{path} can't be read: {error}") from error


def _metadata(cursor: Cursor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(cursor.count("metadata keys", 13)):
        key = cursor.string("a metadata key")
        if key in found:
            raise cursor.fail(f"the metadata key {key!r} is there twice")
        found[key] = cursor.value(key)
    return found


def _info(cursor: Cursor) -> _Info:
    """The tensor described next."""
    name = cursor.string("a tensor's name")
    dimensions = cursor.uint32(f"the number of dimensions of {name!r}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions; 1 to 4 are possible")
    sizes = [cursor.uint64(f"a dimension of {name!r}") for _ in range(dimensions)]
    kind = cursor.uint32(f"the type of {name!r}")
    offset = cursor.uint64(f"the offset of {name!r}")
    if kind not in BLOCKS:
        raise UnsupportedModelError(
            f"Tensor {name!r} is in {TYPE_NAMES.get(kind, f'type {kind}')}, which isn't built. "
            f"Built: {', '.join(block.name for block in BLOCKS.values())}."
        )
    block = BLOCKS[kind]
    if 0 in sizes or sizes[0] % block.values:
        raise cursor.fail(
            f"tensor {name!r} has rows of {sizes[0]} and shape {sizes[::-1]}, which blocks of "
            f"{block.values} ({block.name}) don't fill"
        )
    return name, tuple(sizes[::-1]), block, offset
