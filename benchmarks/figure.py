"""Draw what `penstock bench latency --json` measured: `python benchmarks/figure.py OUT.svg JSON…`.

One bar for each result: achieved over floor. Plain SVG, readable on light and dark pages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 860, 22, 12, 300, 190, 64


def rows(file: Path) -> list[tuple[str, float, str]]:
    """(label, share of the floor, remark) of a result's phases."""
    data: dict[str, Any] = json.loads(file.read_text())
    setup, results = data["setup"], data["results"]
    name = f"{Path(str(setup['model'])).name}, {setup['weights']}"
    decode, prefill = results["decode"], results["prefill"]
    return [
        (
            f"{name}: decode @ {setup['context']}",
            decode["share_of_floor"],
            f"{decode['tokens_per_s']:,.1f} tok/s",
        ),
        (
            f"{name}: prefill {setup['input_len']}",
            prefill["share_of_floor"],
            f"{prefill['tokens_per_s']:,.0f} tok/s",
        ),
    ]


def svg(bars: list[tuple[str, float, str]], caption: str) -> str:
    scale = WIDTH - LEFT - RIGHT
    height = TOP + len(bars) * (BAR + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13">',
        "<style>text{fill:#24292f}.dim{fill:#6e7781}.pipe{fill:#d0d7de}.full{fill:#0969da}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}"
        ".pipe{fill:#30363d}.full{fill:#58a6ff}}</style>",
        '<text x="0" y="20" font-size="16" font-weight="600">How full does the pipe run?</text>',
        f'<text x="0" y="42" class="dim">{caption}</text>',
    ]
    for i, (label, share, remark) in enumerate(bars):
        y = TOP + i * (BAR + GAP)
        middle = y + BAR / 2 + 4.5
        parts += [
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{label}</text>',
            f'<rect class="pipe" x="{LEFT}" y="{y}" width="{scale}" height="{BAR}" rx="4"/>',
            f'<rect class="full" x="{LEFT}" y="{y}" width="{scale * min(share, 1):.0f}" '
            f'height="{BAR}" rx="4"/>',
            f'<text x="{LEFT + scale + 10}" y="{middle}">{share:.0%} of the floor</text>',
            f'<text x="{WIDTH}" y="{middle}" text-anchor="end" class="dim">{remark}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    out, files = Path(sys.argv[1]), [Path(f) for f in sys.argv[2:]]
    if not files:
        raise SystemExit(__doc__)
    first = json.loads(files[0].read_text())
    where = first["hardware"]
    machine = f"{where['cores']} cores of {where['processor']}, {first['isa']} kernels"
    caption = f"Floor ÷ time: {machine}, batch 1"
    bars = [bar for file in files for bar in rows(file)]
    out.write_text(svg(bars, caption))


if __name__ == "__main__":
    main()
