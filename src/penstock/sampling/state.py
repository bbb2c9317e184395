"""What the sampler remembers of one running sequence."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidSamplingError
from penstock.sampling.constraint import Constraint
from penstock.sampling.params import SamplingParams
from penstock.sampling.processors import ProcessorRow
from penstock.sampling.samplers.dry import DryParams, DryState
from penstock.sampling.samplers.mirostat import moved

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.float32]

_FIRST_CAPACITY: Final = 64
_SEED_BITS: Final = 2**64 - 1


class SequenceSampling:
    """The parameters of one sequence and what penalties need of its tokens, kept as it grows.

    ``seed`` is the resolved one: the request's, or one that the engine drew. The n samples of a
    request share it and differ in ``sample_index``. One object belongs to one sequence.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        seed: int,
        eos_token_ids: frozenset[int],
        sample_index: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
        breakers: Container[int] = frozenset(),
        text: Sequence[int] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """bad_words: the token sequences of ``params.bad_words``; breakers: the tokens that hold
        one of ``params.breakers``; text: the sequence's tokens, kept up to date by its owner, for
        logits processors; constraint: what limits its next token, moved on with its tokens.
        """
        self.params = params
        self.kin = object()  # the same one in all forks: what is fixed is the same in them
        self.seed = seed & _SEED_BITS
        self.sample_index = sample_index
        self.num_generated = 0
        self.bad_words = [tuple(_within("bad_words", w, vocab_size).tolist()) for w in bad_words]
        self._kept = max(map(len, self.bad_words), default=1) - 1
        self._tail: list[int] = []  # of the output: as much as a bad word may have begun with
        bias = params.logit_bias or {}
        self.bias_ids = _within("logit_bias", bias, vocab_size)
        self.bias_values: Counts = np.fromiter(bias.values(), np.float32, len(bias))
        allowed = params.allowed_token_ids
        self.allowed_ids = (
            None if allowed is None else _within("allowed_token_ids", allowed, vocab_size)
        )
        stops = _within("stop_token_ids", params.stop_ids, vocab_size)
        # A model may declare an end token that its output layer doesn't have: it can't be drawn.
        ends = {token for token in eos_token_ids if 0 <= token < vocab_size}
        self.end_ids: Ids = np.array(sorted(ends.union(stops.tolist())), dtype=np.int64)
        repeats = params.repetition_penalty != 1.0
        self.has_penalties = (
            repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.mu = 2 * params.mirostat_tau  # bits: what mirostat bounds surprise by
        self.surprise = 0.0  # bits: of the token that was drawn last
        self.text = text
        self.constraint = constraint
        self.num_prompt = len(prompt_token_ids)
        self.dry: DryState | None = None
        if params.dry_multiplier and params.dry_penalty_last_n:
            _within("The prompt", prompt_token_ids, vocab_size)
            self.dry = DryState(DryParams.of(params), prompt_token_ids, breakers)
        prompt: Ids = np.empty(0, dtype=np.int64)
        if repeats:  # the only penalty that looks at the prompt
            prompt = np.unique(_within("The prompt", prompt_token_ids, vocab_size))
        self._length = len(prompt)
        self._tokens: Ids = np.zeros(max(_FIRST_CAPACITY, 2 * len(prompt)), dtype=np.int64)
        self._tokens[: self._length] = prompt
        self._counts: Counts = np.zeros(len(self._tokens), dtype=np.float32)
        self._slots: dict[int, int] = {token: i for i, token in enumerate(prompt.tolist())}

    def append(self, token_id: int, *, forced: bool = False) -> None:
        """Record a token that was accepted into the output; forced: it was the only one possible.

        Raises RequestError for one that the constraint forbids.
        """
        if self.constraint is not None:
            self.constraint.accept(token_id)
            if self.constraint.is_over:
                self.constraint = None
        if forced:
            self.surprise = 0.0
        self.num_generated += 1
        params = self.params
        if params.mirostat:
            self.mu = moved(self.mu, self.surprise, params.mirostat_tau, params.mirostat_eta)
        if self.dry is not None:
            self.dry.append(token_id)
        if self._kept:
            self._tail.append(token_id)
            del self._tail[: -self._kept]
        if not self.has_penalties:
            return
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._length
            if slot == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._tokens[slot] = token_id
            self._length += 1
        self._counts[slot] += 1.0

    def fork(self, token_id: int) -> SequenceSampling:
        """The state after one more token, for a guess at what may come; this one stays as it is.

        Raises RequestError for a token that the constraint forbids.
        """
        twin = object.__new__(SequenceSampling)
        twin.__dict__.update(self.__dict__)
        if self.constraint is not None:
            twin.constraint = self.constraint.fork()
        if self.dry is not None:
            twin.dry = self.dry.fork()
        if self._kept:
            twin._tail = list(self._tail)
        if self.has_penalties:
            twin._tokens, twin._counts = self._tokens.copy(), self._counts.copy()
            twin._slots = dict(self._slots)
        if self.text is not None:  # which only processors look at
            twin.text = [*self.text, token_id] if self.params.logits_processors else None
        twin.append(token_id)
        return twin

    def seen(self) -> ProcessorRow:
        """The sequence, as logits processors see it. Raises ValueError without its text."""
        if self.text is None:
            raise ValueError("this sequence was made without its text")
        tokens = tuple(self.text)
        n = self.num_prompt
        return ProcessorRow(tokens[:n], tokens[n:], self.sample_index)

    @property
    def seen_tokens(self) -> Ids:
        """The distinct tokens that a penalty may touch, [N]; a view that later appends change."""
        return self._tokens[: self._length]

    @property
    def seen_counts(self) -> Counts:
        """How often the output holds each of :attr:`seen_tokens`, [N]; 0 for the prompt's own."""
        return self._counts[: self._length]

    @property
    def banned_ids(self) -> Ids:
        """Tokens that would complete a bad word now, [N]."""
        tail = self._tail
        found = {
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or tuple(tail[1 - len(word) :]) == word[:-1]
        }
        return np.array(sorted(found), dtype=np.int64)

    @property
    def looks_back(self) -> bool:
        """Whether what may come next depends on what the tokens before it are, in ways that need
        the host to know them. Penalties don't.
        """
        params = self.params
        return bool(
            self.constraint is not None
            or self.dry is not None
            or self.bad_words
            or params.mirostat
            or params.logits_processors
        )

    def is_below_minimum(self, ahead: int = 0) -> bool:
        """Whether ``min_tokens`` still forbids this sequence to end, `ahead` tokens from here."""
        return self.num_generated + ahead < self.params.min_tokens


def _within(name: str, token_ids: Iterable[int], vocab_size: int) -> Ids:
    """The ids as an array, all inside the vocabulary."""
    ids: Ids = np.array(list(token_ids), dtype=np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InvalidSamplingError(
            f"{name} holds token id {outside[0]}, but the vocabulary ends at {vocab_size - 1}. "
            "Use ids of this model's tokenizer."
        )
    return ids
