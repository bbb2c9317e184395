"""Line and dot charts as SVG, in the manner of the roofline plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 72, 20, 64, 52
MAX_POINTS = 400  # of a line: more can't be seen

STYLE = (
    "svg text{fill:#24292f}svg .dim{fill:#6e7781}svg .grid{stroke:#eaeef2}svg .axis{stroke:#8c959f}"
    "svg .page{fill:#ffffff}.c0{stroke:#0969da;fill:#0969da}.c1{stroke:#bc4c00;fill:#bc4c00}"
    ".c2{stroke:#1a7f37;fill:#1a7f37}.c3{stroke:#8250df;fill:#8250df}"
    "@media(prefers-color-scheme:dark){svg text{fill:#e6edf3}svg .dim{fill:#8b949e}"
    "svg .grid{stroke:#21262d}svg .axis{stroke:#6e7681}svg .page{fill:#0d1117}"
    ".c0{stroke:#58a6ff;fill:#58a6ff}.c1{stroke:#f0883e;fill:#f0883e}"
    ".c2{stroke:#3fb950;fill:#3fb950}.c3{stroke:#a371f7;fill:#a371f7}}"
)
"""For the page that holds the charts."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together."""

    label: str
    points: Sequence[tuple[float, float]]
    kind: Literal["line", "steps", "dots"] = "line"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its label and its range."""

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, label: str, values: Sequence[float], *, log: bool = False) -> Axis:
        """Wide enough for the values; a linear axis begins at 0."""
        if log:
            shown = [v for v in values if v > 0] or [1.0]
            low, high = min(shown), max(shown)
            return cls(label, low / 1.15, high * 1.15, log=True)
        return cls(label, 0.0, max([v for v in values if math.isfinite(v)], default=0.0) or 1.0)

    def share(self, value: float) -> float:
        """Where along the axis a value lies, 0 to 1."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        low, high = math.log(self.low), math.log(self.high)
        return (math.log(max(value, self.low)) - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values within the range, about five."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [m * 10.0**p for p in range(first, last + 1) for m in steps]
                within = [v for v in found if self.low <= v <= self.high]
                if len(within) <= 8:
                    break
            return within
        raw = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
        return [i * step for i in range(int(self.high / step + 1e-9) + 1)]


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """One chart; it takes its colours from STYLE."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" '
        'font-size="12">',
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="20" font-size="15" font-weight="600">{escape(title)}</text>',
        *_legend(series),
        *_grid(x, y),
    ]
    for i, one in enumerate(series):
        parts += _draw(one, f"c{i % 4}", x, y)
    return "\n".join([*parts, "</svg>"])


def _at(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    across = LEFT + x.share(point[0]) * (WIDTH - LEFT - RIGHT)
    return across, HEIGHT - BOTTOM - y.share(point[1]) * (HEIGHT - TOP - BOTTOM)


def _legend(series: Sequence[Series]) -> list[str]:
    parts, left = [], float(LEFT)
    for i, one in enumerate(series):
        parts += [
            f'<circle class="c{i % 4}" cx="{left + 5:.1f}" cy="42" r="5" fill-opacity="0.55"/>',
            f'<text x="{left + 16:.1f}" y="46">{escape(one.label)}</text>',
        ]
        left += 16 + 0.56 * 12 * len(one.label) + 20
    return parts


def _grid(x: Axis, y: Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in x.ticks():
        across, _ = _at(x, y, (value, y.low))
        parts += [
            f'<line class="grid" x1="{across:.1f}" y1="{TOP}" x2="{across:.1f}" y2="{bottom}"/>',
            f'<text class="dim" x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{value:,.6g}</text>",
        ]
    for value in y.ticks():
        _, up = _at(x, y, (x.low, value))
        parts += [
            f'<line class="grid" x1="{LEFT}" y1="{up:.1f}" x2="{right}" y2="{up:.1f}"/>',
            f'<text class="dim" x="{LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">'
            f"{value:,.6g}</text>",
        ]
    return [
        *parts,
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
        f'<text class="dim" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">'
        f"{escape(x.label)}</text>",
        f'<text class="dim" x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">'
        f"{escape(y.label)}</text>",
    ]


def _draw(series: Series, kind: str, x: Axis, y: Axis) -> list[str]:
    if not series.points:
        return []
    if series.kind == "dots":
        dots = thin(series.points, 4 * MAX_POINTS)
        return [
            f'<circle class="{kind}" cx="{across:.1f}" cy="{up:.1f}" r="3" fill-opacity="0.35" '
            f'stroke="none"><title>{point[0]:,.5g}, {point[1]:,.5g}</title></circle>'
            for point in dots
            for across, up in [_at(x, y, point)]
        ]
    places = [_at(x, y, point) for point in thin(series.points, MAX_POINTS)]
    if series.kind == "steps":
        path = "".join(f"H{across:.1f}V{up:.1f}" for across, up in places)
    else:
        path = "".join(f"L{across:.1f} {up:.1f}" for across, up in places)
    start = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    return [f'<path class="{kind}" stroke-width="1.8" style="fill:none" d="{start}{path}"/>']


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Evenly chosen points, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
