"""What a model may see of its context, where that is less than all: a window and the first tokens.

Source: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import ConfigError
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec

SINK_TOKENS = 4
"""Unless asked otherwise, as in the paper, whose models lost nothing with so many."""

USUAL = 1 << 16
"""Positions, unless asked otherwise, of a model that was made for fewer."""

FURTHEST = 1 << 24
"""Positions, at most: float32, by which a graph may count them, has every integer up to here."""


def with_reach(
    spec: ModelSpec, tokens: int, sink_tokens: int | None, positions: int, max_model_len: int
) -> ModelSpec:
    """The model whose layers see `tokens` at most: the first `sink_tokens`, and the latest.

    A layer whose own window is narrower keeps it. positions: that the model can tell apart.
    Raises ConfigError for what can't take effect, or isn't built.
    """
    first = min(SINK_TOKENS, tokens - 1) if sink_tokens is None else sink_tokens
    decoder = spec.decoder
    asked = f"max_attention_window={tokens}"
    if first >= tokens:
        raise ConfigError(
            f"sink_token_length={first} leaves nothing of {asked} for the latest tokens. Lower "
            "the first, or raise the second."
        )
    if tokens > positions:
        raise ConfigError(
            f"{asked} is more than the {positions} positions that the model was made for. Lower it."
        )
    if tokens >= max_model_len:
        raise ConfigError(
            f"{asked} changes nothing where no text is longer than max_model_len={max_model_len}. "
            "Leave it out, or raise max_model_len, which may then be any length."
        )
    whole = [i for i, layer in enumerate(decoder.layers) if _sees_more(layer, tokens)]
    if not whole:
        widest = max(layer.attention.window for layer in decoder.layers)
        raise ConfigError(
            f"{asked} changes nothing: this model's layers see {widest} tokens at most. Leave it "
            "out."
        )
    why = None
    if any(layer.attention.has_state for layer in decoder.layers):
        why = "has layers with states, which tell of all that came before"
    elif decoder.learned_positions:
        why = "has a learned embedding for each position, which a key can't be met without"
    elif decoder.vision is not None:
        why = "sees pictures, whose tokens' positions aren't their places"
    elif any(decoder.layers[i].attention.qk_norm == "turned" for i in whole):
        why = "weighs keys once they are turned, so that not distances alone count"
    if why is not None:
        raise ConfigError(f"{asked} isn't built for this model, which {why}. Leave it out.")
    layers = list(decoder.layers)
    for i in whole:
        attention = replace(layers[i].attention, window=tokens - first, sink_tokens=first)
        layers[i] = replace(layers[i], attention=attention)
    return replace(spec, decoder=replace(decoder, layers=tuple(layers), reach=tokens))


def _sees_more(layer: LayerSpec, tokens: int) -> bool:
    return not 0 < layer.attention.window <= tokens
