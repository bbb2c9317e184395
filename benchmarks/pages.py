"""Measured tables in the pages of the documentation, between marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path


def write_between(page: Path, text: str, marks: tuple[str, str]) -> None:
    """Put `text` between the page's marks; ends the program where it has none."""
    first, last = marks
    pattern = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
    before = page.read_text(encoding="utf-8")
    if not pattern.search(before):
        raise SystemExit(f"{page} has no {first.strip()} … {last}.")
    page.write_text(pattern.sub(lambda _: f"{first}{text}{last}", before), encoding="utf-8")


def fill(docs: Path, kind: str, tables: Mapping[str, Callable[[], str]]) -> list[Path]:
    """Write a table wherever a page under `docs` has `<!-- kind: name -->` … `<!-- /kind -->`.

    Returns these pages; ends the program for a name that isn't among `tables`.
    """
    found = []
    for page in sorted(docs.rglob("*.md")):
        names = re.findall(f"<!-- {kind}: (.+?) -->", page.read_text(encoding="utf-8"))
        for name in names:
            if name not in tables:
                raise SystemExit(f"{page} asks for {name!r}. Tables: {', '.join(tables)}.")
            write_between(page, tables[name](), (f"<!-- {kind}: {name} -->\n", f"<!-- /{kind} -->"))
        if names:
            found.append(page)
    return found
