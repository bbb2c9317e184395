"""`penstock.json`: what `penstock export` says of the folder that it wrote."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelError

MANIFEST = "penstock.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Exported:
    """A manifest: the choices of an export, and the files that belong to it."""

    choices: dict[str, Any]
    graph: dict[str, Any]
    files: dict[str, dict[str, Any]]  # name → bytes, sha256
    made_by: dict[str, str]  # versions of penstock and torch
    source: str

    @property
    def kv_cache_dtype(self) -> str:
        """What keys and values are to be stored as."""
        return str(self.choices["kv_cache_dtype"])

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence; None: what the model was made for."""
        found: int | None = self.choices["max_model_len"]
        return found


def read_exported(folder: Path) -> Exported | None:
    """The manifest in `folder`; None where there is none.

    Raises ModelError for one that can't be read, or whose files are missing or of another size: a
    copy that was cut off.
    """
    file = folder / MANIFEST
    if not file.exists():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        version = data.pop("format")
        if version != FORMAT:
            raise ModelError(
                f"{file} has format {version}, but this Penstock reads {FORMAT}. Export the model "
                "again with this version."
            )
        found = Exported(**data)
        sizes = {name: int(entry["bytes"]) for name, entry in found.files.items()}
        _ = [entry["sha256"] for entry in found.files.values()]
        if not isinstance(found.max_model_len, int | None) or not found.kv_cache_dtype:
            raise TypeError(f"choices are {found.choices!r}")
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise ModelError(f"{file} isn't a manifest: {error!r}. Export the model again.") from error
    for name, size in sizes.items():
        path = folder / name
        has = path.stat().st_size if path.exists() else None
        if has != size:
            state = "is missing" if has is None else f"has {has:,} bytes"
            raise ModelError(
                f"{path} {state}, but was exported with {size:,}. Copy or export the folder again."
            )
    return found


def verify_exported(folder: Path) -> Exported:
    """The manifest in `folder`, its files read and found as they were written.

    Raises ModelError for one whose SHA-256 is another, and what `read_exported` raises.
    """
    found = read_exported(folder)
    if found is None:
        raise ModelError(f"{folder} has no {MANIFEST}: it isn't an export. Run penstock export.")
    for name, entry in found.files.items():
        if sha256(folder / name) != entry["sha256"]:
            raise ModelError(
                f"{folder / name} has been changed since it was exported: its SHA-256 isn't that "
                f"of {MANIFEST}. Export the model again."
            )
    return found


def sha256(file: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
