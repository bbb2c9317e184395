"""Embeddings: a prompt's hidden states after the final norm, pooled into one vector.

Pooling requests share the queue, the cache and the steps' budget with generating ones. In a step
their parts run as a pass of their own, which ends with the final norm instead of the head.

The vector is a function of the prompt alone, bit for bit. Its rows are (see docs/architecture.md);
`mean` adds them in their order in float64, so that no chunk shows, and lengths are summed exactly
and rounded once (`math.fsum`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch import Batch, Batcher
from penstock.engine.ending import Ending
from penstock.engine.intake import Start
from penstock.engine.outputs import RequestMetrics, RequestOutput
from penstock.engine.pictures import seeing
from penstock.engine.plan import Part, Plan
from penstock.engine.request import Request, Sequence
from penstock.errors import ModelOutputError, RequestError, nearest
from penstock.roofline import StepSize
from penstock.runtime import HiddenRunner
from penstock.runtime.device import is_fatal
from penstock.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

logger = logging.getLogger("penstock")

POOLING_TYPES = ("last", "mean", "cls")

NO_SAMPLES = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""What the scheduler is told of a pooling request: one sequence, nothing of which is sampled."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt becomes a vector, in vLLM's names.

    pooling_type: the row of the `last` token, which has seen all; the `mean` of all rows; or that
    of the first, `cls`, for models that were trained so.
    """

    pooling_type: Literal["last", "mean", "cls"] = "last"
    normalize: bool = True  # to a length of 1
    dimensions: int | None = None  # keep the first so many, then normalize

    def __post_init__(self) -> None:
        if self.pooling_type not in POOLING_TYPES:
            raise RequestError(
                f"pooling_type={self.pooling_type!r} isn't one of {', '.join(POOLING_TYPES)}."
                f"{nearest(str(self.pooling_type).lower(), POOLING_TYPES)}"
            )
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize must be True or False, not {self.normalize!r}.")
        count = self.dimensions
        if count is None:
            return
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise RequestError(f"dimensions must be a positive integer, not {count!r}.")

    def finish(self, pooled: NDArray[np.float64]) -> list[float]:
        """The embedding of a pooled row [hidden]: cut, normalized, rounded to float32.

        A row of zeros stays one. Source of cutting: Kusupati et al. 2022, arXiv:2205.13147.
        """
        kept = pooled[: self.dimensions]
        if not np.isfinite(kept).all():
            raise ModelOutputError(
                "The model's hidden states of this prompt aren't finite numbers. Check the weights."
            )
        if self.normalize:
            length = math.sqrt(math.fsum((kept * kept).tolist()))
            kept = kept / (length or 1.0)
        found: list[float] = kept.astype(np.float32).tolist()
        return found


def checked(given: Any, hidden: int) -> PoolingParams:
    """Parameters for a model with hidden states of that size; the default for None.

    Raises RequestError for what can't be.
    """
    params = PoolingParams() if given is None else given
    if not isinstance(params, PoolingParams):
        raise RequestError(f"Pooling parameters must be PoolingParams, not {type(given).__name__}.")
    if params.dimensions is not None and params.dimensions > hidden:
        raise RequestError(
            f"dimensions={params.dimensions}, but this model's hidden states have {hidden}. Ask "
            f"for up to {hidden}, or leave it out."
        )
    return params


@dataclass(slots=True)
class PoolingRequestOutput(RequestOutput):
    """What a step returns of a pooling request that has ended; `outputs` is empty."""

    embedding: list[float] = field(default_factory=list)  # empty unless it ended by itself
    finish_reason: str | None = None  # "stop", "abort" or "error"


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]  # float32 values

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    metrics: RequestMetrics

    @classmethod
    def from_base(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """Of what a step returned. Raises what the request failed of."""
        assert isinstance(output, PoolingRequestOutput)  # nobody else asks
        if output.error is not None:
            raise output.error
        if output.finish_reason != "stop":
            raise RequestError(
                f"Request {output.request_id!r} was aborted before its embedding was computed."
            )
        return cls(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            EmbeddingOutput(output.embedding),
            output.finished,
            output.metrics,
        )


@dataclass(eq=False, slots=True)
class PoolingRequest(Request):
    """A prompt whose hidden states are pooled; its one sequence ends with it."""

    pooling: PoolingParams = field(default_factory=PoolingParams)
    pooled: NDArray[np.float64] | None = None  # [hidden]: a row, or the sum of the rows so far
    embedding: list[float] = field(default_factory=list)

    @property
    def reads_prompt(self) -> bool:
        return self.pooling.pooling_type != "last"

    def take(self, rows: NDArray[np.float32], first: int) -> None:
        """Pool rows [n, hidden], the first of which is that of token `first`."""
        kind = self.pooling.pooling_type
        if kind == "last":
            self.pooled = rows[-1].astype(np.float64)
        elif kind == "cls":
            if first == 0:
                self.pooled = rows[0].astype(np.float64)
        else:
            if first == 0:  # also when it starts again after giving way
                self.pooled = np.zeros(rows.shape[1])
            assert self.pooled is not None
            for row in rows:
                self.pooled += row

    def finish(self) -> None:
        """All tokens are pooled: make the embedding."""
        assert self.pooled is not None
        if self.pooling.pooling_type == "mean":
            self.pooled /= len(self.prompt_token_ids)
        self.embedding = self.pooling.finish(self.pooled)

    def output(self) -> PoolingRequestOutput:
        """The request as its caller sees it."""
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[],
            finished=self.finished,
            metrics=self.metrics,
            error=self.error,
            embedding=self.embedding,
            finish_reason=self.sequences[0].finish_reason,
        )


