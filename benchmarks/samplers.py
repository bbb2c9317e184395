"""What each sampler makes of a distribution, drawn, and what it costs.

    python benchmarks/samplers.py --figures docs/figures/samplers
    python benchmarks/samplers.py --json benchmarks/results/samplers.json

The distributions are what the sampler's own code gives for three sets of 24 made-up logits: a model
that is sure, one that hesitates, one that doesn't know. Costs are of 16 rows of 151,936 logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect
from penstock.sampling import Sampler, SequenceSampling
from penstock.sampling.penalties import gather_edits
from penstock.sampling.pipeline import _draw_chain, _make_group

TOKENS, ROWS, VOCABULARY = 24, 16, 151_936
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "top_n_sigma": {"top_n_sigma": 1.0, "temperature": 2.0},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.08},
    "dynamic_temperature": {"temperature": 1.0, "dynatemp_range": 0.9},
    "mirostat": {"mirostat": 2, "mirostat_tau": 1.5},
    "dry": {"dry_multiplier": 1.0},
}
REPEATED = [0, 1, 2, 7, 7, 7, 0, 1]  # 2 would go on as before
PANELS = ("sure", "hesitating", "at a loss")

WIDTH, HEIGHT, TOP, BOTTOM, GAP = 900, 230, 58, 28, 30
_STYLE = (
    "text{fill:#24292f}.dim{fill:#6e7781}.page{fill:#fff}.was{fill:#d0d7de}.is{fill:#0969da}"
    ".axis{stroke:#8c959f}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}"
    ".page{fill:#0d1117}.was{fill:#30363d}.is{fill:#58a6ff}.axis{stroke:#6e7681}}"
)


def examples() -> Tensor:
    """Logits [3, TOKENS], largest first, 0 the likeliest."""
    place = torch.arange(TOKENS, dtype=torch.float32)
    sure = -2.2 * (1 + place).log() - 1.5 * (place > 0)
    hesitating = -0.25 * place - 1.5 * (place > 4)
    lost = -0.04 * place
    return torch.stack((sure, hesitating, lost))


def row_of(params: dict[str, Any], vocabulary: int, seed: int = 0) -> SequenceSampling:
    """A sequence whose text ends in a repetition."""
    chosen = SamplingParams(**params)
    return SequenceSampling(chosen, REPEATED, vocabulary, seed, frozenset())


def shaped(logits: Tensor, params: dict[str, Any]) -> Tensor:
    """The distributions [R, V] that rows of these logits are drawn from."""
    rows = [row_of(params, logits.shape[1]) for _ in logits]
    logits = logits.clone()
    edits = gather_edits(rows, logits.shape[1], logits.device)
    if edits is not None:
        edits.apply_(logits)
    group = _make_group(_draw_chain, rows, list(range(len(rows))), logits.shape[1], logits.device)
    return group.draw.weights(logits, group.cuts)[0]  # type: ignore[attr-defined,no-any-return]


def figure(name: str, params: dict[str, Any]) -> str:
    """Bars of the probabilities before (grey) and after (blue)."""
    before, after = examples().softmax(-1), shaped(examples(), params)
    said = ", ".join(f"{key}={value}" for key, value in params.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="12" y="22" font-size="15" font-weight="600">{said}</text>',
        f'<text x="{WIDTH - 12}" y="22" text-anchor="end" class="dim">probability of 24 tokens, '
        "before grey, after blue; each panel to its own scale</text>",
    ]
    width = (WIDTH - 24 - 2 * GAP) / 3
    for i, panel in enumerate(PANELS):
        parts += _panel(before[i], after[i], 12 + i * (width + GAP), width, f"a model {panel}")
    return "\n".join([*parts, "</svg>", ""])


def _panel(before: Tensor, after: Tensor, left: float, width: float, heading: str) -> list[str]:
    top = float(max(before.max(), after.max()))
    base, tall, step = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP, width / TOKENS
    parts = [f'<text class="dim" x="{left:.1f}" y="{TOP - 12}">{heading}</text>']
    for values, kind, inset in ((before, "was", 0.08), (after, "is", 0.28)):
        for at, value in enumerate(values.tolist()):
            high = value / top * tall
            if high > 0.2:
                parts.append(
                    f'<rect class="{kind}" x="{left + step * (at + inset):.1f}" '
                    f'y="{base - high:.1f}" width="{step * (1 - 2 * inset):.1f}" '
                    f'height="{high:.1f}"/>'
                )
    parts.append(
        f'<line class="axis" x1="{left:.1f}" y1="{base}" x2="{left + width:.1f}" y2="{base}"/>'
    )
    return parts


def costs(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of one step of ROWS rows: plain sampling, and by case, in turns."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY, generator=random) * 3
    cases = {"plain": {}, **CASES, "mirostat 1": {"mirostat": 1}}
    made = {
        name: ([row_of(params, VOCABULARY, seed) for seed in range(ROWS)], Sampler(VOCABULARY))
        for name, params in cases.items()
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):  # the first makes the plans
        for name, (rows, sampler) in made.items():
            given = logits.clone()
            start = time.perf_counter()
            sampler(given, rows)
            times[name].append((time.perf_counter() - start) * 1e3)
    plain = np.median(times["plain"][1:])
    return {
        name: {
            "ms": round(statistics.median(found[1:]), 3),
            "times_plain": round(float(np.median(found[1:]) / plain), 2),
        }
        for name, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", type=Path, help="folder for one SVG a sampler")
    parser.add_argument("--json", type=Path, help="measure costs, and write them here")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if given.figures is not None:
        given.figures.mkdir(parents=True, exist_ok=True)
        for name, params in CASES.items():
            (given.figures / f"{name}.svg").write_text(figure(name, params), encoding="utf-8")
    if given.json is not None:
        found = costs(given.rounds)
        for name, cost in found.items():
            print(f"{name:20} {cost['ms']:9.2f} ms {cost['times_plain']:7.2f} × plain")
        about = {"environment": environment(detect()), "rows": ROWS, "vocabulary": VOCABULARY}
        given.json.write_text(json.dumps({**about, "costs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
