"""Beam search: the likeliest continuations of a prompt, a fixed number of them at a time.

    logits ─ log_probabilities ─ the caller's masks ─ BeamSearch.advance
        ├─ continuations: which beam each of the next ones goes on from, and with which token
        └─ hypotheses: those that ended

What happens in a step, for each group of W beams:

1. every beam's candidates are its likeliest tokens; a candidate's score is its beam's and the
   token's log-probability, less the diversity penalty;
2. of the W best candidates, those that end become hypotheses; the others that end are dropped;
3. the W best that don't end go on.

The W best hypotheses are kept. A search of its own is what one group does, so groups of a diverse
search differ only in the penalty. What counts as an end, how hypotheses are ranked and when the
search is over follow transformers 5.

Sources: Vijayakumar et al. 2016, arXiv:1610.02424 (groups); Wu et al. 2016, arXiv:1609.08144
(ranking by length).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import ConfigError, InvalidSamplingError, ModelOutputError, RequestError
from penstock.sampling.beam_params import BeamSearchParams
from penstock.sampling.logprobs import TokenLogprobs, collect
from penstock.sampling.pending import not_finite
from penstock.sampling.samplers.rows import log_softmax

Stopped = Callable[[int, int], str | None]
"""(row, token) → the stop string that this beam's text holds with this token, if any."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step."""

    parent: int  # the row of this step's log-probabilities that it goes on from
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation of the prompt that ended, or one that still goes on."""

    tokens: list[int]  # its end token included
    score: float  # what it is ranked by
    logprob: float  # of all its tokens together
    group: int
    finish_reason: str | None  # "stop", "length", or None while it goes on
    stop_reason: int | str | None = None  # of stop_token_ids or stop, what ended it
    logprobs: list[TokenLogprobs] | None = None  # where asked for


@dataclass(eq=False, slots=True)
class _Node:
    """A token of a beam. Beams that went apart share those before."""

    before: _Node | None
    token: int
    listed: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _Beam:
    score: float  # its log-probability less the diversity penalties
    logprob: float
    last: _Node | None


@dataclass(frozen=True, slots=True)
class _Ended:
    beam: _Beam
    score: float
    finish_reason: str
    stop_reason: int | str | None


@dataclass(eq=False, slots=True)
class _Group:
    """Beams that are searched together."""

    index: int
    rows: list[int]  # of the log-probabilities: its live beams'
    live: list[_Beam]  # the best first
    ended: list[_Ended] = field(default_factory=list)  # the best first


@dataclass(frozen=True, slots=True)
class _Candidate:
    row: int
    node: _Node
    beam: _Beam

    @property
    def token(self) -> int:
        return self.node.token


def log_probabilities(logits: Tensor, params: BeamSearchParams) -> Tensor:
    """What `BeamSearch.advance` takes, before the caller's masks: [L, V] float32."""
    with torch.no_grad():  # not in inference mode, or nobody could mask it in place
        logits = logits.to(torch.float32)
        if params.divisor != 1.0:
            logits = logits / params.divisor
        return log_softmax(logits)


