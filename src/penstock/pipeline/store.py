"""What a half-finished run has done: one file a layer, and a manifest that says of what run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ConfigError
from penstock.quant import Codes, parse_scheme

Result = dict[str, Tensor | Codes]
"""Tensors by the checkpoint's names."""


class Store:
    """A folder of finished layers. A file that is there under its name is whole."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        """Take up `folder`, or start it. Raises ConfigError where another run left it."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "manifest.json"
        wanted = json.loads(json.dumps(key))
        if manifest.exists():
            try:
                found = json.loads(manifest.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{manifest} isn't a manifest: {error}. Delete it.") from error
            differing = sorted(
                name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
            )
            if differing:
                raise ConfigError(
                    f"{folder} holds layers of another run: {', '.join(differing)} differ, the "
                    f"first was {found.get(differing[0])!r} and is {wanted.get(differing[0])!r}. "
                    "Delete the folder, or give another."
                )
            return
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} isn't empty and no work folder. Give another.")
        _replace(manifest, lambda path: path.write_text(json.dumps(wanted, indent=2) + "\n"))

    def _file(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether a layer is finished."""
        return self._file(layer).exists()

    def save(self, layer: int, result: Result) -> None:
        """Keep a finished layer."""
        tensors: dict[str, Tensor] = {}
        schemes: dict[str, str] = {}
        for name, value in result.items():
            if isinstance(value, Tensor):
                tensors[name] = value.contiguous()
                continue
            schemes[name] = value.scheme.name
            for part in ("values", "scale", "zero", "outer"):
                held = getattr(value, part)
                if held is not None:
                    tensors[f"{name}:{part}"] = held.contiguous()
            if value.input_scale is not None:
                tensors[f"{name}:input"] = torch.tensor(value.input_scale, dtype=torch.float64)
        metadata = {"schemes": json.dumps(schemes)}
        _replace(self._file(layer), lambda path: save_file(tensors, path, metadata))

    def load(self, layer: int) -> Result:
        """A finished layer."""
        file = self._file(layer)
        try:
            with safe_open(file, framework="pt") as held:
                schemes = json.loads(held.metadata()["schemes"])
                tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} can't be read: {error}. Delete it to redo it.") from error
        result: Result = {name: t for name, t in tensors.items() if ":" not in name}
        for name, scheme in schemes.items():
            static = tensors.get(f"{name}:input")
            result[name] = Codes(
                parse_scheme(scheme),
                tensors[f"{name}:values"],
                tensors[f"{name}:scale"],
                tensors.get(f"{name}:zero"),
                tensors.get(f"{name}:outer"),
                None if static is None else float(static),
            )
        return result


def _replace(file: Path, write: Any) -> None:
    """Write under another name first: what is cut off never has the file's own."""
    partial = file.with_suffix(".partial")
    write(partial)
    os.replace(partial, file)
