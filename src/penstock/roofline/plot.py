"""The roofline plot: what this machine allows at each intensity, and where operators stand.

Both axes are logarithmic. Left of a ceiling's corner memory binds, right of it the multipliers.
Source: Williams, Waterman & Patterson 2009, Communications of the ACM 52(4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.hardware import Peaks

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 84, 40, 96, 66
LABEL, LINE = 11.5, 14  # size of an operator's label, and the height that it takes

_STYLE = (
    "text{fill:#24292f}.dim{fill:#6e7781}.grid{stroke:#eaeef2}.axis{stroke:#8c959f}"
    ".roof{stroke:#57606a;fill:none}.page{fill:#ffffff}.halo{stroke:#ffffff}"
    ".lead{stroke:#afb8c1}.p0{fill:#0969da;stroke:#0969da}.p1{fill:#bc4c00;stroke:#bc4c00}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}.grid{stroke:#21262d}"
    ".axis{stroke:#6e7681}.roof{stroke:#adbac7}.page{fill:#0d1117}.halo{stroke:#0d1117}"
    ".lead{stroke:#484f58}.p0{fill:#58a6ff;stroke:#58a6ff}.p1{fill:#f0883e;stroke:#f0883e}}"
)


@dataclass(frozen=True, slots=True)
class Dot:
    """One operator of one phase."""

    label: str
    phase: str
    intensity: float  # FLOPs per byte
    flops_per_s: float
    share: float  # of the phase's time: the dot's area
    cached: bool  # its bytes come from cache, so the roof of memory isn't its own


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle that a label or a dot takes."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: _Box) -> float:
        wide = min(self.x1, other.x1) - max(self.x0, other.x0)
        high = min(self.y1, other.y1) - max(self.y0, other.y0)
        return max(wide, 0.0) * max(high, 0.0)


class _Scale:
    """From intensity and FLOP/s to the page."""

    def __init__(self, peaks: Peaks, dots: Sequence[Dot]) -> None:
        top = max(peaks.fma_flops, peaks.tile_flops, peaks.int8_ops)
        corner = top / peaks.read_bytes_per_s
        xs = [d.intensity for d in dots] + [0.5, corner * 2]
        ys = [d.flops_per_s for d in dots] + [top, peaks.read_bytes_per_s]
        self.x0, self.x1 = math.log10(min(xs)) - 0.15, math.log10(max(xs)) + 0.25
        self.y0, self.y1 = math.log10(min(ys)) - 0.2, math.log10(max(ys)) + 0.3

    def x(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.x0) / (self.x1 - self.x0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, flops_per_s: float) -> float:
        share = (math.log10(flops_per_s) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def roofline_svg(peaks: Peaks, dots: Sequence[Dot], title: str, caption: str) -> str:
    """The plot, readable on light and dark pages; phases in the order in which they come."""
    shown = [dot for dot in dots if dot.intensity > 0 and dot.flops_per_s > 0]
    scale = _Scale(peaks, shown)
    phases = list(dict.fromkeys(dot.phase for dot in shown))
    roofs, taken = _roofs(peaks, scale)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="32" font-size="17" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT}" y="54" class="dim">{escape(caption)}</text>',
        *_legend(phases, any(dot.cached for dot in shown)),
        *_grid(scale),
        *roofs,
        *_dots(shown, phases, scale, taken),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _legend(phases: Sequence[str], cached: bool) -> list[str]:
    parts, x = [], float(LEFT)
    entries = [(f"p{i % 2}", 0.75, phase) for i, phase in enumerate(phases)]
    if cached:
        entries.append(("p0", 0.0, "hollow: activations only, which stay in cache"))
    for kind, fill, label in entries:
        stroke = ' stroke-width="1.5"' if not fill else ""
        parts += [
            f'<circle class="{kind}" cx="{x + 5}" cy="74" r="5" fill-opacity="{fill}"{stroke}/>',
            f'<text x="{x + 16}" y="78.5" font-size="12">{escape(label)}</text>',
        ]
        x += 16 + _width(label, 12) + 22
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="78.5" class="dim" font-size="12" text-anchor="end">'
        "area: share of the phase’s time</text>"
    )
    return parts


def _grid(scale: _Scale) -> list[str]:
    parts = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for power in range(math.ceil(scale.x0), math.floor(scale.x1) + 1):
        x = scale.x(10.0**power)
        parts += [
            f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>',
            f'<text class="dim" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">'
            f"{_number(10.0**power)}</text>",
        ]
    for power in range(math.ceil(scale.y0), math.floor(scale.y1) + 1):
        y = scale.y(10.0**power)
        parts += [
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>',
            f'<text class="dim" x="{LEFT - 10}" y="{y + 4.5:.1f}" text-anchor="end">'
            f"{_rate(10.0**power)}</text>",
        ]
    return [
        *parts,
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
        f'<text class="dim" x="{(LEFT + right) / 2}" y="{HEIGHT - 18}" text-anchor="middle">'
        "intensity, FLOPs per byte</text>",
        f'<text class="dim" x="{LEFT - 10}" y="{TOP - 8}" text-anchor="end">FLOP/s</text>',
    ]


def _roofs(peaks: Peaks, scale: _Scale) -> tuple[list[str], list[_Box]]:
    """The ceilings with their labels, and the room that these take."""
    read = peaks.read_bytes_per_s
    levels = [("float32 FMA", peaks.fma_flops)]
    if peaks.tile_flops > peaks.fma_flops:
        levels.append(("bfloat16, AMX", peaks.tile_flops))
    if peaks.int8_ops:
        levels.append(("int8", peaks.int8_ops))
    parts, boxes = [], []
    end = 10.0**scale.x1
    for name, peak in levels:
        x, y = scale.x(peak / read), scale.y(peak)
        label = f"{name}: {_rate(peak)}FLOP/s"
        width = _width(label, 12)
        parts += [
            f'<path class="roof" stroke-width="1.5" d="M{x:.1f} {y:.1f}H{scale.x(end):.1f}"/>',
            f'<text x="{WIDTH - RIGHT - 2}" y="{y - 7:.1f}" font-size="12" text-anchor="end">'
            f"{label}</text>",
        ]
        boxes.append(_Box(WIDTH - RIGHT - 2 - width, y - 19, WIDTH - RIGHT, y + 2))
    top = max(peak for _, peak in levels)
    start = max(10.0**scale.x0, 10.0**scale.y0 / read)
    x0, y0 = scale.x(start), scale.y(start * read)
    x1, y1 = scale.x(top / read), scale.y(top)
    parts.append(
        f'<path class="roof" stroke-width="1.5" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>'
    )
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    at = 0.3
    x, y = x0 + at * (x1 - x0), y0 + at * (y1 - y0)
    parts.append(
        f'<text x="{x:.1f}" y="{y - 8:.1f}" font-size="12" '
        f'transform="rotate({angle:.1f} {x:.1f} {y:.1f})">read {_rate(read)}B/s</text>'
    )
    steps = 60
    for i in range(steps):  # the slope and its label, piece by piece
        x, y = x0 + i / steps * (x1 - x0), y0 + i / steps * (y1 - y0)
        boxes.append(_Box(x - 6, y - 10, x + 6, y + 5))
    return parts, boxes


def _dots(
    dots: Sequence[Dot], phases: Sequence[str], scale: _Scale, taken: list[_Box]
) -> list[str]:
    """Big dots first, so that small ones lie on top; then the labels, where there is room."""
    circles, labels = [], []
    ordered = sorted(dots, key=lambda dot: -dot.share)
    taken = list(taken)
    for dot in ordered:
        x, y, r = _place(dot, scale)
        taken.append(_Box(x - r, y - r, x + r, y + r))
    for dot in ordered:
        x, y, r = _place(dot, scale)
        kind = f"p{phases.index(dot.phase) % 2}"
        fill = 0.0 if dot.cached else 0.75
        circles.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill-opacity="{fill}" '
            f'stroke-width="1.5"><title>{escape(_describe(dot))}</title></circle>'
        )
        box, far = _room(x, y, r, _width(dot.label, LABEL), taken)
        taken.append(box)
        middle = (box.x0 + box.x1) / 2
        if far:
            labels.append(
                f'<line class="lead" x1="{x:.1f}" y1="{y:.1f}" x2="{middle:.1f}" '
                f'y2="{box.y0 + LINE / 2:.1f}"/>'
            )
        labels.append(
            f'<text class="halo" x="{middle:.1f}" y="{box.y1 - 3.5:.1f}" font-size="{LABEL}" '
            'text-anchor="middle" stroke-width="3" paint-order="stroke" '
            f'stroke-linejoin="round">{escape(dot.label)}</text>'
        )
    leads = [part for part in labels if part.startswith("<line")]
    return [*leads, *circles, *(part for part in labels if part.startswith("<text"))]


def _place(dot: Dot, scale: _Scale) -> tuple[float, float, float]:
    return scale.x(dot.intensity), scale.y(dot.flops_per_s), 4.0 + 16.0 * math.sqrt(dot.share)


def _room(x: float, y: float, r: float, width: float, taken: Sequence[_Box]) -> tuple[_Box, bool]:
    """The nearest free place for a label around a dot, and whether it needs a line to it."""
    best, least, distant = _Box(0, 0, 0, 0), math.inf, False
    for ring, gap in enumerate((4.0, 16.0, 32.0, 52.0)):
        d = r + gap
        for turn in (0, 180, 90, 270, 35, -35, 145, -145):
            cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
            cx, cy = x + cos * (d + width / 2), y - sin * (d + LINE / 2)
            box = _Box(cx - width / 2, cy - LINE / 2, cx + width / 2, cy + LINE / 2)
            outside = (
                max(LEFT - box.x0, 0.0) + max(box.x1 - WIDTH + RIGHT / 2, 0.0)
                + max(TOP - box.y0, 0.0) + max(box.y1 - HEIGHT + BOTTOM, 0.0)
            )  # fmt: skip
            bad = sum(box.overlap(other) for other in taken) + 100 * outside + 2 * ring
            if bad < least:
                best, least, distant = box, bad, ring > 0
    return best, distant


def _describe(dot: Dot) -> str:
    return (
        f"{dot.phase}, {dot.label}: {_rate(dot.flops_per_s)}FLOP/s, "
        f"{dot.intensity:.3g} FLOPs per byte, {dot.share:.1%} of the time"
    )


def _width(text: str, size: float) -> float:
    """About what a text takes in a common sans-serif."""
    return 0.56 * size * len(text)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _rate(value: float) -> str:
    """`7.1 T`: what a unit may follow."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
