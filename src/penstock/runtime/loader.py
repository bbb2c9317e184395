"""From a configuration to everything that an engine runs on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from penstock.cache import PagedLayout, kv_dtype
from penstock.config import EngineConfig
from penstock.hardware import detect
from penstock.kernels import native
from penstock.models.exported import read_exported
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.weights import Progress
from penstock.nn import Decoder
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
    max_model_len, kv_cache_dtype = _as_exported(folder, config)
    loaded = load_model(
        folder,
        dtype=config.model.dtype,
        max_model_len=max_model_len,
        strict=config.model.strict,
        quantization=config.model.quantization,
        progress=progress,
    )
    decoder = loaded.spec.decoder
    if not config.model.skip_tokenizer_init:
        source = folder if config.model.tokenizer is None else resolve(config.model.tokenizer)
        tokenizer = Tokenizer.from_folder(source, vocab_size=decoder.vocab_size)
    layout = PagedLayout(
        tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in decoder.layers),
        kv_dtype(kv_cache_dtype, loaded.dtype),
        config.cache.block_size,
    )
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
        blocks, layout.block_size, str(layout.dtype).removeprefix("torch."),
        blocks * layout.bytes_per_block / (1 << 20),
    )  # fmt: skip
    kv = layout.allocate(blocks)
    forward = _forward(loaded.model, kv, config.model.enforce_eager)
    return Runtime(loaded, tokenizer, layout, blocks, Runner(forward, kv))


def _as_exported(folder: Path, config: EngineConfig) -> tuple[int | None, str]:
    """max_model_len and kv_cache_dtype: as asked for, else as the folder was exported."""
    length, stored = config.model.max_model_len, config.cache.kv_cache_dtype
    exported = read_exported(folder)
    if exported is None:
        return length, stored
    return length or exported.max_model_len, exported.kv_cache_dtype if stored == "auto" else stored


def _forward(decoder: Decoder, kv: KV, eager: bool) -> Forward:
    """The whole decoder as one native call, unless its operators are to be called one by one."""
    if eager or native.handle is None:
        reason = "enforce_eager is set" if eager else native.reason
        logger.info("Operators are called one by one: %s.", reason)
        return decoder
    program = Program(decoder, kv)
    logger.info("A step is one native call of %d operators.", len(program.calls))
    return program
