"""Models some of whose layers have states in place of a cache: what of them is there, and how many.

Each sequence that runs has two slots at most (`engine.states`), and more are known by the prefixes
that they come after.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from penstock.cache import PagedLayout, StateLayout
from penstock.config import EngineConfig
from penstock.errors import ConfigError, OutOfCacheError
from penstock.models.load import LoadedModel
from penstock.nn.decoder import has_states
from penstock.nn.spec import LayerSpec

logger = logging.getLogger("penstock")

KNOWN = 64
"""Slots beside those of sequences that run, for what prompts may begin with."""

GUESSING = ("ngram", "suffix", "draft_model")
"""Methods whose guesses come one after another: of a tree, each way would need states."""

GUESSES = 32
"""Slots for what guesses leave, of all sequences together, where there are some."""

SHARE = 4
"""One part in so many of what a cache may take is for states, where nobody has said how many."""


def check_stateful(config: EngineConfig, layers: Sequence[LayerSpec]) -> None:
    """Raises ConfigError for what isn't built beside states."""
    if not has_states(layers):
        return
    scheduler, asked = config.scheduler, config.speculative
    swaps = scheduler.preemption_mode == "swap" or bool(scheduler.swap_space)
    known = config.cache.prefix_cache_dir is not None
    trees = asked is not None and asked.method not in GUESSING
    given = (
        (f"method={asked and asked.method!r}", trees, f"Take one of {', '.join(GUESSING)}."),
        ("preemption_mode='swap' or a swap_space", swaps, "Leave it out."),
        ("a prefix_cache_dir", known, "Leave it out: what is in memory is found without."),
        ("kv_cache_dtype='kivi'", config.cache.kv_cache_dtype == "kivi", "int8 and int4 are."),
    )
    for name, there, instead in given:
        if there:
            raise ConfigError(
                f"{name} isn't built for models some of whose layers have states in place of keys "
                f"and values. {instead}"
            )
    if asked is not None and (asked.num_speculative_tokens or 0) > GUESSES:
        raise ConfigError(
            f"num_speculative_tokens={asked.num_speculative_tokens}, but each guess leaves a state "
            f"and there are slots for {GUESSES}, of all sequences together. Lower it."
        )


def with_states(
    layout: PagedLayout, config: EngineConfig, loaded: LoadedModel, layers: Sequence[LayerSpec]
) -> PagedLayout:
    """The layout with as many slots as may be wanted, where these layers have states."""
    if not has_states(layers):
        return layout
    shapes = tuple(layer.attention.state_shapes for layer in layers)
    known = KNOWN if config.cache.enable_prefix_caching else 0
    guesses = 0 if config.speculative is None else GUESSES
    slots = 2 * config.scheduler.max_num_seqs + known + guesses
    return replace(layout, states=StateLayout(shapes, loaded.dtype, slots, guesses))


def within_memory(
    layout: PagedLayout, config: EngineConfig, max_model_len: int, available: int
) -> PagedLayout:
    """The layout with as many slots as `available` bytes hold: of a max_num_seqs that was asked for
    beside the blocks that there must be, else in a share of them.

    Raises OutOfCacheError where those are too few for what was asked for.
    """
    states, seqs, asked = layout.states, config.scheduler.max_num_seqs, "max_num_seqs"
    if states is None:
        return layout
    room = int(available * config.cache.memory_fraction)
    if asked in config.given:
        blocks = config.cache.num_blocks or layout.blocks_for(max_model_len)
        room = max(room - blocks * layout.bytes_per_block, 0)
    else:
        room //= SHARE
    least = states.guesses + 2
    found = replace(states, slots=min(states.slots, max(room // states.bytes_per_slot, least)))
    if found.sequences < seqs and asked in config.given:
        raise OutOfCacheError(
            f"max_num_seqs={seqs} sequences have two states each of {_size(states)}, but beside "
            f"{blocks} blocks of the cache there is room for {found.slots}. Lower it to "
            f"{found.sequences}, lower max_model_len, or free some memory."
        )
    return replace(layout, states=found)


def settled(config: EngineConfig, states: StateLayout) -> EngineConfig:
    """`config` for no more sequences than there are states for.

    Raises ConfigError where more were asked for, or guesses, of which nobody knew at loading.
    """
    most, scheduler = states.sequences, config.scheduler
    if config.speculative is not None and not states.guesses:
        raise ConfigError(
            "The runtime was loaded without room for the states that guesses leave. Load it with "
            "this speculative_config."
        )
    if scheduler.max_num_seqs <= most:
        return config
    if "max_num_seqs" in config.given:
        raise ConfigError(
            f"max_num_seqs={scheduler.max_num_seqs}, but the runtime was loaded with the states of "
            f"{most} sequences. Lower it, or load the runtime with it."
        )
    logger.info(
        "Up to %d sequences run at once: a state is %s, and there is room for %d.",
        most, _size(states), states.slots,
    )  # fmt: skip
    return replace(config, scheduler=replace(scheduler, max_num_seqs=most))


def _size(states: StateLayout) -> str:
    size = states.bytes_per_slot
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.1f} KiB"
