"""What each sampler makes of a distribution, drawn, and what it costs.

    python benchmarks/samplers.py --figures docs/figures/samplers
    python benchmarks/samplers.py --json benchmarks/results/samplers.json

The distributions are what the sampler's own code gives for three sets of 24 made-up logits: a model
that is sure, one that hesitates, one that doesn't know. For guidance, made-up logits after a
negative prompt are marked too. Costs are of 16 rows of 151,936 logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import SamplingParams
from penstock.bench.environment import environment
from penstock.engine.guidance import guided
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
GUIDANCE = 1.5
REPEATED = [0, 1, 2, 7, 7, 7, 0, 1]  # 2 would go on as before
PANELS = ("sure", "hesitating", "at a loss")

WIDTH, HEIGHT, TOP, BOTTOM, GAP = 900, 230, 58, 28, 30
_STYLE = (
    "text{fill:#24292f}.dim{fill:#6e7781}.page{fill:#fff}.was{fill:#d0d7de}.is{fill:#0969da}"
    ".axis{stroke:#8c959f}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}"
    ".page{fill:#0d1117}.was{fill:#30363d}.is{fill:#58a6ff}.axis{stroke:#6e7681}}"
)
_MARKED = ".no{stroke:#cf222e;stroke-width:2}"


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


def unwanted() -> Tensor:
    """Logits [3, TOKENS] after a negative prompt: two of every three tokens are likelier there."""
    place = torch.arange(TOKENS)
    return examples() + 0.7 * (place % 3 != 1)


class Row:
    """A sequence, as far as guidance looks at it."""

    def __init__(self, request: SimpleNamespace) -> None:
        self.request = request
        self.shadow: Row | None = None


def led_away(scale: float) -> Tensor:
    """The distributions [3, TOKENS] of guided samples, by the engine's own formula."""
    rows = []
    for pair in torch.stack((examples(), unwanted()), dim=1):  # [2, TOKENS]: own, shadow's
        params = SamplingParams(guidance_scale=scale)
        shadow, sample = Row(SimpleNamespace(guides=True)), Row(SimpleNamespace(guides=None))
        sample.shadow, sample.request.params = shadow, params
        rows.append(guided([sample, shadow], pair)[1][0])
    return torch.stack(rows).softmax(-1)


def figure(name: str, params: dict[str, Any]) -> str:
    """Bars of the probabilities before (grey) and after (blue)."""
    said = ", ".join(f"{key}={value}" for key, value in params.items())
    return drawn(said, examples().softmax(-1), shaped(examples(), params))


def guidance_figure() -> str:
    """The same for guidance, with a red line where the negative prompt's probability is."""
    after, marks = led_away(GUIDANCE), unwanted().softmax(-1)
    return drawn(f"guidance_scale={GUIDANCE}", examples().softmax(-1), after, marks)


def drawn(said: str, before: Tensor, after: Tensor, marks: Tensor | None = None) -> str:
    """Three panels; marks: a third probability of each token."""
    red = "" if marks is None else ", the negative prompt's red"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
        f"<style>{_STYLE}{_MARKED if marks is not None else ''}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="12" y="22" font-size="15" font-weight="600">{said}</text>',
        f'<text x="{WIDTH - 12}" y="22" text-anchor="end" class="dim">probability of 24 tokens, '
        f"before grey, after blue{red}; each panel to its own scale</text>",
    ]
    width = (WIDTH - 24 - 2 * GAP) / 3
    for i, panel in enumerate(PANELS):
        left, marked = 12 + i * (width + GAP), None if marks is None else marks[i]
        parts += _panel(before[i], after[i], left, width, f"a model {panel}", marked)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    before: Tensor,
    after: Tensor,
    left: float,
    width: float,
    heading: str,
    marks: Tensor | None,
) -> list[str]:
    top = float(max(one.max() for one in (before, after, marks) if one is not None))
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
    for at, value in enumerate(() if marks is None else marks.tolist()):
        y, x = base - value / top * tall, left + step * at
        parts.append(
            f'<line class="no" x1="{x:.1f}" y1="{y:.1f}" x2="{x + step:.1f}" y2="{y:.1f}"/>'
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
        (given.figures / "guidance.svg").write_text(guidance_figure(), encoding="utf-8")
    if given.json is not None:
        found = costs(given.rounds)
        for name, cost in found.items():
            print(f"{name:20} {cost['ms']:9.2f} ms {cost['times_plain']:7.2f} × plain")
        about = {"environment": environment(detect()), "rows": ROWS, "vocabulary": VOCABULARY}
        given.json.write_text(json.dumps({**about, "costs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
