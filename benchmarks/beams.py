"""What beam search finds on the embedded model, drawn, and what a step of it costs.

    python benchmarks/beams.py --figure docs/figures/samplers/beam_search.svg
    python benchmarks/beams.py --json benchmarks/results/beams.json

The picture is a search for a sentence: what is kept of it, step by step. The gain is what width
brings to twelve openings of stories; the cost is of 8 beams over 151,936 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from penstock.bench.environment import environment
from penstock.bench.reader import Reader, open_reader
from penstock.bench.variant import Variant
from penstock.hardware import detect
from penstock.sampling import BeamSearch, BeamSearchParams, Hypothesis, log_probabilities

WINDOW = 96
OPENING, DRAWN = "Lily was sad because", BeamSearchParams(4, 9, early_stopping="never")
OPENINGS = (
    "Lily was sad because", "The dog ran to", "One day, Tom found", "The old tree was",
    "Mom said that", "In the forest there was", "Ben wanted to", "The little bird could not",
    "They looked at the", "Sara opened the box and", "It was raining, so", "The big bear",
)  # fmt: skip
TOKENS, WIDTHS = 24, (1, 2, 4, 8, 16)
BEAMS, VOCABULARY = 8, 151_936

WIDTH, ROW, TOP, LEFT, COLUMN, BOX = 900, 42, 64, 12, 110, 80
_STYLE = (
    "text{fill:#24292f}.dim{fill:#6e7781}.page{fill:#fff}.lost{fill:#eaeef2}.kept{fill:#ddf4ff}"
    ".best{fill:#0969da}.on{fill:#fff}path{fill:none;stroke:#afb8c1}path.best{fill:none;"
    "stroke:#0969da;stroke-width:2}.end{stroke:#1a7f37;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}.page{fill:#0d1117}"
    ".lost{fill:#21262d}.kept{fill:#12344d}.best{fill:#1f6feb}path{stroke:#484f58}"
    "path.best{stroke:#58a6ff}.end{stroke:#3fb950}}"
)


@dataclass
class Kept:
    """What the search kept at one step: its beams, and what ended there."""

    alive: list[list[int]]
    ended: list[Hypothesis]


@dataclass
class Run:
    steps: list[Kept] = field(default_factory=list)
    best: list[Hypothesis] = field(default_factory=list)


def run(reader: Reader, prompt: list[int], params: BeamSearchParams, ends: list[int]) -> Run:
    """A search whose prefixes are read anew at every step."""
    search = BeamSearch(params, ends, reader.about.vocab_size)
    found, alive, known = Run(), [[]], set[tuple[int, ...]]()
    while not search.is_done:
        rows = [reader.read([*prompt, *own, 0], len(prompt) + len(own)).logits for own in alive]
        onward = search.advance(log_probabilities(torch.cat(rows), params))
        alive = [[*alive[one.parent], one.token] for one in onward]
        ended = [h for h in search.best() if h.finish_reason and tuple(h.tokens) not in known]
        known |= {tuple(one.tokens) for one in ended}
        found.steps.append(Kept(alive, ended))
    found.best = search.best()
    return found


def figure(reader: Reader) -> str:
    """The tree of a search for the end of a sentence."""
    (prompt,) = reader.encode([OPENING])
    pieces = [piece.decode(errors="replace") for piece in reader.pieces()]
    stop = pieces.index(".")
    found = run(reader, prompt, DRAWN, [stop])
    best = found.best[0]
    places: dict[tuple[int, ...], tuple[float, float]] = {(): (LEFT - COLUMN + BOX, TOP + 20)}
    edges: list[str] = []
    boxes: list[str] = []
    lowest = 0.0
    for column, step in enumerate(found.steps):
        nodes = [(own, None) for own in step.alive] + [(h.tokens, h) for h in step.ended]
        for row, (tokens, ended) in enumerate(nodes):
            x, y = LEFT + column * COLUMN, TOP + row * ROW
            lowest = max(lowest, y)
            on_best = best.tokens[: len(tokens)] == tokens
            if len(tokens) > 1:
                a, b = places[tuple(tokens[:-1])]
                bend = (x - a) / 2
                kind = ' class="best"' if on_best else ""
                edges.append(
                    f'<path{kind} d="M{a} {b}C{a + bend:.0f} {b} {x - bend:.0f} {y + 15} '
                    f'{x} {y + 15}"/>'
                )
            places.setdefault(tuple(tokens), (x + BOX, y + 15))
            leads = any(h.tokens[: len(tokens)] == tokens for h in found.best)
            boxes += _box(x, y, pieces[tokens[-1]], ended, on_best, leads)
    height = int(lowest + ROW + 34)
    said = escape(OPENING)
    ending = escape("".join(pieces[token] for token in best.tokens))
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text x="12" y="22" font-size="15" font-weight="600">“{said} …”</text>',
        f'<text x="{WIDTH - 12}" y="22" text-anchor="end" class="dim">beam_width='
        f"{DRAWN.beam_width}; the best beams of each step, the best above</text>",
        f'<text x="12" y="44" class="dim">Green ends, with its score; grey leads to nothing that '
        f"is returned. Best: “{said}{ending}”</text>",
    ]
    return "\n".join([*head, *edges, *boxes, "</svg>", ""])


def _box(
    x: float, y: float, text: str, ended: Hypothesis | None, on_best: bool, leads: bool
) -> list[str]:
    kind = "best" if on_best else "kept" if leads else "lost"
    ends = " end" if ended else ""
    label = escape(text.strip() or text)
    if ended is not None:
        label += f" {ended.score:.2f}".replace("-", "−")
    ink = ' class="on"' if on_best else "" if leads else ' class="dim"'
    return [
        f'<rect class="{kind}{ends}" x="{x}" y="{y}" width="{BOX}" height="30" rx="5"/>',
        f'<text{ink} x="{x + BOX / 2}" y="{y + 20}" text-anchor="middle">{label}</text>',
    ]


def gains(reader: Reader) -> list[dict[str, float]]:
    """By width, the mean log-probability of the best continuation of each opening."""
    prompts = reader.encode(list(OPENINGS))
    rows: list[dict[str, float]] = []
    greedy: list[float] = []
    for width in WIDTHS:
        params = BeamSearchParams(width, TOKENS, ignore_eos=True)
        logprobs = [run(reader, prompt, params, []).best[0].logprob for prompt in prompts]
        greedy = greedy or logprobs
        better = sum(b > a for a, b in zip(greedy, logprobs, strict=True))
        worse = sum(b < a for a, b in zip(greedy, logprobs, strict=True))
        rows.append({"width": width, "logprob": round(statistics.mean(logprobs), 3),
                     "better_than_greedy": better, "worse": worse})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def costs(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of one step's log-softmax and of what the search does with it, on one core."""
    torch.set_num_threads(1)
    logits = torch.randn(BEAMS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    rows: list[dict[str, Any]] = []
    for groups in (1, 4):
        params = BeamSearchParams(
            BEAMS, rounds + 3, early_stopping="never", num_beam_groups=groups,
            diversity_penalty=0.5 * (groups > 1),
        )  # fmt: skip
        search = BeamSearch(params, [5], VOCABULARY)
        search.advance(log_probabilities(logits[:1], params))
        softmax_ms, advance_ms = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            logprobs = log_probabilities(logits, params)
            middle = time.perf_counter()
            search.advance(logprobs)
            softmax_ms.append((middle - start) * 1e3)
            advance_ms.append((time.perf_counter() - middle) * 1e3)
        rows.append({"groups": groups, "log_softmax_ms": round(statistics.median(softmax_ms), 3),
                     "advance_ms": round(statistics.median(advance_ms), 3)})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, help="an SVG of a search")
    parser.add_argument("--json", type=Path, help="measure gain and cost, and write them here")
    parser.add_argument("--rounds", type=int, default=101)
    given = parser.parse_args()
    with open_reader(Variant(), WINDOW) as reader:
        if given.figure is not None:
            given.figure.write_text(figure(reader), encoding="utf-8")
        if given.json is not None:
            about = {
                "environment": environment(detect()), "openings": len(OPENINGS),
                "tokens": TOKENS, "gains": gains(reader),
                "beams": BEAMS, "vocabulary": VOCABULARY, "costs": costs(given.rounds),
            }  # fmt: skip
            given.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
