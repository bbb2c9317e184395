"""Draw a result as bars: `python -m benchmarks.peers.figure OUT.svg RESULT.json [WORK,…]`.

A column for each number of bits, a row for each work; in each, the best format of every engine.
Plain SVG, readable on light and dark pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.peers.table import OURS, name, speed

from penstock.bench.report import count

WIDTH, LEFT, TOP = 860, 100, 92
BAR, PITCH, ROW_GAP, COLUMN_GAP = 11, 17, 18, 28
NAME, FIGURE = 84, 52  # room for a bar's name before it and its figure behind it

STYLE = (
    "<style>text{fill:#24292f}.dim{fill:#6e7781}.them{fill:#afb8c1}.us{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}"
    ".them{fill:#484f58}.us{fill:#58a6ff}}</style>"
)


def bars(result: dict[str, Any], bits: int, work: str) -> list[tuple[str, float, str]]:
    """(engine, tokens/s, its format): each engine's fastest format, Penstock's first."""
    best: dict[str, tuple[float, str]] = {}
    for contender in result["contenders"]:
        value = speed(contender, work)
        if contender["bits"] != bits or value is None:
            continue
        engine = contender["peer"]
        best[engine] = max(best.get(engine, (0.0, "")), (value, name(contender)))
    order = sorted(best, key=lambda engine: (engine != OURS, -best[engine][0]))
    return [(engine, *best[engine]) for engine in order]


def columns(result: dict[str, Any]) -> list[int]:
    """The numbers of bits that Penstock has figures for, most first."""
    ours = [c for c in result["contenders"] if c["peer"] == OURS]
    measured = {c["bits"] for c in ours if any(v is not None for v in c["tokens_per_s"].values())}
    return sorted(measured, reverse=True)


def svg(result: dict[str, Any], works: Sequence[str] | None = None) -> str:
    works = list(works or result["setup"]["works"])
    bits = columns(result)
    width = (WIDTH - LEFT - COLUMN_GAP * (len(bits) - 1)) / max(len(bits), 1)
    body, y = [], TOP
    for work in works:
        cells = [bars(result, number, work) for number in bits]
        if not any(cells):
            continue
        body.append(f'<text x="0" y="{y + BAR}" font-weight="600">{escape(work)}</text>')
        for i, cell in enumerate(cells):
            body += _cell(cell, LEFT + i * (width + COLUMN_GAP), y, width)
        y += max(map(len, cells)) * PITCH + ROW_GAP
    heads = [
        f'<text x="{LEFT + i * (width + COLUMN_GAP) + NAME:.0f}" y="{TOP - 16}" '
        f'font-weight="600">{number} bits a weight</text>'
        for i, number in enumerate(bits)
    ]
    where = result["hardware"]
    caption = (
        f"{result['setup']['model']}, tokens/s, {where['cores']} cores of {where['processor']}; "
        f"medians of {count(result['setup']['rounds'], 'round')} in turns"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
            f'viewBox="0 0 {WIDTH} {y}" font-family="system-ui, sans-serif" font-size="12">',
            STYLE,
            '<text x="0" y="20" font-size="16" font-weight="600">Penstock and its peers</text>',
            f'<text x="0" y="42" class="dim">{escape(caption)}</text>',
            *heads,
            *body,
            "</svg>",
            "",
        ]
    )


def _cell(found: list[tuple[str, float, str]], x: float, y: float, width: float) -> list[str]:
    """One work at one number of bits: the longest bar fills what names and figures leave."""
    scale = (width - NAME - FIGURE) / max((value for _, value, _ in found), default=1.0)
    parts = []
    for i, (engine, value, full) in enumerate(found):
        top, kind = y + i * PITCH, "us" if engine == OURS else "them"
        figure = f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
        text = f'y="{top + BAR - 1}" font-size="11"'
        parts += [
            f'<text x="{x + NAME - 6:.0f}" {text} text-anchor="end">{escape(engine)}</text>',
            f'<rect class="{kind}" x="{x + NAME:.0f}" y="{top}" width="{value * scale:.1f}" '
            f'height="{BAR}" rx="2"><title>{escape(full)}</title></rect>',
            f'<text x="{x + NAME + value * scale + 5:.0f}" {text} class="dim">{figure}</text>',
        ]
    return parts


def main() -> None:
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    result = json.loads(Path(sys.argv[2]).read_text())
    works = sys.argv[3].split(",") if len(sys.argv) == 4 else None
    Path(sys.argv[1]).write_text(svg(result, works))


if __name__ == "__main__":
    main()
