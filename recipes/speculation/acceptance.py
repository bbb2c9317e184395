"""How many guesses come true, along texts that the target itself has written.

A draft of n guesses made at a place brings as many tokens as come true before the first that
doesn't. With w candidates at each depth (a tree), a guess is true if the token is among the w
likeliest. Guessers are asked at all places of a text at once: what they were told is what they
would have guessed themselves, as long as all guesses before are right, and where one is wrong
nothing after it counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.batches import Batch
from recipes.speculation.guesser import Guesser
from recipes.speculation.target import Target
from recipes.speculation.text import Row, pad

WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of drafts at `places` places: the share whose first d + 1 guesses are all true."""

    chains: dict[int, list[float]]  # by candidates at each depth: a share for each depth
    right: list[float]  # the share of places where guess d is true, whatever came before
    places: int

    def tokens(self, width: int = 1) -> float:
        """Tokens that a step brings: the one that is always right, and the guesses accepted."""
        return 1.0 + sum(self.chains[width])

    def conditional(self, width: int = 1) -> list[float]:
        """The share of guesses d that are true where those before were."""
        chain = self.chains[width]
        return [
            now / before if before else 0.0
            for now, before in zip(chain, [1.0, *chain], strict=False)
        ]


def rank(logits: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens are likelier; of equally likely ones the lower id comes first, as in argmax.

    logits [..., V], tokens [...].
    """
    own = logits.gather(-1, tokens[..., None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < tokens[..., None]))
    return before.sum(-1)


def chains(ranks: Sequence[Tensor], weights: Tensor, widths: Sequence[int] = WIDTHS) -> Acceptance:
    """Shares from ranks[d] [B, T - 2 - d] of the true tokens, at places t with weight.

    weights [B, T - 1]: 1 where token t + 1 was the target's to choose. Only places count that have
    a text for all depths, so that the shares are of the same places.
    """
    depth = len(ranks)
    length = ranks[-1].shape[1]
    counted = (weights[:, :length] > 0) & (weights[:, depth : depth + length] > 0)
    places = int(counted.sum())
    kept = [r[:, :length][counted].cpu() for r in ranks]
    found: dict[int, list[float]] = {}
    for width in widths:
        alive = torch.ones(places, dtype=torch.bool)
        found[width] = []
        for r in kept:
            alive = alive & (r < width)
            found[width].append(float(alive.float().mean()) if places else 0.0)
    right = [float((r == 0).float().mean()) if places else 0.0 for r in kept]
    return Acceptance(found, right, places)


@torch.no_grad()
def measure(
    guesser: Guesser, target: Target, rows: Sequence[Row], depth: int, at_once: int = 16
) -> Acceptance:
    """The acceptance of a guesser along rows that the target wrote, in float32."""
    long_enough = [row for row in rows if len(row.tokens) >= row.given + depth + 1]
    ordered = sorted(long_enough, key=lambda row: len(row.tokens))
    guesser.eval()
    parts: list[tuple[int, Acceptance]] = []
    for start in range(0, len(ordered), at_once):
        batch: Batch = pad(ordered[start : start + at_once])
        tokens = batch.tokens.to(target.device)
        seen = target.look(tokens, guesser.stream_ids)
        ranks = [
            rank(logits.float(), tokens[:, 2 + d :])
            for d, logits in enumerate(guesser.guesses(seen, depth))
        ]
        part = chains(ranks, batch.weights.to(target.device))
        parts.append((part.places, part))
    return _joined(parts)


def _joined(parts: list[tuple[int, Acceptance]]) -> Acceptance:
    places = sum(count for count, _ in parts)
    if not places:
        return Acceptance({width: [] for width in WIDTHS}, [], 0)

    def mean(lists: list[list[float]]) -> list[float]:
        counts = [count for count, _ in parts]
        return [
            sum(n * x for n, x in zip(counts, column, strict=True)) / places
            for column in zip(*lists, strict=True)
        ]

    return Acceptance(
        {width: mean([part.chains[width] for _, part in parts]) for width in WIDTHS},
        mean([part.right for _, part in parts]),
        places,
    )
