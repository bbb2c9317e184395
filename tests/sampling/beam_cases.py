"""Shared by the tests of beam search: a model's logits by prefix, and both searches on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from tests.models.tiny import CASES, make_model
from torch import Tensor

from penstock.sampling import BeamSearch, BeamSearchParams, Hypothesis, log_probabilities

VOCABULARY = 320
Mask = Callable[[list[int], Tensor], None]


class Prefixes:
    """Logits after any tokens, each prefix computed once, alone or among others of its length."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, sequences: Sequence[list[int]]) -> Tensor:
        unknown = [s for s in sequences if tuple(s) not in self.known]
        if unknown:
            with torch.inference_mode():
                logits = self.model(torch.tensor(unknown)).logits[:, -1].float()
            for sequence, row in zip(unknown, logits, strict=True):
                self.known[tuple(sequence)] = row.clone()
        return torch.stack([self.known[tuple(s)] for s in sequences])


class Checkpoint:
    """A tiny random one, three prompts of different lengths, and tokens that it likes."""

    def __init__(self, name: str, num_ends: int) -> None:
        self.model = make_model(CASES[name])
        self.prefixes = Prefixes(self.model)
        random = torch.Generator().manual_seed(3)
        self.prompts = [
            torch.randint(3, VOCABULARY, (length,), generator=random).tolist()
            for length in (4, 9, 17)
        ]
        for prompt in self.prompts:
            self.ours(prompt, BeamSearchParams(4, 5), [])
        likely = torch.stack(list(self.prefixes.known.values())).log_softmax(-1).mean(0)
        self.ends = likely.argsort(descending=True)[:num_ends].tolist()

    def ours(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        ends: Collection[int],
        mask: Mask | None = None,
        stop: Callable[[int], str | None] | None = None,
    ) -> list[Hypothesis]:
        search = BeamSearch(params, ends, VOCABULARY)
        sequences = [prompt]
        while not search.is_done:
            assert search.num_rows == len(sequences)
            logprobs = log_probabilities(self.prefixes(sequences), params)
            for sequence, row in zip(sequences, logprobs, strict=True):
                if mask is not None:
                    mask(sequence, row)
            stopped = None if stop is None else (lambda _, token: stop(token))
            found = search.advance(logprobs, stopped)
            sequences = [[*sequences[one.parent], one.token] for one in found]
        return search.best()

    def theirs(
        self, params: BeamSearchParams, ends: Sequence[int], **more: Any
    ) -> tuple[list[list[int]], list[float]]:
        """Outputs of the prompts in one batch padded to the left, width by width, and scores."""
        longest = max(map(len, self.prompts))
        padded = [[0] * (longest - len(p)) + p for p in self.prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in self.prompts]
        output = self.model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.num_returned,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=params.max_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **more,
        )
        tokens = [_unpadded(row, ends) for row in output.sequences[:, longest:].tolist()]
        return tokens, output.sequences_scores.tolist()


def _unpadded(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first end token; what follows it is padding."""
    ending = [i for i, token in enumerate(tokens) if token in ends]
    return tokens[: ending[0] + 1] if ending else tokens
