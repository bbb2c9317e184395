"""Which kind of heads a folder holds, by the names of its tensors."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from penstock.models.heads.eagle import FILES, are_fusing, short
from penstock.models.heads.medusa import are_of_medusa


def method_of(folder: Path) -> str | None:
    """By which method a folder's tensors guess; None for a model, or what isn't known."""
    files = [folder / name for name in FILES if name.endswith(".safetensors")]
    names: set[str] = set()
    for file in (file for file in files if file.is_file()):
        try:
            with safe_open(file, framework="pt") as handle:
                names.update(map(short, handle.keys()))
        except SafetensorError:
            return None  # who loads it says what is wrong
    if are_of_medusa(folder, names):
        return "medusa"
    if "fc.weight" not in names:
        return None
    return "eagle3" if are_fusing(names) else "eagle"