def pooling_request(
    start: Start, prompt: str | None, tokens: list[int], params: PoolingParams
) -> PoolingRequest:
    """A request to embed these tokens, without its sequence."""
    return PoolingRequest(
        request_id=start.request_id,
        prompt=prompt,
        prompt_token_ids=tokens,
        params=NO_SAMPLES,
        arrival=start.arrival,
        stream=start.stream,
        metrics=RequestMetrics(start.time_s),
        options=start.options,
        live=1,
        pooling=params,
    )


class Pooler:
    """The part of an engine's step that serves pooling requests; made for the first of them."""

    def __init__(
        self, engine: Engine, computed: Callable[[Sequence, int], None], ending: Ending
    ) -> None:
        """computed: what the engine does when a part of a prompt is in the cache."""
        runtime, limits = engine.runtime, engine.config.scheduler
        self._computed, self._ending = computed, ending
        self._scheduler, self._ledger = engine.scheduler, engine.ledger
        self._sight = runtime.sight
        self._hidden = HiddenRunner(runtime.model.model, runtime.runner)
        # its own, so that the engine's goes on with the sequences that decode
        self._batcher = Batcher(
            engine.scheduler.table,
            runtime.layout.block_size,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            0 if runtime.sight is None else runtime.sight.spare,
            engine.scheduler.states,
        )

    def run(self, plan: Plan, touched: dict[str, Request], marks: list[float]) -> list[float]:
        """Take the pooling parts out of `plan` and compute them, in a pass before the others'.

        touched: gets the requests that end. marks: the step's start and the end of its schedule;
        returns those of what is left of the step.
        """
        parts = [part for part in plan.parts if isinstance(part[0].request, PoolingRequest)]
        if not parts:
            return marks
        plan.parts = [
            part for part in plan.parts if not isinstance(part[0].request, PoolingRequest)
        ]
        size = self._run(parts, touched, marks)
        now = time.perf_counter()
        if size is not None:
            record = self._ledger.record(size, (*marks, now))
            for sequence, _ in parts:
                sequence.request.metrics.take_part(record)
            self._ledger.rest()  # the wait before this step is counted once
        return [now, now]

    def _run(
        self, parts: list[Part], touched: dict[str, Request], marks: list[float]
    ) -> StepSize | None:
        """Compute and pool; where that raises, each sequence alone: only the culprit fails."""
        try:
            batch = self._batcher.build(parts)
            self._batcher.forget()  # none of them decodes
            marks.append(time.perf_counter())
            with seeing(self._sight, batch):
                rows: NDArray[np.float32] = self._hidden.forward(batch.step).cpu().numpy()
            marks.append(time.perf_counter())
        except Exception as error:  # whatever a model or a kernel raises
            if is_fatal(error):
                raise
            if len(parts) == 1:
                self._give_up(parts[0][0].request, error, touched)
                return None
            logger.warning("A step of %d pooling sequences raised: %r", len(parts), error)
            for part in parts:
                self._run([part], touched, [])
            return None
        self._pool(parts, batch, rows, touched)
        marks.append(time.perf_counter())
        size = batch.size  # but that no row meets the head
        return StepSize(
            size.queries,
            size.contexts,
            0,
            prefill_tokens=size.prefill_tokens,
            adapter_bytes=size.adapter_bytes,
            seen=size.seen,
        )

    def _pool(
        self,
        parts: list[Part],
        batch: Batch,
        rows: NDArray[np.float32],
        touched: dict[str, Request],
    ) -> None:
        """Give each request its rows, and end those whose prompt they complete."""
        found = {sequence: (first, count) for sequence, first, count in batch.prompt_rows}
        found |= {
            sequence: (row, 1)
            for row, sequence in zip(batch.logit_rows, batch.sampled, strict=True)
            if sequence not in found
        }
        for sequence, count in parts:
            request = sequence.request
            assert isinstance(request, PoolingRequest)  # `run` took no others
            position = sequence.num_computed
            self._scheduler.computed(sequence, count)
            self._computed(sequence, count)
            try:
                if sequence in found:
                    first, length = found[sequence]
                    request.take(rows[first : first + length], position)
                if not sequence.remaining:
                    request.finish()
            except Exception as error:  # its own fault, whatever it is: the others go on
                self._give_up(request, error, touched)
                continue
            if not sequence.remaining:
                self._ending.finish(sequence, "stop")
                touched[request.request_id] = request

    def _give_up(self, request: Request, error: Exception, touched: dict[str, Request]) -> None:
        self._ending.fail(request, error)
        touched[request.request_id] = request
