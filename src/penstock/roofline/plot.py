"""The roofline plot: what this machine allows at each intensity, and where operators stand.

Both axes are logarithmic. Left of a ceiling's corner memory binds, right of it the multipliers.
Source: Williams, Waterman & Patterson 2009, Communications of the ACM 52(4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.hardware import AnyPeaks, GpuPeaks

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 84, 40, 96, 66
LABEL, LINE = 12, 15  # size of an operator's label, and the height that it takes
COLUMN, LEAD = 36, 22  # dots this near share a column; the way to its labels

_STYLE = (
    "text{fill:#24292f}.dim{fill:#6e7781}.grid{stroke:#eaeef2}.axis{stroke:#8c959f}"
    ".roof{stroke:#57606a;fill:none}.page{fill:#ffffff}.halo{stroke:#ffffff}"
    ".p0{fill:#0969da;stroke:#0969da}.p1{fill:#bc4c00;stroke:#bc4c00}.p0t{fill:#0550ae}"
    ".p1t{fill:#953800}.hollow{stroke:#57606a}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}.grid{stroke:#21262d}"
    ".axis{stroke:#6e7681}.roof{stroke:#adbac7}.page{fill:#0d1117}.halo{stroke:#0d1117}"
    ".p0{fill:#58a6ff;stroke:#58a6ff}.p1{fill:#f0883e;stroke:#f0883e}.p0t{fill:#79c0ff}"
    ".p1t{fill:#ffa657}.hollow{stroke:#adbac7}}"
)


@dataclass(frozen=True, slots=True)
class Dot:
    """One operator of one phase."""

    label: str
    phase: str
    intensity: float  # FLOPs per byte
    flops_per_s: float
    share: float  # of the phase's time: the dot's area beyond the least
    cached: bool  # its bytes come from cache, so the roof of memory isn't its own


@dataclass(frozen=True, slots=True)
class _Mark:
    """A dot on the page."""

    dot: Dot
    kind: str  # its phase's class
    x: float
    y: float
    r: float


class _Scale:
    """From intensity and FLOP/s to the page."""

    def __init__(self, peaks: AnyPeaks, dots: Sequence[Dot]) -> None:
        top = max(peak for _, peak in _levels(peaks))
        corner = top / peaks.read_bytes_per_s
        xs = [d.intensity for d in dots] + [0.5, corner * 2]
        ys = [d.flops_per_s for d in dots] + [top, peaks.read_bytes_per_s]
        self.x0, self.x1 = math.log10(min(xs)) - 0.35, math.log10(max(xs)) + 0.25
        self.y0, self.y1 = math.log10(min(ys)) - 0.2, math.log10(max(ys)) + 0.3

    def x(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.x0) / (self.x1 - self.x0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, flops_per_s: float) -> float:
        share = (math.log10(flops_per_s) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def roofline_svg(peaks: AnyPeaks, dots: Sequence[Dot], title: str, caption: str) -> str:
    """The plot, readable on light and dark pages; phases in the order in which they come."""
    shown = [dot for dot in dots if dot.intensity > 0 and dot.flops_per_s > 0]
    scale = _Scale(peaks, shown)
    phases = list(dict.fromkeys(dot.phase for dot in shown))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="32" font-size="17" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT}" y="54" class="dim">{escape(caption)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="54" class="dim" font-size="12" text-anchor="end">'
        "size: share of the phase’s time</text>",
        *_legend(phases, any(dot.cached for dot in shown)),
        *_grid(scale),
        *_roofs(peaks, scale),
        *_dots(shown, phases, scale),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _legend(phases: Sequence[str], cached: bool) -> list[str]:
    parts, x = [], float(LEFT)
    entries = [(f"p{i % 2}", 0.55, phase) for i, phase in enumerate(phases)]
    if cached:
        entries.append(("hollow", 0.0, "hollow: activations only, which stay in cache"))
    for kind, fill, label in entries:
        stroke = ' stroke-width="1.5"' if not fill else ""
        parts += [
            f'<circle class="{kind}" cx="{x + 5}" cy="74" r="5" fill-opacity="{fill}"{stroke}/>',
            f'<text x="{x + 16}" y="78.5" font-size="12">{escape(label)}</text>',
        ]
        x += 16 + _width(label, 12) + 22
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


def _levels(peaks: AnyPeaks) -> list[tuple[str, float]]:
    """What multiplies, and how fast; what wasn't measured is left out."""
    if isinstance(peaks, GpuPeaks):
        levels = [("float32", peaks.float32_flops), ("bfloat16", peaks.bfloat16_flops)]
        levels += [("float8", peaks.float8_flops)] * bool(peaks.float8_flops)
    else:
        levels = [("float32 FMA", peaks.fma_flops)]
        if peaks.bfloat16_unit:
            levels.append((f"bfloat16, {peaks.bfloat16_unit}", peaks.bfloat16_flops))
        if peaks.int4_ops > 1.2 * peaks.int8_ops:  # else they are the same instructions
            levels.append(("int4", peaks.int4_ops))
    return levels + [("int8", peaks.int8_ops)] * bool(peaks.int8_ops)


