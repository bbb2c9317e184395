"""`engine.json`: every field of the kind and the size that it must have, before any is used.

A digest tells what was damaged; this tells what was edited, or written by something else.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import torch

from penstock.config import KvCacheDtype
from penstock.errors import EngineFolderError, kind_of
from penstock.runtime.mapping import PAGE

DEVICES = ("cpu", "cuda")
FORWARDS = ("program", "package", "graphs")
"""What an engine's steps run by: one native call, an AOTInductor package; on a GPU, graphs that
are recorded when it starts.
"""

MOST_BYTES = 64 << 20
"""Of a manifest: a million tensors' worth. More is no manifest, and is not read."""

_MOST = 2**31 - 1
"""Tokens, sequences: a step's arrays are int32."""

_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}
_COMPUTED = ("bfloat16", "float32")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises EngineFolderError, without the way out."""
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise EngineFolderError(
                f"{file.name} has {size:,} bytes, more than the {MOST_BYTES:,} of any engine's"
            )
        data = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise EngineFolderError(f"{file.name} is missing") from error
    except (ValueError, RecursionError) as error:
        raise EngineFolderError(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise EngineFolderError(f"{file.name} holds {kind_of(data)}, not an object")
    return data


class Fields:
    """An object in a manifest; what is read from it is of the right kind, or named."""

    def __init__(self, data: object, where: str) -> None:
        """where: what the object is called, a dot behind it; empty for the manifest itself."""
        if not isinstance(data, dict):
            raise _wrong(where.rstrip(".") or "the manifest", data, "an object")
        self.data: Mapping[str, Any] = data
        self._where = where

    def _value(self, key: str) -> Any:
        if key not in self.data:
            raise EngineFolderError(f"its manifest lacks {self._where}{key}")
        return self.data[key]

    def wrong(self, key: str, wanted: str) -> EngineFolderError:
        """The error for a field that isn't what it must be."""
        return _wrong(f"{self._where}{key}", self.data[key], wanted)

    def whole(self, key: str, least: int = 0, most: int = 2**62) -> int:
        """A whole number."""
        value = self._value(key)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def text(self, key: str, one_of: tuple[str, ...] = ()) -> str:
        """A text."""
        value = self._value(key)
        if not isinstance(value, str) or (one_of and value not in one_of):
            raise self.wrong(key, f"one of {', '.join(one_of)}" if one_of else "a text")
        return value

    def optional_text(self, key: str) -> None:
        """A text or null."""
        if self._value(key) is not None:
            self.text(key)

    def sha256(self, key: str) -> None:
        """A sum in hexadecimal."""
        if not _SHA256.fullmatch(self.text(key)):
            raise self.wrong(key, "a SHA-256 in hexadecimal")

    def sizes(self, key: str, least: int) -> list[int]:
        """A list of whole numbers."""
        value = self._value(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list of whole numbers")
        each = Fields({str(i): one for i, one in enumerate(value)}, f"{self._where}{key}.")
        return [each.whole(str(i), least, _MOST) for i in range(len(value))]

    def object(self, key: str) -> Fields:
        """An object in it."""
        return Fields(self._value(key), f"{self._where}{key}.")


def check_manifest(manifest: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    """Raise EngineFolderError, naming the field, for a manifest that no build has written.

    needed: files that must be listed.
    """
    fields = Fields(manifest, "")
    command = fields.text("command")
    try:
        shlex.split(command)
    except ValueError as error:
        raise fields.wrong("command", "a command line") from error
    for key in ("family", "weight_formats"):
        fields.text(key)
    fields.text("dtype", _COMPUTED)
    fields.whole("workspace_bytes")
    fields.object("formats")  # the rest of it: `runtime.formats`
    _check_fingerprint(fields.object("fingerprint"))
    _check_choices(fields.object("choices"))
    _check_weights(fields.object("weights"))
    files = fields.object("files")
    for name in files.data:
        _check_file(name, files.object(name))
    missing = [name for name in needed if name not in files.data]
    if missing:
        raise EngineFolderError(f"its manifest lacks files.{missing[0]}")


def _check_fingerprint(built: Fields) -> None:
    for key in ("folder", "plan"):
        built.whole(key)
    for key in ("penstock", "torch", "arch", "isa"):
        built.text(key)
    built.object("machine").text("processor")


def _check_choices(choices: Fields) -> None:
    for key in ("model", "dtype"):
        choices.text(key)
    for key in ("revision", "quantization"):
        choices.optional_text(key)
    on_gpu = choices.text("device", DEVICES) == "cuda"
    choices.text("kv_cache_dtype", get_args(KvCacheDtype))
    choices.text("forward", FORWARDS[2:] if on_gpu else FORWARDS[:2])
    seqs = choices.whole("max_num_seqs", 1, _MOST)
    choices.whole("max_model_len", 1, _MOST)
    profile = choices.sizes("profile", 1)
    if len(profile) != 3 or sorted(profile) != profile:
        raise choices.wrong("profile", "the fewest, usual and most tokens of a step")
    if seqs > profile[2]:
        raise choices.wrong("max_num_seqs", f"at most the profile's {profile[2]} tokens of a step")


def _check_file(name: str, entry: Fields) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise EngineFolderError(f"its manifest lists the file {name!r}, which isn't in the folder")
    entry.whole("bytes")
    entry.sha256("sha256")


def _check_weights(weights: Fields) -> None:
    """Tensors lie one after the other, each from the next page on, up to the file's end."""
    size, end = weights.whole("bytes"), 0
    tensors = weights.object("tensors")
    for name in tensors.data:
        entry = tensors.object(name)
        dtype = entry.text("dtype")
        if dtype not in _DTYPES:
            raise entry.wrong("dtype", "an element type of torch")
        shape = entry.sizes("shape", 0)
        count, start = entry.whole("bytes"), entry.whole("offset")
        entry.sha256("sha256")
        need = math.prod(shape) * _DTYPES[dtype].itemsize
        if need != count:
            raise entry.wrong("bytes", f"the {need:,} of {shape} in {dtype}")
        if start != end:
            raise entry.wrong("offset", f"{end}, where the tensor before it ends")
        end = -(-(start + count) // PAGE) * PAGE
    if size != end:
        raise weights.wrong("bytes", f"{end}, where its last tensor ends")


def _wrong(field: str, value: object, wanted: str) -> EngineFolderError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    return EngineFolderError(f"{field} in its manifest is {shown}, not {wanted}")
