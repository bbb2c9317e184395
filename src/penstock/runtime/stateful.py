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

SHARE = 4
"""One part in so many of what a cache may take is for states, where it can't be for all."""


def check_stateful(config: EngineConfig, layers: Sequence[LayerSpec]) -> None:
    """Raises ConfigError for what isn't built beside states."""
    if not has_states(layers):
        return
    scheduler, asked = config.scheduler, config.speculative
    swaps = scheduler.preemption_mode == "swap" or bool(scheduler.swap_space)
    given = {
        f"method={asked and asked.method!r}": asked is not None and asked.method not in GUESSING,
        "preemption_mode='swap' or a swap_space": swaps,
        "a prefix_cache_dir": config.cache.prefix_cache_dir is not None,
        "enable_lora": config.lora.enable_lora,
        "kv_cache_dtype='kivi'": config.cache.kv_cache_dtype == "kivi",
    }
    for name, there in given.items():
        if there:
            raise ConfigError(
                f"{name} isn't built for models whose layers have states (gated delta rule) in "
                "place of keys and values. Leave it out."
            )


def with_states(
    layout: PagedLayout, config: EngineConfig, loaded: LoadedModel, layers: Sequence[LayerSpec]
) -> PagedLayout:
    """The layout with as many slots as may be wanted, where these layers have states."""
    if not has_states(layers):
        return layout
    shapes = tuple(layer.attention.state_shapes for layer in layers)
    known = KNOWN if config.cache.enable_prefix_caching else 0
    slots = 2 * config.scheduler.max_num_seqs + known
    return replace(layout, states=StateLayout(shapes, loaded.dtype, slots))


def within_memory(layout: PagedLayout, config: EngineConfig, available: int) -> PagedLayout:
    """The layout with as many slots as a share of `available` bytes holds.

    Raises OutOfCacheError where those are too few for a max_num_seqs that was asked for.
    """
    states, seqs = layout.states, config.scheduler.max_num_seqs
    if states is None:
        return layout
    room = int(available * config.cache.memory_fraction) // SHARE
    slots = min(states.slots, max(room // states.bytes_per_slot, 3))
    if slots < 2 * seqs and "max_num_seqs" in config.given:
        raise OutOfCacheError(
            f"max_num_seqs={seqs} sequences have two states each of "
            f"{states.bytes_per_slot / (1 << 20):.1f} MiB, but a quarter of the cache's memory "
            f"holds {slots}. Lower it to {slots // 2}, or free some memory."
        )
    return replace(layout, states=replace(states, slots=slots))


def settled(config: EngineConfig, states: StateLayout) -> EngineConfig:
    """`config` for no more sequences than there are states for."""
    most, scheduler = states.slots // 2, config.scheduler
    if scheduler.max_num_seqs <= most:
        return config
    logger.info(
        "Up to %d sequences run at once: a state is %.1f MiB, and there is room for %d.",
        most, states.bytes_per_slot / (1 << 20), states.slots,
    )  # fmt: skip
    return replace(config, scheduler=replace(scheduler, max_num_seqs=most))
