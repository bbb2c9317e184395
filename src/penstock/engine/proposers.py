"""From a configuration to who guesses."""

from __future__ import annotations

from typing import Any

from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.runtime import Runtime
from penstock.runtime.drafting import draft_proposer
from penstock.speculate import Proposer
from penstock.speculate.ngram import MAX_MATCH, MIN_MATCH, NgramProposer
from penstock.speculate.suffix import SuffixProposer


def proposer_of(config: EngineConfig, runtime: Runtime) -> Proposer:
    """The proposer of a configuration that asks for one.

    Raises ConfigError for what this model, or this cache, can't do.
    """
    asked = config.speculative
    assert asked is not None  # the caller looked
    if asked.method == "ngram":
        given = _given(asked, prompt_lookup_min="min_match", prompt_lookup_max="max_match")
        if len(given) == 1:  # the other's default gives way
            if "min_match" in given:
                given["max_match"] = max(MAX_MATCH, given["min_match"])
            else:
                given["min_match"] = min(MIN_MATCH, given["max_match"])
        _check_match(asked.prompt_lookup_min, runtime.model.max_model_len)
        return NgramProposer(**given)
    if asked.method == "suffix":
        return SuffixProposer(
            **_given(
                asked,
                suffix_decoding_max_tree_depth="max_depth",
                suffix_decoding_max_cached_tokens="max_tokens",
                suffix_decoding_max_cached_requests="max_outputs",
                suffix_decoding_max_spec_factor="factor",
                suffix_decoding_min_token_prob="least",
            )
        )
    found = draft_proposer(config, runtime)
    assert found is not None  # by any other method
    return found


def _check_match(min_match: int | None, max_model_len: int) -> None:
    """Raises ConfigError where no sequence with room for a draft can hold a match twice."""
    most = max_model_len - 3  # one token follows the match, and one each is guessed and drawn
    if min_match is not None and 1 <= most < min_match:
        raise ConfigError(
            f"prompt_lookup_min={min_match} finds nothing with max_model_len={max_model_len}: a "
            f"sequence that may still have a draft repeats {most} tokens at most. Lower the first "
            f"to {most} or less, or raise the second."
        )


def _given(asked: SpeculativeConfig, **names: str) -> dict[str, Any]:
    """Those of some options that were given, under other names."""
    found = {own: getattr(asked, name) for name, own in names.items()}
    return {name: value for name, value in found.items() if value is not None}
