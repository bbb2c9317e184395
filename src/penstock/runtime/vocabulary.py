"""Where the ids of a reduced vocabulary meet the model: tokens in, logits out.

Everything above a runner speaks of the tokenizer's ids. A token becomes its row of the smaller
embedding just before the pass; the logits are spread over all ids just after it, −∞ where there is
no row, which samplers never choose.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import InvalidPromptError
from penstock.step import Step
from penstock.tokenizer.vocab_map import VocabMap

KEPT_ROWS = 256
"""Memory for logits is kept for up to this many rows."""


class ReducedVocabulary:
    """Translates for one model; one thread's, as its runner is."""

    def __init__(self, vocab_map: VocabMap) -> None:
        self.map = vocab_map
        self._new = torch.from_numpy(vocab_map.new)
        self._kept = torch.from_numpy(vocab_map.kept).to(torch.int64)
        missing = (vocab_map.new < 0).nonzero()[0]
        self._gap = int(missing[0]) if len(missing) else None  # an id without a row
        self._logits = torch.empty((0, vocab_map.original_size))

    def narrow(self, step: Step) -> Step:
        """The step with rows of the model's embedding for ids."""
        tokens = self._new.index_select(0, step.tokens)
        if len(tokens) and int(tokens.min()) < 0:
            missing = int(step.tokens[int(tokens.argmin())])
            raise InvalidPromptError(
                f"Token id {missing} isn't in this model's reduced vocabulary; "
                "VocabMap.write gives ids that are."
            )
        return replace(step, tokens=tokens)

    def _restore(self, wide: Tensor) -> None:
        """Put −∞ back where a sampler wrote over a row's missing ids: it does so to all of them."""
        if self._gap is None:
            return
        written = ~wide[:, self._gap].isneginf()
        if wide.is_cuda:  # without asking it whether there are any
            wide.masked_fill_(written[:, None], -torch.inf)
        elif written.any():
            wide[written] = -torch.inf

    def widen(self, logits: Tensor) -> Tensor:
        """Logits [S, N] over all ids, [S, V]: −∞ where there is none. Good until the next call."""
        rows, size = logits.shape[0], self.map.original_size
        with torch.inference_mode():
            self._kept = self._kept.to(logits.device)
            if rows > KEPT_ROWS:
                wide = torch.full((rows, size), -torch.inf, device=logits.device)
            else:
                held = self._logits.shape[0]
                if (
                    held < rows or self._logits.device != logits.device
                ):  # at least doubled: filling takes longer than all the rest
                    held = min(max(rows, 2 * held), KEPT_ROWS)
                    self._logits = torch.full((held, size), -torch.inf, device=logits.device)
                wide = self._logits[:rows]
                self._restore(wide)
            return wide.scatter_(1, self._kept.expand(rows, -1), logits)
