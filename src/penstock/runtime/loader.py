"""From a configuration to everything that an engine runs on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cache import PagedLayout, kv_dtype
from penstock.config import EngineConfig
from penstock.errors import WeightsError
from penstock.hardware import detect
from penstock.kernels import native
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.weights import Progress
from penstock.nn import Decoder
from penstock.runtime.memory import plan_blocks
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
    vocab_map = vocab_map_of(folder, decoder.vocab_size)
    vocab_size = decoder.vocab_size
    if vocab_map is not None:  # from here on, ids are the tokenizer's
        vocab_size = vocab_map.original_size
        loaded = replace(loaded, eos_token_ids=vocab_map.original(loaded.eos_token_ids))
    if not config.model.skip_tokenizer_init:
        source = folder if config.model.tokenizer is None else resolve(config.model.tokenizer)
        tokenizer = Tokenizer.from_folder(source, vocab_size=vocab_size)
        tokenizer.vocab_map = vocab_map
    layout = PagedLayout(
        tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in decoder.layers),
        kv_dtype(config.cache.kv_cache_dtype, loaded.dtype),
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
    vocabulary = None if vocab_map is None else ReducedVocabulary(vocab_map)
    return Runtime(loaded, tokenizer, layout, blocks, Runner(forward, kv, vocabulary))


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


def _forward(decoder: Decoder, kv: KV, eager: bool) -> Forward:
    """The whole decoder as one native call, unless its operators are to be called one by one."""
    if eager or native.handle is None:
        reason = "enforce_eager is set" if eager else native.reason
        logger.info("Operators are called one by one: %s.", reason)
        return decoder
    program = Program(decoder, kv)
    logger.info("A step is one native call of %d operators.", len(program.calls))
    return program