def _roofs(peaks: AnyPeaks, scale: _Scale) -> list[str]:
    """The ceilings with their labels."""
    read = peaks.read_bytes_per_s
    levels = _levels(peaks)
    parts = []
    end = 10.0**scale.x1
    for name, peak in levels:
        x, y = scale.x(peak / read), scale.y(peak)
        label = f"{name}: {_rate(peak)}{'OP/s' if name == 'int8' else 'FLOP/s'}"
        at = min(x + 14, WIDTH - RIGHT - _width(label, 12))
        parts += [
            f'<path class="roof" stroke-width="1.5" d="M{x:.1f} {y:.1f}H{scale.x(end):.1f}"/>',
            f'<text x="{at:.1f}" y="{y + 17:.1f}" font-size="12">{label}</text>',
        ]
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
    return parts


def _dots(dots: Sequence[Dot], phases: Sequence[str], scale: _Scale) -> list[str]:
    """Circles, the small ones on top, and beside each column of them a column of labels."""
    marks = [
        _Mark(
            dot,
            f"p{phases.index(dot.phase) % 2}",
            scale.x(dot.intensity),
            scale.y(dot.flops_per_s),
            3.0 + 10.0 * math.sqrt(min(dot.share, 1.0)),
        )
        for dot in dots
    ]
    circles = [
        f'<circle class="{m.kind}" cx="{m.x:.1f}" cy="{m.y:.1f}" r="{m.r:.1f}" '
        f'fill-opacity="{0 if m.dot.cached else 0.55}" stroke-width="1.5">'
        f"<title>{escape(_describe(m.dot))}</title></circle>"
        for m in sorted(marks, key=lambda mark: -mark.r)
    ]
    columns = _columns(marks)
    leads, labels = [], []
    for i, column in enumerate(columns):
        left_end = max((m.x + m.r for m in columns[i - 1]), default=LEFT) if i else LEFT
        right_end = min(m.x - m.r for m in columns[i + 1]) if i + 1 < len(columns) else WIDTH
        lines, texts = _label(column, left_end, right_end)
        leads += lines
        labels += texts
    return [*leads, *circles, *labels]


def _columns(marks: Sequence[_Mark]) -> list[list[_Mark]]:
    """Marks that lie about above each other, from left to right."""
    columns: list[list[_Mark]] = []
    for mark in sorted(marks, key=lambda mark: mark.x):
        if columns and mark.x - columns[-1][0].x < COLUMN:
            columns[-1].append(mark)
        else:
            columns.append([mark])
    return columns


def _label(
    column: Sequence[_Mark], left_end: float, right_end: float
) -> tuple[list[str], list[str]]:
    """Leading lines and labels on the side with more room, one below the other."""
    first, last = min(m.x - m.r for m in column), max(m.x + m.r for m in column)
    width = max(_width(m.dot.label, LABEL) for m in column)
    right = right_end - last > width + 2 * LEAD or right_end - last >= first - left_end
    if last + LEAD + width > WIDTH - 4:
        right = False
    x = last + LEAD if right else first - LEAD
    anchor = "start" if right else "end"
    ordered = sorted(column, key=lambda mark: mark.y)
    leads, labels = [], []
    for mark, y in zip(ordered, spread([mark.y for mark in ordered]), strict=True):
        edge = mark.x + mark.r if right else mark.x - mark.r
        end = x - 3 if right else x + 3
        leads.append(
            f'<line class="{mark.kind}" stroke-opacity="0.45" x1="{edge:.1f}" y1="{mark.y:.1f}" '
            f'x2="{end:.1f}" y2="{y:.1f}"/>'
        )
        labels.append(
            f'<text class="halo {mark.kind}t" x="{x:.1f}" y="{y + 4:.1f}" font-size="{LABEL}" '
            f'text-anchor="{anchor}" stroke-width="3" paint-order="stroke" '
            f'stroke-linejoin="round">{escape(mark.dot.label)}</text>'
        )
    return leads, labels


def spread(heights: Sequence[float], gap: float = LINE) -> list[float]:
    """Ascending heights moved as little as can be (in squares) until they are `gap` apart.

    Less i · gap each, they need only ascend: neighbours that don't are pooled at their mean.
    """
    pools: list[tuple[float, int]] = []  # (sum, how many)
    for i, height in enumerate(heights):
        total, count = height - i * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, number = pools.pop()
            total, count = total + before, count + number
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return [mean + i * gap for i, mean in enumerate(means)]


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
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
