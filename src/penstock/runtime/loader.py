"""From a configuration to everything that an engine runs on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cache import PagedLayout, RecentBlocks, kv_dtype, most_recent_blocks
from penstock.cache.kv_dtype import RECENT_WINDOW
from penstock.config import EngineConfig
from penstock.errors import ConfigError, KernelError, WeightsError
from penstock.hardware import detect
from penstock.kernels import native
from penstock.models.exported import read_exported, verify_exported
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.sources import open_tokenizer
from penstock.models.weights import Progress
from penstock.nn import Decoder
from penstock.runtime.engine_folder import PACKAGE, EngineFolder, is_engine
from penstock.runtime.memory import plan_blocks
from penstock.runtime.package import PackageForward
from penstock.runtime.plan import Plan, fixed_tensors
from penstock.runtime.program import Program
from penstock.runtime.runner import Forward, Runner
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.step import KV
from penstock.tokenizer import Tokenizer, VocabMap
from penstock.tokenizer.vocab_map import FILE

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
        if self.engine is not None:
            return self.engine.settle(config)
        return config.storing("kivi") if self.layout.recent_window else config

    @property
    def vocab_map(self) -> VocabMap | None:
        """Of a model with a reduced vocabulary."""
        return None if self.runner.vocabulary is None else self.runner.vocabulary.map

    @property
    def vocab_size(self) -> int:
        """Ids that callers may name: those of the whole vocabulary."""
        found = self.vocab_map
        return self.model.spec.decoder.vocab_size if found is None else found.original_size


def load_runtime(config: EngineConfig, progress: Progress | None = None) -> Runtime:
    """Load the model and size its cache, in that order: the cache takes of what is left.

    An engine folder takes a model's place: it is mapped, and nothing of it is prepared.
    """
    folder = resolve(config.model.model, config.model.revision)
    if is_engine(folder):
        return _load_engine(folder, config)
    if config.model.verify:
        if read_exported(folder) is None:
            raise ConfigError(
                f"verify=True checks the sums of an engine or an export, but {folder} has none. "
                "Leave it out."
            )
        verify_exported(folder)
    config = as_exported(folder, config)
    loaded = load_model(
        folder,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        strict=config.model.strict,
        quantization=config.model.quantization,
        progress=progress,
    )
    loaded, vocabulary = _reduced(folder, loaded)
    tokenizer = _tokenizer(config, folder, loaded, vocabulary)
    layout, blocks = _cache(config, loaded, detect().available_bytes)
    kv = layout.allocate(blocks)
    forward = _forward(loaded.model, kv, config.model.enforce_eager)
    return Runtime(loaded, tokenizer, layout, blocks, runner_over(forward, kv, layout, vocabulary))


def _load_engine(folder: Path, config: EngineConfig) -> Runtime:
    engine = EngineFolder.open(folder, verify=config.model.verify)
    config = engine.settle(config)
    assert config.model.max_model_len is not None  # settled
    loaded = engine.load(config.model.max_model_len, strict=config.model.strict)
    loaded, vocabulary = _reduced(folder, loaded)
    tokenizer = _tokenizer(config, folder, loaded, vocabulary)
    mapped = engine.manifest["weights"]["bytes"]  # in the page cache, which counts as free
    layout, blocks = _cache(config, loaded, max(detect().available_bytes - mapped, 0))
    kv = layout.allocate(blocks)
    hidden = None
    if engine.forward == "package" and not config.model.enforce_eager:
        forward: Forward = _package(engine, kv)
    elif config.model.enforce_eager or native.handle is None:
        forward = _forward(loaded.model, kv, config.model.enforce_eager)
    else:
        step, hidden = engine.plans()
        forward = _program(engine, step, loaded.model, kv)
    runner = runner_over(forward, kv, layout, vocabulary, hidden)
    return Runtime(loaded, tokenizer, layout, blocks, runner, engine)


def _package(engine: EngineFolder, kv: KV) -> PackageForward:
    try:
        found = PackageForward(engine.folder / PACKAGE, engine.tensors())
    except (ConfigError, WeightsError) as error:
        raise engine.broken(str(error)) from error
    found.inputs.check_cache(kv)
    logger.info("A step is a call of a compiled package.")
    return found


def _program(engine: EngineFolder, plan: Plan, decoder: Decoder, kv: KV) -> Program:
    try:
        program = Program.of_plan(plan, fixed_tensors(decoder), kv)
    except (KernelError, RuntimeError, IndexError, ValueError, TypeError) as error:
        raise engine.broken(f"its plan and its weights disagree: {error}") from error
    program.reserve(engine.limits.profile[2], engine.limits.max_num_seqs)
    try:
        engine.tuned.apply(program)
    except KernelError as error:
        raise engine.broken(f"what was timed isn't of its plan: {error}") from error
    return program


def _reduced(folder: Path, loaded: LoadedModel) -> tuple[LoadedModel, ReducedVocabulary | None]:
    """The model with its tokenizer's ids where its own are fewer, and the map between them."""
    found = vocab_map_of(folder, loaded.spec.decoder.vocab_size)
    if found is None:
        return loaded, None
    stops = found.original(loaded.eos_token_ids)
    return replace(loaded, eos_token_ids=stops), ReducedVocabulary(found)


