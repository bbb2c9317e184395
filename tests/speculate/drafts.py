"""What a draft must be, and a draft model without weights that shows what its cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.sampling import Sampler, SamplingParams, SequenceSampling
from penstock.speculate import Wish
from penstock.speculate.draft_loop import DraftLimits
from penstock.speculate.draft_model import DraftModelProposer
from penstock.step import Step
from tests.engine.toy import BLOCK, VOCAB, Toy, logits_of

LIVELY = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2, seed=11
)
GREEDY = SamplingParams(temperature=0.0)


def state(
    params: SamplingParams, tokens: Sequence[int], num_prompt: int, vocab: int = VOCAB
) -> SequenceSampling:
    """The sampler's state of a sequence, its output appended."""
    found = SequenceSampling(params, tokens[:num_prompt], vocab, params.seed or 5, frozenset())
    for token in tokens[num_prompt:]:
        found.append(token)
    return found


def expected(
    params: SamplingParams, tokens: Sequence[int], num_prompt: int, limit: int
) -> list[int]:
    """What plain decoding by the toy's logits gives next."""
    found, output = state(params, tokens, num_prompt), list[int]()
    sampler = Sampler(VOCAB)
    for _ in range(limit):
        logits = torch.from_numpy(logits_of([*tokens, *output]))[None]
        output.append(sampler(logits, [found]).token_ids[0])
        found.append(output[-1])
    return output


class ToyDraft:
    """A proposer by the toy, which computes the hash of all tokens that it finds in its cache."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_num_tokens: int = 64,
        max_model_len: int = 64,
        num_ids: int = VOCAB,
    ) -> None:
        self.toy = Toy()
        self.ids = torch.full((num_blocks, BLOCK), -1, dtype=torch.int32)
        self.kv = [(self.ids, torch.zeros(num_blocks, 0))]
        limits = DraftLimits(VOCAB, BLOCK, 8, max_num_tokens, max_model_len)
        self.proposer = DraftModelProposer(self.forward, limits, num_blocks, num_ids)

    def forward(self, step: Step) -> Tensor:
        return self.toy(step, self.kv)

    @property
    def computed(self) -> int:
        """Tokens that have been through the toy."""
        return sum(step.num_tokens for step in self.toy.steps)


class Text:
    """A sequence as an engine keeps it."""

    def __init__(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        params: SamplingParams = GREEDY,
    ) -> None:
        self.tokens, self.blocks, self.params = list(tokens), list(blocks), params
        self.num_prompt = len(tokens)

    def wish(self, limit: int = 4) -> Wish:
        return Wish(self, self.tokens, state(self.params, self.tokens, self.num_prompt),
                    list(self.blocks), limit)  # fmt: skip

    def next(self, limit: int = 4) -> list[int]:
        """What its draft must be."""
        return expected(self.params, self.tokens, self.num_prompt, limit)
