"""How large a cache is, and how it lies in memory, before anything of it is there."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product

from penstock.cache import PagedLayout, kv_dtype, most_recent_blocks
from penstock.cache.kv_dtype import RECENT_WINDOW
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError, OutOfCacheError
from penstock.models.load import LoadedModel
from penstock.nn.decoder import has_latents
from penstock.nn.shared import own_layers
from penstock.nn.spec import LayerSpec
from penstock.runtime.beside import Opened
from penstock.runtime.device import CPU, Device
from penstock.runtime.forwards import workspace_bytes
from penstock.runtime.memory import activation_bytes, horizon_of, plan_blocks
from penstock.runtime.stateful import check_stateful, with_states, within_memory

logger = logging.getLogger("penstock")


def sized_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    opened: Opened | None,
    mapped: int = 0,
    device: Device = CPU,
) -> tuple[PagedLayout, int]:
    """The cache's layout and how many blocks it has. mapped: bytes of the target's weights that
    still count as free. On a GPU room is left for the largest step; beside a rank's part of the
    cache, for as many of the others'.
    """
    if opened is not None:
        config, mapped = with_depth(config, opened.asked), mapped + opened.later_bytes
    layout = layout_of(config, loaded, device, loaded.model.cached_layers)
    free_bytes = max(device.available_bytes - mapped, 0)
    layout = within_memory(layout, config, loaded.max_model_len, free_bytes)
    beside = () if opened is None else tuple(opened.layouts)
    beside += others_layouts(loaded, layout)
    asked, reserved = config.speculative, 0
    if device.is_gpu:  # a CPU's are small beside what is left to others
        reserved = workspace_bytes(device, config.model)
        guesses = 0 if asked is None else asked.most_tokens
        decoder, itemsize = loaded.spec.decoder, loaded.dtype.itemsize
        reserved += activation_bytes(decoder, itemsize, config.scheduler, guesses)
    blocks = plan_blocks(
        layout,
        config.cache,
        loaded.max_model_len,
        config.scheduler.max_num_seqs,
        free_bytes,
        beside,
        comfortable=not device.is_gpu,
        reserved_bytes=reserved,
        longest=longest_sequence(config, loaded, layout, opened),
    )
    logger.info(
        "%s, %s, up to %d tokens a sequence; cache of %d blocks × %d tokens in %s (%.0f MiB)%s.",
        loaded.spec.family, loaded.model.formats.name, loaded.max_model_len,
        blocks, layout.block_size, layout.stored, layout.nbytes(blocks) / (1 << 20),
        "" if opened is None else opened.described(blocks),
    )  # fmt: skip
    return layout, blocks


def longest_sequence(
    config: EngineConfig, loaded: LoadedModel, layout: PagedLayout, opened: Opened | None
) -> int | None:
    """The blocks of one sequence of full length, where it lets some of them go; else None."""
    if not empty_blocks(loaded, layout, opened):
        return None
    horizon = horizon_of(loaded.spec.decoder, loaded.max_model_len)
    step_tokens = config.scheduler.max_num_batched_tokens
    return horizon.most_blocks(layout.block_size, loaded.max_model_len, step_tokens)


def within_room(
    blocks: int, most: int, layout: PagedLayout, max_model_len: int, longest: int | None
) -> int:
    """Of the blocks that fit here, as many as fit elsewhere. Raises OutOfCacheError where those
    don't hold one sequence of full length; longest: its blocks, where it lets some go.
    """
    one = layout.blocks_for(max_model_len) if longest is None else longest
    if most < one:
        raise OutOfCacheError(
            f"One sequence of max_model_len={max_model_len} needs {one} blocks of the cache, but "
            f"another stage's machine has room for {most}. Lower max_model_len to "
            f"{most * layout.block_size}, or free memory there."
        )
    return min(blocks, most)


def others_layouts(loaded: LoadedModel, layout: PagedLayout) -> tuple[PagedLayout, ...]:
    """The caches of other ranks, of which the first has `layout`."""
    model, spec, of_ranks = loaded.model, loaded.spec.decoder, [loaded.spec.decoder.layers]
    if model.ring is not None:
        return (layout,) * (model.ring.size - 1)
    if model.ranks is not None:
        each = (replace(model.ranks, rank=rank) for rank in range(model.ranks.size))
        of_ranks = [own_layers(spec, ranks) for ranks in each]
    spans = [model.own]
    if model.stage is not None and not model.stage.is_away:  # those take nothing of this machine's
        stages = (replace(model.stage, number=number) for number in range(model.stage.count))
        spans = [stage.layers(len(spec.layers)) for stage in stages]
    found = []
    for layers, span in product(of_ranks, spans):
        heads = tuple(layer.attention.cached for layer in layers[span.start : span.stop])
        found.append(replace(layout, heads=heads))
    return tuple(found[1:])  # the first is this one's


def empty_blocks(loaded: LoadedModel, layout: PagedLayout, opened: Opened | None) -> int:
    """How many more blocks a cache gets, which stand for those that nobody sees.

    None where another model reads the same tables, or codes depend on what was recent.
    """
    if opened is not None or layout.recent_window:
        return 0
    return int(bool(horizon_of(loaded.spec.decoder, loaded.max_model_len)))


def with_depth(config: EngineConfig, loaded: SpeculativeConfig) -> EngineConfig:
    """`config`, with num_speculative_tokens of what was loaded where it leaves that open."""
    asked = config.speculative
    if asked is None or asked.method != loaded.method or asked.num_speculative_tokens is not None:
        return config
    filled = replace(asked, num_speculative_tokens=loaded.num_speculative_tokens)
    return replace(config, speculative=filled)


def layout_of(
    config: EngineConfig,
    loaded: LoadedModel,
    device: Device = CPU,
    layers: tuple[LayerSpec, ...] | None = None,
) -> PagedLayout:
    """How the cache of a loaded model lies in memory; layers: as one rank of several has them."""
    cache, limits = config.cache, config.scheduler
    layers = loaded.spec.decoder.layers if layers is None else layers
    check_stateful(config, layers)
    stored = kv_dtype(cache.kv_cache_dtype, loaded.dtype)
    if stored is not loaded.dtype and has_latents(layers):
        raise ConfigError(
            f"kv_cache_dtype={cache.kv_cache_dtype!r} isn't built for attention over latents "
            f"(MLA), whose cache is small already. Leave it out."
        )
    ring = loaded.model.ring
    if ring is not None:
        return replace(device.layout(layers, stored, ring.block_size), ranks=ring.size)
    if cache.kv_cache_dtype != "kivi":
        layout = device.layout(layers, stored, cache.block_tokens(loaded.max_model_len))
        return with_states(layout, config, loaded, layers)
    heads = tuple(layer.attention.cached for layer in layers)
    window = cache.kv_recent_window or RECENT_WINDOW
    asked = config.speculative
    guesses = 0 if asked is None else asked.most_tokens
    return PagedLayout(
        heads,
        stored,
        cache.block_size,
        window,
        most_recent_blocks(
            window + guesses,
            cache.block_size,
            loaded.max_model_len,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
        ),
    )