def _tokenizer(
    config: EngineConfig,
    folder: Path,
    loaded: LoadedModel,
    vocabulary: ReducedVocabulary | None,
) -> Tokenizer | None:
    if config.model.skip_tokenizer_init:
        return None
    source = folder if config.model.tokenizer is None else resolve(config.model.tokenizer)
    if vocabulary is None:
        return open_tokenizer(source, vocab_size=loaded.spec.decoder.vocab_size)
    tokenizer = open_tokenizer(source, vocab_size=vocabulary.map.original_size)
    tokenizer.vocab_map = vocabulary.map
    return tokenizer


def _cache(config: EngineConfig, loaded: LoadedModel, free_bytes: int) -> tuple[PagedLayout, int]:
    """The cache's layout and how many blocks it has."""
    layout = layout_of(config, loaded)
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
        blocks, layout.block_size, layout.stored,
        layout.nbytes(blocks) / (1 << 20),
    )  # fmt: skip
    return layout, blocks


def vocab_map_of(folder: Path, vocab_size: int) -> VocabMap | None:
    """The map of a checkpoint whose vocabulary was reduced to `vocab_size`; None for others.

    Raises WeightsError for one that belongs to another checkpoint.
    """
    found = VocabMap.load(folder)
    if found is not None and len(found) != vocab_size:
        raise WeightsError(
            f"{folder} has a vocabulary of {vocab_size:,} tokens, but its {FILE} names "
            f"{len(found):,}. They belong to different models: reduce it again."
        )
    return found


def as_exported(folder: Path, config: EngineConfig) -> EngineConfig:
    """`config`, with what `folder` was exported for where nothing was chosen."""
    exported = read_exported(folder)
    if exported is None:
        return config
    length = config.model.max_model_len or exported.max_model_len
    if config.cache.kv_cache_dtype == "auto":
        config = config.storing(exported.kv_cache_dtype)
    return replace(config, model=replace(config.model, max_model_len=length))


def runner_over(
    forward: Forward,
    kv: KV,
    layout: PagedLayout,
    vocabulary: ReducedVocabulary | None = None,
    hidden_plan: Callable[[], Plan] | None = None,
) -> Runner:
    """What runs `forward` over the cache `kv` of that layout."""
    recent = None
    if layout.recent_window:
        recent = RecentBlocks(kv, layout.recent_window, layout.block_size)
    return Runner(forward, kv, vocabulary, hidden_plan, recent)


def layout_of(config: EngineConfig, loaded: LoadedModel) -> PagedLayout:
    """How the cache of a loaded model lies in memory."""
    cache, limits = config.cache, config.scheduler
    heads = tuple(
        (x.attention.num_kv_heads, x.attention.head_dim) for x in loaded.spec.decoder.layers
    )
    stored = kv_dtype(cache.kv_cache_dtype, loaded.dtype)
    if cache.kv_cache_dtype != "kivi":
        return PagedLayout(heads, stored, cache.block_size)
    window = cache.kv_recent_window or RECENT_WINDOW
    asked = config.speculative
    guesses = 0 if asked is None else asked.num_speculative_tokens or 0
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


def _forward(decoder: Decoder, kv: KV, eager: bool) -> Forward:
    """The whole decoder as one native call, unless its operators are to be called one by one."""
    if eager or native.handle is None:
        reason = "enforce_eager is set" if eager else native.reason
        logger.info("Operators are called one by one: %s.", reason)
        return decoder
    program = Program(decoder, kv)
    logger.info("A step is one native call of %d operators.", len(program.calls))
    return program
