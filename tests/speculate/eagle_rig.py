"""What an engine does around an EAGLE head, step by step: states come and go with each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.runtime import Runtime, load_runtime
from penstock.runtime.drafting import draft_proposer
from penstock.sampling import SamplingParams, SequenceSampling
from penstock.speculate import Computed, Draft, Wish
from penstock.speculate.eagle import EagleProposer
from penstock.speculate.proposer import ROOT
from penstock.step import Step

SIZE = 32  # tokens of a block
GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Text:
    """A sequence as an engine keeps it."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    params: SamplingParams = field(default_factory=lambda: GREEDY)


class Rig:
    """A target, a head and their caches."""

    def __init__(self, target: Path, head: Path, method: str, **options: Any) -> None:
        kwargs = {"num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 256,
                  "dtype": "float32", "skip_tokenizer_init": True}  # fmt: skip
        known = [*kwargs, "enforce_eager", "kv_cache_dtype"]
        given = {key: options.pop(key) for key in list(options) if key in known}
        speculative = {"method": method, "model": str(head), **options}
        config = EngineConfig.of(
            model=str(target), speculative_config=speculative, **(kwargs | given)
        )
        self.runtime: Runtime = load_runtime(config)
        found = draft_proposer(self.runtime.settle(config), self.runtime)
        assert isinstance(found, EagleProposer)
        self.proposer = found

    def step(self, *parts: tuple[Text, int], sees: bool = True) -> None:
        """The target computes the next so many tokens of each text. sees: the proposer does."""
        tokens, positions, slots, seen = list[int](), list[int](), list[int](), list[int]()
        starts, computed = [0], list[Computed]()
        width = max(len(text.blocks) for text, _ in parts)
        for text, count in parts:
            where = range(text.computed, text.computed + count)
            tokens += [text.tokens[p] for p in where]
            positions += where
            slots += [text.blocks[p // SIZE] * SIZE + p % SIZE for p in where]
            seen.append(text.computed + count)
            rows = list(range(starts[-1], starts[-1] + count))
            computed.append(Computed(text, text.tokens, text.blocks, text.computed, rows))
            starts.append(starts[-1] + count)
            text.computed += count
        table = [text.blocks + [0] * (width - len(text.blocks)) for text, _ in parts]
        arrays = (tokens, positions, slots, starts, seen, table, [starts[-1] - 1])
        self.runtime.runner.forward(Step(*(torch.tensor(x, dtype=torch.int32) for x in arrays)))
        if sees:
            self.proposer.saw(computed)

    def drafts(self, *texts: Text, limit: int = 3) -> list[Draft]:
        return self.proposer.propose([self.wish(text, limit) for text in texts])

    def wish(self, text: Text, limit: int) -> Wish:
        state = SequenceSampling(text.params, text.tokens, self.runtime.vocab_size,
                                 text.params.seed or 5, frozenset())  # fmt: skip
        return Wish(text, text.tokens, state, list(text.blocks), limit)

    def ways(self, *texts: Text, limit: int = 3) -> list[list[tuple[int, ...]]]:
        """Of each draft, the way to each of its tokens, in their order."""
        return [ways_of(draft) for draft in self.drafts(*texts, limit=limit)]


def ways_of(draft: Draft) -> list[tuple[int, ...]]:
    parents = draft.parents or list(range(-1, len(draft) - 1))
    ways: dict[int, tuple[int, ...]] = {ROOT: ()}
    for at, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
        ways[at] = (*ways[parent], token)
    return [ways[at] for at in range(len(draft))]


def after(rig: Rig, text: Text, tokens: Sequence[int]) -> None:
    """The text went on with `tokens`, all but the last of which the target has computed."""
    text.tokens += tokens
    rig.step((text, len(tokens)))