class BeamSearch:
    """The search of one request. Its caller computes logits, and keeps tokens, keys and values."""

    def __init__(
        self,
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        vocab_size: int,
        max_tokens: int | None = None,
    ) -> None:
        """max_tokens: where the context leaves fewer than ``params.max_tokens``."""
        for token in params.stop_ids:
            if token >= vocab_size:
                raise InvalidSamplingError(
                    f"stop_token_ids holds token id {token}, but the vocabulary ends at "
                    f"{vocab_size - 1}. Use ids of this model's tokenizer."
                )
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; leave room for one token at least.")
        self.params = params
        self.vocab_size = vocab_size
        self.max_tokens = min(params.max_tokens, max_tokens or params.max_tokens)
        self.num_generated = 0
        self._eos = frozenset[int]() if params.ignore_eos else frozenset(eos_token_ids)
        self._asked = frozenset(params.stop_ids)
        start = _Beam(0.0, 0.0, None)
        self._groups = [_Group(i, [0], [start]) for i in range(params.num_beam_groups)]

    @property
    def is_done(self) -> bool:
        """Whether nothing goes on."""
        return not any(group.live for group in self._groups)

    @property
    def num_rows(self) -> int:
        """How many rows of log-probabilities the next step takes: 1, then one for each beam."""
        return len({row for group in self._groups for row in group.rows})

    def advance(self, logprobs: Tensor, stopped: Stopped | None = None) -> list[Continuation]:
        """Take a step. The next step's row i belongs to the i-th continuation; none = done.

        logprobs [L, V] float32: `log_probabilities` of the beams, -inf where a token mustn't
        come; L = `num_rows`. stopped finds stop strings, which the search can't read itself.
        Equal scores are ordered by the beam, then by the token's id. Raises RequestError where
        there is nothing to go on with.
        """
        self._check(logprobs, stopped)
        self.num_generated += 1
        with torch.inference_mode():
            values, ids = self._leading(logprobs, stopped is not None)
        taken: Counter[int] = Counter()  # by beams of the groups before, unless they ended there
        fresh: list[_Candidate] = []  # whatever has become part of the search
        continuations: list[Continuation] = []
        for group in self._groups:
            if not group.live:
                continue
            candidates = self._candidates(group, values, ids, taken)
            going_on = self._divide(group, candidates, stopped, fresh, taken)
            first = len(continuations)
            continuations += [Continuation(one.row, one.token) for one in going_on]
            group.rows = list(range(first, len(continuations)))
            group.live = [one.beam for one in going_on]
        if fresh and self.params.logprobs is not None:
            self._list(logprobs, fresh, self.params.logprobs)
        if not continuations and not any(group.ended for group in self._groups):
            raise RequestError(
                "Every token is masked in every beam: a grammar leaves none of the vocabulary, "
                "and no hypothesis has ended. Loosen it, or widen the search."
            )
        return continuations

    def best(self) -> list[Hypothesis]:
        """The n best hypotheses, the best first; while the search goes on, then the live beams."""
        ended = [(one, group) for group in self._groups for one in group.ended]
        ended.sort(key=lambda pair: -pair[0].score)
        found = [
            self._hypothesis(e.beam, group, e.score, e.finish_reason, e.stop_reason)
            for e, group in ended
        ]
        alive = [(self._score(beam), beam, group) for group in self._groups for beam in group.live]
        alive.sort(key=lambda one: -one[0])
        found += [self._hypothesis(beam, group, score, None, None) for score, beam, group in alive]
        return found[: self.params.num_returned]

    def _check(self, logprobs: Tensor, stopped: Stopped | None) -> None:
        if self.is_done:
            raise ConfigError("This search is done. Make a new BeamSearch for another one.")
        shape = (self.num_rows, self.vocab_size)
        if logprobs.shape != shape:
            raise ConfigError(
                f"Beam search got log-probabilities of shape {list(logprobs.shape)} for "
                f"{shape[0]} beams and a vocabulary of {shape[1]}. Pass {list(shape)}."
            )
        if self.params.stop_strings and stopped is None:
            raise ConfigError(
                f"The request has {len(self.params.stop_strings)} stop strings, but nothing was "
                "passed that finds them. Pass stopped."
            )

    def _leading(
        self, logprobs: Tensor, may_stop: bool
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Values and ids [L, K] of as many tokens of each row as can matter."""
        width = self.params.group_width
        # Tokens that end can't go on, and those that other groups took may fall behind.
        count = width + len(self._eos | self._asked) + self.params.beam_width - width
        top, at = ops.top_k(logprobs.to(torch.float32), count + width * may_stop)
        values = top.cpu().numpy().astype(np.float64)
        ids: npt.NDArray[np.int64] = at.cpu().numpy()
        peak = float(values[:, 0].max())  # NaN where any is
        if not peak < math.inf:
            raise ModelOutputError(not_finite(peak))
        return values, ids

    def _candidates(
        self,
        group: _Group,
        values: npt.NDArray[np.float64],
        ids: npt.NDArray[np.int64],
        taken: Counter[int],
    ) -> Iterator[_Candidate]:
        """What a group may go on with, the best first."""
        logprobs, tokens = values[group.rows], ids[group.rows]
        before = np.array([beam.score for beam in group.live])[:, None]
        scores = before + logprobs
        for token, count in taken.items():
            scores[tokens == token] -= self.params.diversity_penalty * count
        places = np.broadcast_to(np.arange(len(group.rows))[:, None], tokens.shape)
        for at in np.lexsort((tokens.ravel(), places.ravel(), -scores.ravel())).tolist():
            place, rank = divmod(at, tokens.shape[1])
            logprob = float(logprobs[place, rank])
            if logprob == -math.inf:
                return
            parent = group.live[place]
            node = _Node(parent.last, int(tokens[place, rank]))
            beam = _Beam(float(scores[place, rank]), parent.logprob + logprob, node)
            yield _Candidate(group.rows[place], node, beam)

    def _divide(
        self,
        group: _Group,
        candidates: Iterator[_Candidate],
        stopped: Stopped | None,
        fresh: list[_Candidate],
        taken: Counter[int],
    ) -> list[_Candidate]:
        """Keep the hypotheses among the candidates; returns those that go on."""
        width = self.params.group_width
        going_on: list[_Candidate] = []
        ended: list[_Ended] = []
        for rank, one in enumerate(candidates):
            if rank >= width and len(going_on) == width:
                break
            reason, stop = self._end(one, stopped)
            if reason is None:
                if len(going_on) < width:
                    going_on.append(one)
            elif rank < width:
                ended.append(_Ended(one.beam, self._score(one.beam), reason, stop))
                fresh.append(one)
                taken[one.token] += reason == "length"
            elif reason == "length":
                break
        # Sorting is stable: among equals the earlier one stays.
        group.ended = sorted(group.ended + ended, key=lambda e: -e.score)[:width]
        if self._is_over(group, going_on):
            return []
        fresh += going_on
        taken.update(one.token for one in going_on)
        return going_on

    def _end(self, one: _Candidate, stopped: Stopped | None) -> tuple[str | None, int | str | None]:
        """The finish reason of a candidate, None if it goes on, and what stopped it."""
        if one.token in self._asked:
            return "stop", one.token
        if one.token in self._eos:
            return "stop", None
        text = None if stopped is None else stopped(one.row, one.token)
        if text is not None:
            return "stop", text
        return ("length" if self.num_generated >= self.max_tokens else None), None

    def _is_over(self, group: _Group, going_on: list[_Candidate]) -> bool:
        """Whether what goes on is given up: enough has ended, and nothing better is in sight."""
        params = self.params
        if not going_on:
            return True
        if len(group.ended) < params.group_width:
            return False
        if params.early_stopping is True:
            return True
        # A guess: a beam's log-probability falls, but so does what its length divides it by.
        longest = params.early_stopping == "never" and params.length_penalty > 0.0
        length = self.max_tokens if longest else self.num_generated
        hope = going_on[0].beam.score / math.pow(length, params.length_penalty)
        return hope <= group.ended[-1].score

    def _score(self, beam: _Beam) -> float:
        """What a hypothesis of the present length is ranked by."""
        return beam.score / math.pow(max(self.num_generated, 1), self.params.length_penalty)

    def _list(self, logprobs: Tensor, fresh: list[_Candidate], count: int) -> None:
        """Note what else could have come, of every token that has become part of the search."""
        rows = torch.tensor([one.row for one in fresh], device=logprobs.device)
        tokens = torch.tensor([one.token for one in fresh], device=logprobs.device)
        with torch.inference_mode():
            chosen = logprobs.to(torch.float32).index_select(0, rows)
            found = collect(chosen, tokens, [count] * len(fresh))
        for one, entry in zip(fresh, found, strict=True):
            one.node.listed = entry

    def _hypothesis(
        self,
        beam: _Beam,
        group: _Group,
        score: float,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> Hypothesis:
        nodes: list[_Node] = []
        node = beam.last
        while node is not None:
            nodes.append(node)
            node = node.before
        nodes.reverse()
        listed = [node.listed for node in nodes if node.listed is not None]
        return Hypothesis(
            tokens=[node.token for node in nodes],
            score=score,
            logprob=beam.logprob,
            group=group.index,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if self.params.logprobs is None else listed,
        )
