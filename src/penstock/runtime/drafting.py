"""Who drafts with a model: put together from a configuration and a loaded runtime."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.runtime.draft_model import FittedLogits
from penstock.runtime.forwards import forward_of
from penstock.runtime.loader import Runtime
from penstock.runtime.runner import Runner
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.speculate import Proposer
from penstock.speculate.draft_loop import DraftForward, DraftLimits
from penstock.speculate.draft_model import DraftModelProposer
from penstock.speculate.self_layers import SelfLayersProposer


def draft_proposer(config: EngineConfig, runtime: Runtime) -> Proposer | None:
    """The proposer of `draft_model` or `self`, for one engine; None for other methods.

    config: settled. Raises ConfigError for what this runtime can't do.
    """
    method = None if config.speculative is None else config.speculative.method
    if method == "draft_model":
        return _of_draft_model(config, runtime)
    return _of_first_layers(config, runtime) if method == "self" else None


def _of_draft_model(config: EngineConfig, runtime: Runtime) -> DraftModelProposer:
    draft = runtime.draft
    if draft is None:
        raise ConfigError(
            "method='draft_model' takes a runtime that was loaded with this speculative_config: "
            "the draft model has its part of the cache. Load it so."
        )
    asked = config.speculative
    assert asked is not None  # the caller looked
    for name in ("model", "quantization", "max_model_len"):
        loaded, wanted = getattr(draft.asked, name), getattr(asked, name)
        if str(loaded) != str(wanted):
            raise ConfigError(
                f"The runtime was loaded with a draft model of {name}={str(loaded)!r}, not "
                f"{str(wanted)!r}. Load another one for it."
            )
    forward: DraftForward = draft.runner.forward
    if draft.num_ids != runtime.vocab_size:
        forward = FittedLogits(draft.runner, draft.num_ids, runtime.vocab_size)
    limits = _limits(config, runtime, draft.model.max_model_len)
    proposer = DraftModelProposer(forward, limits, runtime.num_blocks, draft.num_ids)
    draft.companion.stamps = proposer.stamps  # of the engine that has the cache now
    return proposer


def _of_first_layers(config: EngineConfig, runtime: Runtime) -> SelfLayersProposer:
    decoder, total = runtime.model.model, len(runtime.model.spec.decoder.layers)
    count = num_draft_layers(config, runtime)
    if count >= total:
        raise ConfigError(
            f"draft_layers={count}, but the model has {total} layer{'s' * (total > 1)}: a draft "
            "by all of them costs what it saves. "
            + (f"Choose 1 to {total - 1}." if total > 1 else "Choose another method.")
        )
    if runtime.layout.recent_window:
        raise ConfigError(
            "method='self' can't go with kv_cache_dtype='kivi': guesses that turn out wrong would "
            "have pushed tokens out of its window. kv_cache_dtype='int4' goes with it."
        )
    kv = runtime.runner.kv[:count]
    forward = forward_of(
        decoder.first_layers(count), kv, config.model.enforce_eager, f"A draft by {count} layers"
    )
    found = runtime.vocab_map
    runner = Runner(forward, kv, None if found is None else ReducedVocabulary(found))
    limits = _limits(config, runtime, runtime.model.max_model_len)
    return SelfLayersProposer(runner.forward, limits)


def num_draft_layers(config: EngineConfig, runtime: Runtime) -> int:
    """Of `self`: how many of the first layers guess."""
    assert config.speculative is not None
    return config.speculative.draft_layers or max(len(runtime.model.spec.decoder.layers) // 4, 1)


def _limits(config: EngineConfig, runtime: Runtime, max_model_len: int) -> DraftLimits:
    scheduler = config.scheduler
    return DraftLimits(
        runtime.vocab_size,
        runtime.layout.block_size,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        max_model_len,
    )
