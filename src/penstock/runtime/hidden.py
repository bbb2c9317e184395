"""The passes of pooling requests: hidden states instead of logits, over the same cache."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from penstock.nn import Decoder
from penstock.runtime.orders import Kind
from penstock.runtime.plan import fixed_tensors, record
from penstock.runtime.program import MOST_TOKENS, Program
from penstock.runtime.runner import Forward, Runner
from penstock.step import Step

logger = logging.getLogger("penstock")


def hidden_tensors(hidden: nn.Module) -> dict[str, Tensor]:
    """The tensors of `Decoder.last_hidden_state()`, by the names that they have in the decoder."""
    return {name.removeprefix("decoder."): t for name, t in fixed_tensors(hidden).items()}


class HiddenRunner:
    """Runs steps that end with the final norm; made when the first of them is wanted.

    Where the runner's steps are one native call, so are these: a second program over the same
    weights and cache, with buffers of its own for activations.
    """

    def __init__(self, decoder: Decoder, runner: Runner) -> None:
        self._runner = runner
        self._decoder = decoder
        self._hidden = hidden = decoder.last_hidden_state()
        self._adapted: Forward | None = None
        self._forward: Forward = hidden
        if runner.program is not None and not runner.is_pipelined:
            tensors = hidden_tensors(hidden)
            if runner.hidden_plan is None:
                plan, tensors = record(hidden, runner.kv, tensors)
            else:
                plan = runner.hidden_plan()
            program = Program.of_plan(plan, tensors, runner.kv)
            if runner.team is not None:
                program.use_threads([(MOST_TOKENS, runner.team.threads)])
            logger.info("A pooling step is one native call of %d operators.", len(program.calls))
            self._forward = program
        elif runner.graphs is not None:
            self._forward = runner.graphs.beside(hidden, runner.kv)

    def forward(self, step: Step) -> Tensor:
        """The final norm's rows `step.sample_at`, [S, D] float32, good until the next pooling
        step; keys and values go to the cache.
        """
        if self._runner.vocabulary is not None:
            step = self._runner.vocabulary.narrow(step)
        if self._runner.is_pipelined:
            return self._runner.through(step, Kind.HIDDEN, self._decoder.spec.hidden)[0]
        with torch.inference_mode(), self._runner.computing(step):
            forward = self._forward if step.adapters is None else self._for_adapters()
            forward = forward if step.runs is None else self._hidden
            with self._runner.together(lambda team: team.step(step, Kind.HIDDEN)):
                return forward(self._runner.own_part(step), self._runner.kv)

    def _for_adapters(self) -> Forward:
        """The same for steps with adapters."""
        if self._adapted is None:
            self._adapted = self._hidden
            if self._runner.program is not None:
                kv, tensors = self._runner.kv, hidden_tensors(self._hidden)
                found = record(self._hidden, kv, tensors, adapted=True)
                self._adapted = Program.of_plan(*found, kv)
        return self._adapted
