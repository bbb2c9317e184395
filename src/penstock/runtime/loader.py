"""From a configuration to everything that an engine runs on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from penstock.cache import PagedLayout, kv_dtype
from penstock.config import EngineConfig
from penstock.errors import ConfigError, KernelError
from penstock.hardware import detect
from penstock.kernels import native
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.weights import Progress
from penstock.nn import Decoder
from penstock.runtime.engine_folder import EngineFolder, is_engine
from penstock.runtime.memory import plan_blocks
from penstock.runtime.plan import Plan, fixed_tensors
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
    engine: EngineFolder | None = None  # what it was loaded from, where that was built

    def settle(self, config: EngineConfig) -> EngineConfig:
        """`config`, with a built engine's own values where nothing was chosen."""
        return config if self.engine is None else self.engine.settle(config)


def load_runtime(config: EngineConfig, progress: Progress | None = None) -> Runtime:
    """Load the model and size its cache, in that order: the cache takes of what is left.

    An engine folder takes a model's place: it is mapped, and nothing of it is prepared.
    """
    folder = resolve(config.model.model, config.model.revision)
    if is_engine(folder):
        return _load_engine(folder, config)
    if config.model.verify:
        raise ConfigError(
            f"verify=True checks an engine folder's sums, but {folder} is a model. Leave it out."
        )
    loaded = load_model(
        folder,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        strict=config.model.strict,
        quantization=config.model.quantization,
        progress=progress,
    )
    tokenizer = _tokenizer(config, folder, loaded)
    layout, blocks = _cache(config, loaded, detect().available_bytes)
    kv = layout.allocate(blocks)
    forward = _forward(loaded.model, kv, config.model.enforce_eager)
    return Runtime(loaded, tokenizer, layout, blocks, Runner(forward, kv))


def _load_engine(folder: Path, config: EngineConfig) -> Runtime:
    engine = EngineFolder.open(folder, verify=config.model.verify)
    config = engine.settle(config)
    assert config.model.max_model_len is not None  # settled
    loaded = engine.load(config.model.max_model_len, strict=config.model.strict)
    tokenizer = _tokenizer(config, folder, loaded)
    mapped = engine.manifest["weights"]["bytes"]  # in the page cache, which counts as free
    layout, blocks = _cache(config, loaded, max(detect().available_bytes - mapped, 0))
    kv = layout.allocate(blocks)
    step, hidden = engine.plans()
    if config.model.enforce_eager or native.handle is None:
        runner = Runner(_forward(loaded.model, kv, config.model.enforce_eager), kv)
    else:
        runner = Runner(_program(engine, step, loaded.model, kv), kv, hidden)
    return Runtime(loaded, tokenizer, layout, blocks, runner, engine)


def _program(engine: EngineFolder, plan: Plan, decoder: Decoder, kv: KV) -> Program:
    try:
        program = Program.of_plan(plan, fixed_tensors(decoder), kv)
    except (KernelError, RuntimeError) as error:
        raise engine.broken(f"its plan and its weights disagree: {error}") from error
    program.reserve(engine.limits.profile[2], engine.limits.max_num_seqs)
    engine.tuned.apply(program)
    return program


def _tokenizer(config: EngineConfig, folder: Path, loaded: LoadedModel) -> Tokenizer | None:
    if config.model.skip_tokenizer_init:
        return None
    source = folder if config.model.tokenizer is None else resolve(config.model.tokenizer)
    return Tokenizer.from_folder(source, vocab_size=loaded.spec.decoder.vocab_size)


def cache_layout(loaded: LoadedModel, kv_cache_dtype: str, block_size: int) -> PagedLayout:
    """Where the model's keys and values lie."""
    return PagedLayout(
        tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in loaded.spec.decoder.layers),
        kv_dtype(kv_cache_dtype, loaded.dtype),
        block_size,
    )


def _cache(config: EngineConfig, loaded: LoadedModel, free_bytes: int) -> tuple[PagedLayout, int]:
    """The cache's layout and how many blocks it has."""
    layout = cache_layout(loaded, config.cache.kv_cache_dtype, config.cache.block_size)
    blocks = plan_blocks(
        layout,
        config.cache,
        loaded.max_model_len,
        config.scheduler.max_num_seqs,
        free_bytes,
    )
    logger.info(
        "%s, %s, up to %d tokens a sequence; cache of %d blocks × %d tokens in %s (%.0f MiB).",
        loaded.spec.family, loaded.model.formats.name, loaded.max_model_len,
        blocks, layout.block_size, str(layout.dtype).removeprefix("torch."),
        blocks * layout.bytes_per_block / (1 << 20),
    )  # fmt: skip
    return layout, blocks


def _forward(decoder: Decoder, kv: KV, eager: bool) -> Forward:
    """The whole decoder as one native call, unless its operators are to be called one by one."""
    if eager or native.handle is None:
        reason = "enforce_eager is set" if eager else native.reason
        logger.info("Operators are called one by one: %s.", reason)
        return decoder
    program = Program(decoder, kv)
    logger.info("A step is one native call of %d operators.", len(program.calls))
    return program
