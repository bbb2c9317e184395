"""What a half-finished run has done: one file a result, and a manifest that says of what run."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.checkpoint import Source
from penstock.models.exported import sha256
from penstock.pipeline.new_folder import sync
from penstock.quant import Codes, parse_scheme
from penstock.runtime.fingerprint import fingerprint

logger = logging.getLogger("penstock")

Result = dict[str, Tensor | Codes]
"""Tensors by their names, the checkpoint's where it has them."""

_MANIFEST = "manifest.json"


class Store:
    """A folder of finished results. A file that is there under its name is whole."""

    def __init__(self, folder: Path, key: Mapping[str, Any], *, replace: bool = False) -> None:
        """Take up `folder`, or start it.

        key: all that results depend on. replace: where another run left it, start anew.
        Raises ConfigError where another run left it, or files that are no run's.
        """
        self._folder = folder
        made_by = {"penstock": fingerprint().penstock, "torch": torch.__version__}
        wanted = json.loads(json.dumps({"version": 2, **made_by, **key}))
        if (folder / _MANIFEST).exists():
            self._take_up(wanted, replace)
        elif folder.exists() and any(file.suffix != ".partial" for file in folder.iterdir()):
            raise ConfigError(f"{folder} isn't empty and no work folder. Give another.")
        if not (folder / _MANIFEST).exists():
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(wanted, indent=2) + "\n"
            self._write(_MANIFEST, lambda partial: partial.write_text(text, encoding="utf-8"))

    def _take_up(self, wanted: Mapping[str, Any], replace: bool) -> None:
        file = self._folder / _MANIFEST
        try:
            found = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} isn't a manifest: {error}. Delete it.") from error
        names = wanted.keys() | found.keys()
        differing = sorted(name for name in names if wanted.get(name) != found.get(name))
        if not differing:
            return
        if not replace:
            raise ConfigError(
                f"{self._folder} holds layers of another run: {', '.join(differing)} differ, the "
                f"first was {found.get(differing[0])!r} and is {wanted.get(differing[0])!r}. "
                "Delete the folder, or give another."
            )
        logger.warning(
            "%s holds what another run has done (%s differ): it is left out.",
            self._folder, ", ".join(differing),
        )  # fmt: skip
        shutil.rmtree(self._folder)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        """Whether a result is there."""
        return self._file(name).exists()

    def save(self, name: str, result: Result) -> None:
        """Keep a result; one of this name is replaced."""
        tensors: dict[str, Tensor] = {}
        schemes: dict[str, str | None] = {}  # of each result, in its order
        for key, value in result.items():
            if isinstance(value, Tensor):
                schemes[key], tensors[key] = None, value.contiguous()
                continue
            schemes[key] = value.scheme.name
            for part in ("values", "scale", "zero", "outer"):
                held = getattr(value, part)
                if held is not None:
                    tensors[f"{key}:{part}"] = held.contiguous()
            if value.input_scale is not None:
                tensors[f"{key}:input"] = torch.tensor(value.input_scale, dtype=torch.float64)
        metadata, file = {"schemes": json.dumps(schemes)}, self._file(name)
        with writing(file):
            self._write(file.name, lambda partial: save_file(tensors, partial, metadata))

    def load(self, name: str) -> Result:
        """A result that is there, in the order in which it was kept."""
        file = self._file(name)
        try:
            with safe_open(file, framework="pt") as held:
                schemes = json.loads(held.metadata()["schemes"])
                tensors = {key: held.get_tensor(key) for key in held.keys()}  # noqa: SIM118
                return {key: _result(tensors, key, scheme) for key, scheme in schemes.items()}
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} can't be read: {error}. Delete it to redo it.") from error

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        """Under another name first: what is cut off never has the file's own."""
        file = self._folder / name
        partial = file.with_suffix(".partial")
        write(partial)
        sync(partial)
        os.replace(partial, file)


def _result(tensors: Mapping[str, Tensor], key: str, scheme: str | None) -> Tensor | Codes:
    if scheme is None:
        return tensors[key]
    static = tensors.get(f"{key}:input")
    return Codes(
        parse_scheme(scheme),
        tensors[f"{key}:values"],
        tensors[f"{key}:scale"],
        tensors.get(f"{key}:zero"),
        tensors.get(f"{key}:outer"),
        None if static is None else float(static),
    )


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Makes what safetensors says of a disk the OSError that other files' writing raises."""
    try:
        yield
    except SafetensorError as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(file)) from error


def source_digest(source: Source) -> str:
    """SHA-256 of all that a source is read from: its files and its config."""
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True, default=str).encode())
    for file in source.files():
        about = file.stat()
        digest.update(_sum(file, about.st_size, about.st_mtime_ns).encode())
    return digest.hexdigest()


@functools.cache
def _sum(file: Path, size: int, changed_ns: int) -> str:
    """Of a file's bytes; once for each state of it."""
    return sha256(file)
