"""Beam search in the engine: which sequence each beam is, and what becomes of them in a step.

A beam is a sequence like any other. Beams are computed in the same steps, and then the search says
which of them go on, and how often. The first continuation of a beam stays where it is; every other
one becomes a sequence of those whose beams have ended, with the parent's blocks: full ones are
shared, and one that both would write to is copied before the next step. So a fork copies at most
one block, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.engine.forks import Forks
from penstock.engine.intake import Intake
from penstock.engine.outputs import CompletionOutput
from penstock.engine.request import Request, Sequence
from penstock.sampling import (
    BeamSearch,
    BeamSearchParams,
    Hypothesis,
    SamplingParams,
    log_probabilities,
    num_words,
)
from penstock.tokenizer import IncrementalDetokenizer, Tokenizer


def sampling_of(params: BeamSearchParams) -> SamplingParams:
    """What the sequences of a search are queued with: as many samples as there are beams."""
    return SamplingParams(
        n=params.beam_width,
        max_tokens=params.max_tokens,
        detokenize=False,
        structured_outputs=params.structured_outputs,
    )


class Beams:
    """One request's."""

    def __init__(self, request: Request, params: BeamSearchParams, intake: Intake) -> None:
        """Raises RequestError for parameters that this model can't follow."""
        room = intake.max_len - len(request.prompt_token_ids)
        self.params = params
        self._search = BeamSearch(params, intake.eos, intake.vocab_size, room)
        self.request = request
        self._tokenizer = intake.tokenizer
        self._rows = [request.sequences[0]]  # of the search's log-probabilities
        self._scores: Tensor | None = None  # of the step being computed, [L, V]
        self._words = num_words(intake.vocab_size)
        self._longest = max((len(text.encode()) for text in params.stop_strings), default=0)
        for sequence in request.sequences:
            sequence.mates = request.sequences
        request.beams = self

    @property
    def is_done(self) -> bool:
        """Whether nothing goes on."""
        return self._search.is_done

    def read(self, sampled: Seq[Sequence], logits: Tensor) -> None:
        """Note a step's log-probabilities, -inf where a beam's form forbids a token.

        logits [S, V] float32 belong to `sampled`, in their order.
        """
        place = {sequence: row for row, sequence in enumerate(sampled)}
        found = log_probabilities(logits[[place[one] for one in self._rows]], self.params)
        bits = np.zeros((len(self._rows), self._words), dtype=np.int32)
        for row, sequence in enumerate(self._rows):
            if sequence.sampling.constraint is not None:
                sequence.sampling.constraint.fill(bits[row])
        if self.params.structured_outputs is not None:
            rows = torch.arange(len(self._rows), device=found.device)
            ops.mask_(found, rows, torch.from_numpy(bits).to(found.device))
        self._scores = found

    def advance(self, forks: Forks) -> int:
        """Let the beams go on; returns how many do. Raises RequestError where none can."""
        assert self._scores is not None  # of `read`
        scores, self._scores = self._scores, None
        finds_stops = self._stopped if self.params.stop_strings else None
        going_on = self._search.advance(scores, finds_stops)
        before = self._rows
        parents = [before[one.parent] for one in going_on]
        staying = set(parents)
        free = [one for one in self.request.sequences if one not in staying]
        rows: list[Sequence] = []
        for parent in parents:
            if parent in staying:
                staying.remove(parent)
                rows.append(parent)
            else:
                child = free.pop()
                forks.adopt(child, parent)
                child.tokens = list(parent.tokens)
                constraint = parent.sampling.constraint
                child.sampling.constraint = None if constraint is None else constraint.fork()
                rows.append(child)
        for sequence in free:
            forks.park(sequence)
        for sequence, one in zip(rows, going_on, strict=True):
            sequence.tokens.append(one.token)
            if sequence.sampling.constraint is not None:
                sequence.sampling.constraint.accept(one.token)
        self._rows = rows
        return len(rows)

    def _stopped(self, row: int, token: int) -> str | None:
        """The stop string that a beam's text holds with one more token."""
        assert self._tokenizer is not None  # the engine has refused stop strings without one
        tail = self._tokenizer.token_bytes(token)
        wanted = self._longest - 1 + len(tail)  # none was there before this token
        for before in reversed(self._output(self._rows[row])):
            if len(tail) >= wanted:
                break
            tail = self._tokenizer.token_bytes(before) + tail
        tail = tail[-wanted:]
        return next((text for text in self.params.stop_strings if text.encode() in tail), None)

    @staticmethod
    def _output(sequence: Sequence) -> list[int]:
        return sequence.tokens[sequence.num_prompt :]

    def completions(self) -> list[CompletionOutput]:
        """The best there are now; those that still go on have no finish reason."""
        reason = self.request.sequences[0].finish_reason if self.request.finished else None
        return [
            self._completion(index, one, reason) for index, one in enumerate(self._search.best())
        ]

    def _completion(self, index: int, one: Hypothesis, reason: str | None) -> CompletionOutput:
        if self._tokenizer is not None and one.logprobs is not None:
            for token, entry in (pair for at in one.logprobs for pair in at.items()):
                entry.decoded_token = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        return CompletionOutput(
            index=index,
            text=_text(one, self.params, self._tokenizer, self.request.prompt_token_ids),
            token_ids=one.tokens,
            cumulative_logprob=one.logprob,
            logprobs=one.logprobs,
            finish_reason=one.finish_reason or reason,
            stop_reason=one.stop_reason,
            score=one.score,
        )


def _text(
    one: Hypothesis, params: BeamSearchParams, tokenizer: Tokenizer | None, prompt: list[int]
) -> str:
    """What a hypothesis adds to the prompt's text, without what ended it unless that is wanted."""
    if tokenizer is None:
        return ""
    by_token = one.finish_reason == "stop" and not isinstance(one.stop_reason, str)
    hidden = by_token and not params.include_stop_str_in_output
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        prompt_ids=prompt,
        skip_special_tokens=params.skip_special_tokens,
        stop=params.stop_strings,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    detokenizer.append(one.tokens[:-1] if hidden else one.tokens)
    detokenizer.finish()
    return detokenizer.text
