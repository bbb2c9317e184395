"""Drift as a picture: how KL is distributed over positions, and the error after each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from penstock.bench.drift import Drift, LayerError

WIDTH, HEIGHT = 960, 440
TOP, BOTTOM = 96, 64
POINTS = 300
"""Of the curve: more than a screen shows apart."""
DECADES = 8
"""Below the largest divergence that the axis reaches at most."""

_STYLE = (
    "text{fill:#24292f}.dim{fill:#6e7781}.grid{stroke:#eaeef2}.axis{stroke:#8c959f;fill:none}"
    ".page{fill:#ffffff}.a{stroke:#0969da;fill:none}.b{stroke:#bc4c00;fill:none}"
    ".at{fill:#0550ae}.bt{fill:#953800}.dot{stroke:none;fill:#0969da}.dotb{stroke:none;fill:#bc4c00}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}.grid{stroke:#21262d}"
    ".axis{stroke:#6e7681}.page{fill:#0d1117}.a{stroke:#58a6ff}.b{stroke:#f0883e}"
    ".at{fill:#79c0ff}.bt{fill:#ffa657}.dot{fill:#58a6ff}.dotb{fill:#f0883e}}"
)


@dataclass(frozen=True, slots=True)
class _Panel:
    """A part of the page, and the values at its edges."""

    left: float
    right: float
    x0: float
    x1: float
    y1: float  # at the top; 0 is at the bottom

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y1 * (HEIGHT - TOP - BOTTOM)

    def frame(self, heading: str, below: str) -> list[str]:
        bottom = HEIGHT - BOTTOM
        return [
            f'<path class="axis" d="M{self.left:.1f} {TOP}V{bottom}H{self.right:.1f}"/>',
            f'<text x="{self.left:.1f}" y="{TOP - 14}" font-weight="600">{escape(heading)}</text>',
            f'<text class="dim" x="{(self.left + self.right) / 2:.1f}" y="{HEIGHT - 16}" '
            f'text-anchor="middle">{escape(below)}</text>',
        ]

    def rung(self, value: float, label: str) -> list[str]:
        y = self.y(value)
        return [
            f'<line class="grid" x1="{self.left:.1f}" y1="{y:.1f}" x2="{self.right:.1f}" '
            f'y2="{y:.1f}"/>',
            f'<text class="dim" x="{self.left - 8:.1f}" y="{y + 4.5:.1f}" text-anchor="end">'
            f"{label}</text>",
        ]


def drift_svg(drift: Drift, title: str, caption: str) -> str:
    """The plot, readable on light and dark pages; without layers the distribution takes it all."""
    middle = WIDTH * 0.54 if drift.layers else WIDTH - 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="64" y="30" font-size="17" font-weight="600">{escape(title)}</text>',
        f'<text x="64" y="52" class="dim">{escape(caption)}</text>',
        *_distribution(drift, 64, middle),
    ]
    if drift.layers:
        parts += _layers(drift.layers, middle + 84, WIDTH - 32)
    return "\n".join([*parts, "</svg>", ""])


def _distribution(drift: Drift, left: float, right: float) -> list[str]:
    """The share of positions whose KL is at most x, x from small to large by decades."""
    heading, below = "Positions at or below a divergence", "KL(A ‖ B), nats"
    apart = drift.each[drift.each > 0].sort().values
    if not len(apart):
        panel = _Panel(left, right, 0.0, 1.0, 1.0)
        x, y = (left + right) / 2, (HEIGHT - BOTTOM + TOP) / 2
        words = f"All {drift.positions:,} positions: 0"
        return [
            *panel.frame(heading, below),
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{words}</text>',
        ]
    high = math.log10(float(apart[-1])) + 0.05
    low = max(math.log10(float(apart[0])), high - DECADES)
    low = min(low, high - 1)
    panel = _Panel(left, right, low, high, 1.0)
    parts = panel.frame(heading, below)
    for share in (0.25, 0.5, 0.75, 1.0):
        parts += panel.rung(share, f"{share:.0%}")
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = panel.x(power)
        parts += [
            f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>',
            f'<text class="dim" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{10.0**power:g}</text>",
        ]
    curve = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in _curve(drift, apart, low))
    parts.append(f'<polyline class="a" stroke-width="2" points="{curve}"/>')
    marks = (("mean", drift.kl, 0.06), ("99%", drift.kl_p99, 0.14), ("most", drift.kl_max, 0.22))
    for name, value, height in marks:
        if value <= 0 or math.log10(value) < low:
            continue
        x, y = panel.x(math.log10(value)), panel.y(height)
        parts += [
            f'<line class="b" stroke-width="1.5" stroke-dasharray="3 3" x1="{x:.1f}" y1="{TOP}" '
            f'x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>',
            f'<text class="bt" x="{x - 5:.1f}" y="{y:.1f}" font-size="12" text-anchor="end">'
            f"{name} {value:.2g}</text>",
        ]
    return parts


def _curve(drift: Drift, apart: Tensor, low: float) -> list[tuple[float, float]]:
    """(log10 KL, share of positions at or below it) at up to POINTS positions."""
    equal = drift.positions - len(apart)
    ranks = torch.linspace(0, len(apart) - 1, min(POINTS, len(apart))).round().long()
    points = [
        (math.log10(float(apart[rank])), (equal + int(rank) + 1) / drift.positions)
        for rank in ranks
    ]
    return [point for point in points if point[0] >= low]


def _layers(layers: Sequence[LayerError], left: float, right: float) -> list[str]:
    """The error of the residual stream, the mean and the bound of 99%, layer by layer."""
    top = max(layer.p99 for layer in layers)
    rung = _rung(top) if math.isfinite(top) and top > 0 else 0.25
    top = rung * max(1, math.ceil(top / rung)) if math.isfinite(top) else 1.0
    panel = _Panel(left, right, 0.0, max(1, len(layers) - 1), top)
    parts = panel.frame("Error of the residual stream", "after layer (E: the embedding)")
    for style, label, x in (("at", "mean", right - 70), ("bt", "99% below", right)):
        parts.append(
            f'<text class="{style}" x="{x:.1f}" y="{TOP - 14}" text-anchor="end" '
            f'font-size="12">{label}</text>'
        )
    for i in range(1, round(top / rung) + 1):
        parts += panel.rung(i * rung, f"{i * rung:.3g}")
    every = math.ceil(len(layers) / 12)
    for i in range(0, len(layers), every):
        label = "E" if i == 0 else str(i - 1)
        parts.append(
            f'<text class="dim" x="{panel.x(i):.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{label}</text>'
        )
    for style, dot, values in (
        ("b", "dotb", [layer.p99 for layer in layers]),
        ("a", "dot", [layer.mean for layer in layers]),
    ):
        spots = [(panel.x(i), panel.y(min(v, top))) for i, v in enumerate(values)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline class="{style}" stroke-width="2" points="{line}"/>')
        parts += [f'<circle class="{dot}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in spots]
    return parts


def _rung(top: float) -> float:
    """1, 2 or 5 times a power of ten: at most five of them reach `top`."""
    size = 10.0 ** math.floor(math.log10(top / 5))
    return next(step * size for step in (1, 2, 5, 10) if step * size * 5 >= top)
