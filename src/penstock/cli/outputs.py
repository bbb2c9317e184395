"""Files that a command leaves at its end: whether they can be written is known before its work."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import typer

from penstock.errors import ConfigError


def check_output(name: str, path: Path) -> None:
    """Raises ConfigError, which names the option, for what couldn't be written.

    Folders that are missing are made with the file.
    """
    where = path.absolute()
    if where.is_dir():
        raise ConfigError(f"{name} {path} is a folder. Give the name of a file.")
    try:
        if where.is_file():
            where.open("ab").close()
        elif not where.exists():
            folder = next(p for p in where.parents if p.exists())
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{name} {path} can't be written: {error.strerror or error}. Give another place."
        ) from error


def checked(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """What typer calls with an option's file. Raises ConfigError as `check_output` does."""
    if path is not None:
        check_output(option.opts[0], path)
    return path


def keep(file: Path, text: str) -> None:
    """Write it. Raises ConfigError where that fails in spite of all checks."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} can't be written: {error.strerror or error}.") from error


def keep_json(file: Path, found: dict[str, Any]) -> None:
    """Write it, for people to read too. Raises ConfigError as `keep` does."""
    keep(file, json.dumps(found, indent=2) + "\n")
