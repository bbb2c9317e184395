"""What the runners share. They are run by their peer's Python: nothing but the standard library."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

WARM_UP = {"name": "warm-up", "kind": "decode", "batch": 1, "context": 64}
WARM_UP_TOKENS = 4

Generate = Callable[[list[list[int]], int], tuple[float, Sequence[Sequence[float]]]]
"""Greedy, to the end: (prompts, tokens of each) → start, and each sequence's tokens' times."""


def read_job() -> dict[str, Any]:
    """What the script was told."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    return told


def prompts(seed: int, work: dict[str, Any], vocab_size: int) -> list[list[int]]:
    """Random token ids, the same for every engine."""
    draw = random.Random(f"{seed} {work['name']}")
    return [
        [draw.randrange(vocab_size) for _ in range(work["context"])] for _ in range(work["batch"])
    ]


def speed(kind: str, prompt_tokens: int, start: float, times: Sequence[Sequence[float]]) -> float:
    """Tokens/s: of the prompts until the last has its first token, or of all tokens after that."""
    together = max(each[0] for each in times)
    if kind == "prefill":
        return prompt_tokens / (together - start)
    later = sum(sum(t > together for t in each) for each in times)
    return later / (max(each[-1] for each in times) - together)


def measure(job: dict[str, Any], vocab_size: int, generate: Generate) -> dict[str, float]:
    """Every work once, after a short one that doesn't count."""
    generate(prompts(job["seed"], WARM_UP, vocab_size), WARM_UP_TOKENS)
    speeds = {}
    for work in job["works"]:
        given = prompts(job["seed"], work, vocab_size)
        tokens = 1 if work["kind"] == "prefill" else 1 + job["tokens"]
        start, times = generate(given, tokens)
        speeds[work["name"]] = speed(work["kind"], sum(map(len, given)), start, times)
    return speeds


def reply(speeds: dict[str, float], **more: Any) -> None:
    """Tell the caller; the last thing that a runner does."""
    sys.stdout.flush()
    print("\nPEERS " + json.dumps({"speeds": speeds, **more}), flush=True)


def longest(job: dict[str, Any]) -> int:
    """Tokens of the longest sequence."""
    return max(work["context"] for work in [*job["works"], WARM_UP]) + job["tokens"] + 1
