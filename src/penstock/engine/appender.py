"""Giving sequences their next tokens, and ending those that end with them."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Protocol

from penstock.engine.counters import TokenCounts
from penstock.engine.intake import Intake
from penstock.engine.request import Sequence
from penstock.sampling import TokenLogprobs
from penstock.tokenizer import IncrementalDetokenizer


class Finish(Protocol):
    """Ends one sequence."""

    def __call__(self, sequence: Sequence, reason: str, stop: int | str | None = None) -> None: ...


class Appender:
    """Appends tokens to sequences."""

    def __init__(
        self, intake: Intake, counts: TokenCounts, finish: Finish, jump_forward: bool
    ) -> None:
        self._intake = intake
        self._counts = counts
        self._finish = finish
        self._jump_forward = jump_forward
        self.detokenize_s = 0.0  # since its reader set it to 0

    def append(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        *,
        jump: bool = True,
    ) -> None:
        """A sampled token, and those that must follow it; the next step computes all in one go.

        jump: False where the token after it is known already, with its logits.

        Step by step each of those would be the only one that may come: the output is the same.
        There is no jump where every token's logits are needed: for log-probabilities, and for what
        else may forbid the token.
        """
        self._take(sequence, token, logprobs, now)
        constraint = sequence.sampling.constraint
        jump = jump and self._jump_forward and constraint is not None
        if not jump or _needs_logits(sequence):
            return
        assert constraint is not None  # or there would be no jump
        for forced in constraint.forced() if sequence.finish_reason is None else ():
            self._take(sequence, forced, None, now, forced=True)
            self._counts.jumped += 1
            if sequence.finish_reason is not None:
                return

    def ends_next(self, sequence: Sequence) -> bool:
        """Whether the next token is the last one, whatever it is."""
        count = sequence.num_output + 1
        return count == sequence.request.params.max_tokens or (
            sequence.longest + 1 >= self._intake.max_len
        )

    def append_all(self, sequence: Sequence, tokens: list[int], now: float) -> bool:
        """Several sampled tokens at once; False, and nothing is done, where each must be looked at.

        So it is where one of them may end the sequence, or is more than its id to somebody.
        """
        params, request = sequence.request.params, sequence.request
        count = sequence.num_output + len(tokens)
        alone = sequence.shadow is None and sequence.sampling.constraint is None
        if not alone or sequence.logprobs is not None or params.stop_strings:
            return False
        if (params.max_tokens is not None and count >= params.max_tokens) or (
            len(sequence.tokens) + len(tokens) >= self._intake.max_len
        ):
            return False
        ends = () if params.ignore_eos else self._intake.eos
        if any(token in ends or token in params.stop_ids for token in tokens):
            return False
        if sequence.index == 0:
            request.metrics.token_times += [now] * len(tokens)
        sequence.tokens += tokens
        for token in tokens:
            sequence.sampling.append(token)
        self._counts.generated += len(tokens)
        if sequence.detokenizer is not None:
            self._detokenize(sequence.detokenizer, tokens)
        return True

    def _take(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        *,
        forced: bool = False,
    ) -> None:
        """Append one token and see whether the sequence ends with it."""
        params = sequence.request.params
        if sequence.index == 0:
            sequence.request.metrics.token_times.append(now)
        sequence.tokens.append(token)
        sequence.sampling.append(token, forced=forced)
        self._counts.generated += 1
        if logprobs is not None and sequence.logprobs is not None:
            self.name(logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token].logprob
        count, detokenizer = sequence.num_output, sequence.detokenizer
        constraint = sequence.sampling.constraint
        healing = constraint is not None and sequence.request.prefix  # it repeats the prompt's end
        if count >= params.min_tokens and not healing:
            asked = token in params.stop_ids
            if asked or (token in self._intake.eos and not params.ignore_eos):
                if detokenizer is not None and params.include_stop_str_in_output:
                    self._detokenize(detokenizer, (token,))
                return self._finish(sequence, "stop", token if asked else None)
        if detokenizer is not None:
            self._detokenize(detokenizer, (token,))
            if detokenizer.stop_reason is not None:
                return self._finish(sequence, "stop", detokenizer.stop_reason)
        if constraint is not None and constraint.is_complete:
            return self._finish(sequence, "stop")
        if count == params.max_tokens or sequence.longest >= self._intake.max_len:
            return self._finish(sequence, "length")
        if (
            detokenizer is not None and count == params.min_tokens and params.stop_strings
        ):  # they count from here on
            detokenizer.look_for(params.stop_strings)
        return None

    def _detokenize(self, detokenizer: IncrementalDetokenizer, tokens: Seq[int]) -> None:
        start = time.perf_counter()
        detokenizer.append(tokens)
        self.detokenize_s += time.perf_counter() - start

    def name(self, logprobs: TokenLogprobs) -> None:
        """Fill in what each token looks like."""
        tokenizer = self._intake.tokenizer
        if tokenizer is not None:
            for token, entry in logprobs.items():
                entry.decoded_token = tokenizer.token_bytes(token).decode("utf-8", "replace")


def _needs_logits(sequence: Sequence) -> bool:
    """Whether a token that a constraint forces may still be refused, or is to be reported."""
    params = sequence.request.params
    bans = params.allowed_token_ids or params.banned_texts or params.logits_processors
    below = sequence.num_output < params.min_tokens  # end and stop tokens are banned until then
    return bool(bans) or below or sequence.logprobs is not None
