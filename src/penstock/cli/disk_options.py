"""Options that say where prefixes outlive the process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import given, to_path

_PANEL = "Cache"

PrefixCacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=to_path,
        help="Keep what the prefix cache holds in this folder as well, beyond the process's end.",
        rich_help_panel=_PANEL,
    ),
]
PrefixCacheDiskSpace = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="At most so much of it, of each model; what was used longest ago goes. Default: 10.",
        rich_help_panel=_PANEL,
    ),
]


def on_disk(folder: Path | None, space: float | None) -> dict[str, Any]:
    """As arguments of an engine."""
    return given(prefix_cache_dir=folder, prefix_cache_disk_space=space)
