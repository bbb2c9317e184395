"""A model's card, where an export has changed the weights that it speaks of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = "README.md"
_FENCE = "---"


def note_in_card(folder: Path, source: str, chosen: Mapping[str, Any]) -> None:
    """Say first in a folder's card what has become of the weights of `source`; the rest stays.

    chosen: an export's choices. A folder without a card, or with the weights as they were, is left
    as it is.
    """
    changes = _changes(chosen)
    if not changes or not (folder / CARD).is_file():
        return
    # whatever its encoding and its line ends are, they stay
    card = (folder / CARD).read_bytes().decode("utf-8", "surrogateescape")
    at = _behind_metadata(card)
    note = (
        f"> Exported by Penstock from {source}: {'; '.join(changes)}. The card below is the "
        "original's, and speaks of its weights.\n\n"
    )
    noted = card[:at] + note + card[at:]
    (folder / CARD).write_bytes(noted.encode("utf-8", "surrogateescape"))


def _changes(chosen: Mapping[str, Any]) -> list[str]:
    found = []
    if "quant" in chosen:
        others = " and other formats" if chosen["special"] else ""
        found.append(
            f"weights in {chosen['quant']}{others} by {chosen['method']}, layout {chosen['layout']}"
        )
    if "merge_lora" in chosen:
        found.append("an adapter is merged")
    if "reduce_vocab" in chosen:
        found.append("the vocabulary is reduced")
    return found


def _behind_metadata(card: str) -> int:
    """Where the text begins: YAML between two lines of dashes may stand before it."""
    lines = card.splitlines(keepends=True)
    if not lines or lines[0].rstrip() != _FENCE:
        return 0
    at = len(lines[0])
    for line in lines[1:]:
        at += len(line)
        if line.rstrip() == _FENCE:
            return at
    return 0
