"""What packages beside Penstock are built with (docs/plugins.md)."""

from __future__ import annotations

from pathlib import Path


def include() -> Path:
    """The folder of `penstock_rows.h`, for a C compiler."""
    return Path(__file__).parent / "include"
