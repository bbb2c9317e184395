"""From a configuration to everything that an engine runs on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock.cache import PagedLayout, RecentBlocks, kv_dtype, most_recent_blocks
from penstock.cache.kv_dtype import RECENT_WINDOW
from penstock.config import EngineConfig
from penstock.hardware import detect
from penstock.kernels import native
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.weights import Progress
from penstock.nn import Decoder, DecoderSpec
from penstock.runtime.memory import plan_blocks
from penstock.runtime.program import Program
from penstock.runtime.runner import Forward, Runner
from penstock.step import KV
from penstock.tokenizer import Tokenizer

logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Runtime:
    """A loaded model, its tokenizer, and its cache."""

    model: LoadedModel
    tokenizer: Tokenizer | None
    layout: PagedLayout
    num_blocks: int
    runner: Runner


def load_runtime(config: EngineConfig, progress: Progress | None = None) -> Runtime:
    """Load the model and size its cache, in that order: the cache takes of what is left."""
    folder = resolve(config.model.model, config.model.revision)
    tokenizer = None
    loaded = load_model(
        folder,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        strict=config.model.strict,
        quantization=config.model.quantization,
        progress=progress,
    )
    decoder = loaded.spec.decoder
    if not config.model.skip_tokenizer_init:
        source = folder if config.model.tokenizer is None else resolve(config.model.tokenizer)
        tokenizer = Tokenizer.from_folder(source, vocab_size=decoder.vocab_size)
    layout = layout_of(decoder, config, loaded)
    blocks = plan_blocks(
        layout,
        config.cache,
        loaded.max_model_len,
        config.scheduler.max_num_seqs,
        detect().available_bytes,
    )
    logger.info(
        "%s, %s, up to %d tokens a sequence; cache of %d blocks × %d tokens in %s (%.0f MiB).",
        loaded.spec.family, loaded.model.formats.name, loaded.max_model_len,
        blocks, layout.block_size, layout.stored,
        layout.nbytes(blocks) / (1 << 20),
    )  # fmt: skip
    kv = layout.allocate(blocks)
    forward = _forward(loaded.model, kv, config.model.enforce_eager)
    return Runtime(loaded, tokenizer, layout, blocks, runner_over(forward, kv, layout))


def runner_over(forward: Forward, kv: KV, layout: PagedLayout) -> Runner:
    """What runs `forward` over the cache `kv` of that layout."""
    recent = None
    if layout.recent_window:
        recent = RecentBlocks(kv, layout.recent_window, layout.block_size)
    return Runner(forward, kv, recent)


def layout_of(decoder: DecoderSpec, config: EngineConfig, loaded: LoadedModel) -> PagedLayout:
    """How the cache of a loaded model lies in memory."""
    cache, limits = config.cache, config.scheduler
    heads = tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in decoder.layers)
    stored = kv_dtype(cache.kv_cache_dtype, loaded.dtype)
    if cache.kv_cache_dtype != "kivi":
        return PagedLayout(heads, stored, cache.block_size)
    window = cache.kv_recent_window or RECENT_WINDOW
    return PagedLayout(
        heads,
        stored,
        cache.block_size,
        window,
        most_recent_blocks(
            window,
            cache.block_size,
            loaded.max_model_len,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
        ),
    )


def _forward(decoder: Decoder, kv: KV, eager: bool) -> Forward:
    """The whole decoder as one native call, unless its operators are to be called one by one."""
    if eager or native.handle is None:
        reason = "enforce_eager is set" if eager else native.reason
        logger.info("Operators are called one by one: %s.", reason)
        return decoder
    program = Program(decoder, kv)
    logger.info("A step is one native call of %d operators.", len(program.calls))
    return program
