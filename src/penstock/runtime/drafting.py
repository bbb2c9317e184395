"""Who drafts with a model: put together from a configuration and a loaded runtime."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.runtime.forwards import forward_of
from penstock.runtime.loader import Runtime
from penstock.runtime.runner import Forward, Runner
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.speculate import Proposer
from penstock.speculate.draft_loop import DraftLimits
from penstock.speculate.self_layers import SelfLayersProposer


def draft_proposer(config: EngineConfig, runtime: Runtime) -> Proposer | None:
    """The proposer of a method that takes a model, for one engine; None for other methods.

    config: settled. Raises ConfigError for what this runtime can't do.
    """
    asked = config.speculative
    if asked is None or asked.method in ("ngram", "suffix"):
        return None
    if asked.method == "self":
        return _of_first_layers(config, runtime)
    draft = runtime.draft
    if draft is None or draft.asked.method != asked.method:
        raise ConfigError(
            f"method={asked.method!r} takes a runtime that was loaded with this "
            "speculative_config: what guesses is loaded with the target. Load it so."
        )
    for name in ("model", "revision", "quantization", "max_model_len"):
        loaded, wanted = getattr(draft.asked, name), getattr(asked, name)
        if str(loaded) != str(wanted):
            raise ConfigError(
                f"The runtime was loaded with method={asked.method!r} and {name}={str(loaded)!r}, "
                f"not {str(wanted)!r}. Load another one for it."
            )
    return draft.proposer(asked, _limits(config, runtime))


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
    layers, eager, graphs = (
        decoder.first_layers(count),
        config.model.enforce_eager,
        runtime.runner.graphs,
    )
    if graphs is not None:
        forward: Forward = graphs.beside(layers, kv)
    else:
        forward = forward_of(layers, kv, eager, f"A draft by {count} layers")
    found = runtime.vocab_map
    runner = Runner(forward, kv, None if found is None else ReducedVocabulary(found))
    return SelfLayersProposer(runner.forward, _limits(config, runtime))


def num_draft_layers(config: EngineConfig, runtime: Runtime) -> int:
    """Of `self`: how many of the first layers guess."""
    assert config.speculative is not None
    return config.speculative.draft_layers or max(len(runtime.model.spec.decoder.layers) // 4, 1)


def _limits(config: EngineConfig, runtime: Runtime) -> DraftLimits:
    scheduler = config.scheduler
    return DraftLimits(
        runtime.vocab_size,
        runtime.layout.block_size,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        runtime.model.max_model_len,
    )
