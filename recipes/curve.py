"""A loss curve as a small SVG: the training loss and each held-out text's."""

from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 360, 52, 34
COLOURS = ("#4a6fa5", "#c0504d", "#6a994e", "#8e6c8a", "#d1883a", "#444444")

Point = tuple[float, float]


def draw(series: Mapping[str, Sequence[Point]], title: str, x_name: str, file: Path) -> None:
    """Write `file`: a line for each series of (x, loss) points."""
    points = [p for line in series.values() for p in line]
    if not points:
        return
    x_end = max(x for x, _ in points) or 1.0
    # the first steps' losses would flatten everything else
    ordered = sorted(y for _, y in points)
    low, high = ordered[0], ordered[int(0.98 * (len(ordered) - 1))]
    high = max(high, low + 0.1)

    def place(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - 10) * x / x_end
        up = (min(y, high) - low) / (high - low)
        return f"{across:.1f},{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 30) * up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{title}</text>',
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">{x_name}</text>',
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        at = place(0, value).split(",")[1]
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{at}" y2="{at}" stroke="#dddddd"/>',
            f'<text x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">{value:.2f}</text>',
        ]
        along = place(x_end * i / 4, low).split(",")[0]
        parts.append(
            f'<text x="{along}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{x_end * i / 4:.3g}</text>"
        )
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in line)
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{WIDTH - 150}" y="{40 + 16 * number}" fill="{colour}">{name}</text>',
        ]
    file.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
