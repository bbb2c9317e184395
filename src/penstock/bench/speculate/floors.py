"""What the ledger predicts: the least time of the steps with drafts, and of those without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from penstock.bench.speculate.expected import drafted_of
from penstock.bench.speculate.planted import Planted
from penstock.config import EngineConfig
from penstock.hardware import AnyPeaks
from penstock.roofline import Cost, CostModel, StepSize, floor_s
from penstock.runtime import Runtime
from penstock.runtime.beside import bytes_of
from penstock.runtime.draft_model import DraftModel
from penstock.runtime.drafting import num_draft_layers
from penstock.runtime.eagle import PlacedEagle
from penstock.runtime.medusa import Medusa

DraftFloor = Callable[[StepSize, AnyPeaks], float]
"""The least time that drafting a step's guesses takes."""


def draft_floor(config: EngineConfig, runtime: Runtime, planted: Planted | None) -> DraftFloor:
    """Of what guesses here: a model's passes, heads, a share of plain steps, or nothing."""
    draft = runtime.draft
    if planted is None and isinstance(draft, Medusa):
        return lambda size, peaks: floor_s(draft.cost(_drafting(size)), peaks)
    if planted is None and isinstance(draft, PlacedEagle):
        most = draft.asked.num_speculative_tokens or 0
        return lambda size, peaks: sum(floor_s(c, peaks) for c in _passes(draft, size, most))
    costs = _draft_costs(config, runtime, planted)
    share = 1.0 if planted is None else planted.cost

    def floor(size: StepSize, peaks: AnyPeaks) -> float:
        if costs is None or not share:
            return 0.0
        return share * sum(floor_s(costs.cost(one), peaks) for one in passes_of(size))

    return floor


def passes_of(size: StepSize) -> Iterable[StepSize]:
    """The passes of a model that has made a step's drafts; one computes a token of each."""
    lengths = drafted_of(size)
    for done in range(max(lengths)):
        contexts = [
            context - length + done
            for length, context in zip(lengths, size.contexts, strict=True)
            if length > done
        ]
        yield StepSize([1] * len(contexts), contexts, len(contexts))


def _drafting(size: StepSize) -> int:
    """How many sequences had drafts."""
    return sum(count > 0 for count in drafted_of(size))


def _passes(draft: PlacedEagle, size: StepSize, most: int) -> Iterable[Cost]:
    """What an EAGLE head has read and multiplied for a step's drafts, of up to `most` passes."""
    lengths = drafted_of(size)
    drafted = zip(size.contexts, lengths, strict=True)
    contexts = [context - length for context, length in drafted if length]
    return draft.costs(contexts, min(most, max(lengths)) if contexts else 0)


def _draft_costs(
    config: EngineConfig, runtime: Runtime, planted: Planted | None
) -> CostModel | None:
    """Of a pass of the draft; of the target, whose share it takes, where guesses are planted."""
    model = runtime.model
    if planted is not None:
        return CostModel(model.spec.decoder, model.model.formats, runtime.layout, model.dtype)
    if isinstance(draft := runtime.draft, DraftModel):
        own = draft.model
        return CostModel(own.spec.decoder, own.model.formats, draft.layout, own.dtype)
    if config.speculative is not None and config.speculative.method == "self":
        decoder = model.spec.decoder
        first = replace(decoder, layers=decoder.layers[: num_draft_layers(config, runtime)])
        return CostModel(first, model.model.formats, runtime.layout, model.dtype)
    return None


def memory_of(runtime: Runtime) -> dict[str, Any]:
    """Bytes of the target's and the draft model's weights, and of their caches."""
    draft = runtime.draft
    target = {
        "weight_bytes": bytes_of(runtime.model.model),
        "kv_bytes_per_token": runtime.layout.bytes_per_block // runtime.layout.block_size,
        "cache_bytes": runtime.layout.nbytes(runtime.num_blocks),
    }
    if draft is None:  # nobody beside the target, or its own layers
        return {"target": target, "draft": dict.fromkeys(target, 0)}
    beside = {
        "weight_bytes": draft.weight_bytes,
        "kv_bytes_per_token": sum(x.bytes_per_block // x.block_size for x in draft.layouts),
        "cache_bytes": sum(x.nbytes(runtime.num_blocks) for x in draft.layouts),
    }
    return {"target": target, "draft": beside}
