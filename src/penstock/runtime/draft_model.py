"""A draft model beside its target: loaded, found to have the same tokens, given a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.cache import PagedLayout, kv_dtype
from penstock.config import EngineConfig, ModelConfig, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.models.heads.kinds import method_of
from penstock.models.load import LoadedModel, load_model, max_positions
from penstock.models.sources import open_model, open_tokenizer
from penstock.nn.decoder import has_latents, has_states
from penstock.runtime.beside import Target, bytes_of, guessing_folder
from penstock.runtime.companion import CompanionCache
from penstock.runtime.device import Device
from penstock.runtime.engine_folder import EngineFolder, is_engine
from penstock.runtime.forwards import forward_of, forward_of_engine, forward_on, workspace_bytes
from penstock.runtime.graphs import StepLimits
from penstock.runtime.memory import activation_bytes
from penstock.runtime.runner import Forward, Runner
from penstock.runtime.vocabulary import KEPT_ROWS, ReducedVocabulary
from penstock.speculate.draft_loop import DraftForward, DraftLimits
from penstock.speculate.draft_model import DraftModelProposer
from penstock.step import Step
from penstock.tokenizer import Tokenizer, VocabMap


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model and its cache."""

    model: LoadedModel
    layout: PagedLayout
    runner: Runner
    companion: CompanionCache  # its cache, as what moves with the target's blocks
    asked: SpeculativeConfig  # what it was loaded for
    num_blocks: int

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return (self.layout,)

    @property
    def companions(self) -> tuple[CompanionCache, ...]:
        return (self.companion,)

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.model.model)

    @property
    def num_ids(self) -> int:
        """Ids that it can read."""
        found = self.runner.vocabulary
        own = self.model.spec.decoder.vocab_size
        return own if found is None else found.map.original_size

    def proposer(self, asked: SpeculativeConfig, limits: DraftLimits) -> DraftModelProposer:
        forward: DraftForward = self.runner.forward
        if self.num_ids != limits.vocab_size:
            forward = FittedLogits(self.runner, self.num_ids, limits.vocab_size)
        own = replace(limits, max_model_len=self.model.max_model_len)
        proposer = DraftModelProposer(forward, own, self.num_blocks, self.num_ids)
        self.companion.stamps = proposer.stamps  # of the engine that has the cache now
        return proposer


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft model whose cache has no size yet."""

    model: LoadedModel
    layout: PagedLayout
    vocabulary: ReducedVocabulary | None
    engine: EngineFolder | None
    config: EngineConfig  # of the engine that it was loaded for
    device: Device

    @property
    def asked(self) -> SpeculativeConfig:
        assert self.config.speculative is not None  # who opened it looked
        return self.config.speculative

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return (self.layout,)

    @property
    def later_bytes(self) -> int:
        """Of weights in the page cache, which counts as free memory; a GPU's largest step."""
        if self.device.is_gpu:
            model, limits = self.model, self.config.scheduler
            of = model.spec.decoder, model.dtype.itemsize, limits
            space = workspace_bytes(self.device, self.config.model)
            return space + activation_bytes(*of, prompt_logits=0)  # it draws from its last rows
        if self.engine is None:
            return 0
        return int(self.engine.manifest["weights"]["bytes"])

    def described(self, num_blocks: int) -> str:
        return (
            f"; drafts by {self.model.spec.family}, {self.model.model.formats.name}, whose part of "
            f"each block is in {self.layout.stored} "
            f"({self.layout.nbytes(num_blocks) / (1 << 20):.0f} MiB)"
        )

    def place(self, num_blocks: int, eager: bool) -> DraftModel:
        kv = self.layout.allocate(num_blocks, self.device.torch)
        decoder, limits = self.model.model, self.config.scheduler
        if self.device.by_triton:
            longest = self.layout.blocks_for(self.model.max_model_len)
            most = StepLimits(limits.max_num_seqs, limits.max_num_batched_tokens, longest)
            forward: Forward = forward_on(self.device, decoder, kv, most, self.config.model)
        elif self.engine is None:
            forward = forward_of(decoder, kv, eager, "A draft's step")
        else:
            forward, _ = forward_of_engine(self.engine, decoder, kv, eager)
        runner = Runner(forward, kv, self.vocabulary)
        return DraftModel(
            self.model, self.layout, runner, CompanionCache(kv), self.asked, num_blocks
        )


def open_draft(config: EngineConfig, target: Target) -> OpenedDraft:
    """The draft model that `config` asks for.

    Raises ConfigError for one whose tokens aren't the target's.
    """
    speculative, vocabulary = config.speculative, target.vocabulary
    assert speculative is not None  # the caller looked
    folder = guessing_folder(speculative, target)
    method = method_of(folder)
    if method is not None:
        raise ConfigError(
            f"{folder} holds heads, which guess by the target's states, and no draft model: set "
            f"method={method!r}."
        )
    loaded, engine = _load(folder, config, target)
    _check_vocabulary(folder, loaded, target.loaded, target.tokenizer, vocabulary)
    own = None if vocabulary is None else ReducedVocabulary(vocabulary.map)
    layout = _layout(config, loaded, engine, target.device)
    return OpenedDraft(loaded, layout, own, engine, config, target.device)


def _load(
    folder: Path, config: EngineConfig, target: Target
) -> tuple[LoadedModel, EngineFolder | None]:
    """Of as many positions as it has or was asked for, but no more than the target."""
    speculative, device = config.speculative, target.device
    assert speculative is not None  # the caller looked
    asked, most = speculative.max_model_len, target.loaded.max_model_len
    most = most if asked is None else min(asked, most)
    if not is_engine(folder):
        longest = max_positions(open_model(folder)[0].decoder)
        _check_length(folder, asked, longest)
        loaded = load_model(
            folder,
            max_model_len=min(most, longest),
            strict=config.model.strict,
            quantization=speculative.quantization,
            storage=target.storage(config),
            device=device.torch,
        )
        return loaded, None
    engine = EngineFolder.open(folder, verify=config.model.verify)
    if engine.for_gpu != device.by_triton:
        kinds = ("a CPU", "a GPU")
        raise ConfigError(
            f"The draft model {folder} was built for {kinds[engine.for_gpu]}, but its target runs "
            f"on {kinds[device.by_triton]}. Give what it was built from, or build it with device="
            f"{'cuda' if device.by_triton else 'cpu'!r}."
        )
    _check_length(folder, asked, engine.limits.max_model_len)
    length = min(most, engine.limits.max_model_len)
    engine.settle(EngineConfig(ModelConfig(model=folder, quantization=speculative.quantization)))
    ordered = config.model.deterministic is not False
    strict = config.model.strict
    return engine.load(length, strict=strict, device=device, ordered=ordered), engine


def _check_length(folder: Path, asked: int | None, longest: int) -> None:
    if asked is not None and asked > longest:
        raise ConfigError(
            f"max_model_len={asked} is more than the {longest} positions of the draft model "
            f"{folder}. Choose up to {longest}, or leave it out."
        )


def _layout(
    config: EngineConfig, draft: LoadedModel, engine: EngineFolder | None, device: Device
) -> PagedLayout:
    """The target's blocks; quantized as the target's where the draft's dtype allows it."""
    stored = config.cache.kv_cache_dtype
    if engine is not None:
        stored = engine.kv_cache_dtype  # type: ignore[assignment]  # its plan is for that
        if stored == "kivi":
            raise ConfigError(
                f"The draft model {engine.folder} was built with kv_cache_dtype='kivi', whose "
                "recent tokens lie in places of their own. Build it with another one."
            )
    elif (
        stored not in ("int8", "fp8", "fp8_e4m3", "int4")
        or draft.dtype is not torch.bfloat16
        or has_latents(draft.spec.decoder.layers)
    ):
        stored = "auto"
    layers = draft.spec.decoder.layers
    if has_states(layers):
        raise ConfigError(
            f"The draft model {draft.spec.family} has layers with states, of which a guess that "
            "isn't taken can't be taken back. Choose another, or another method."
        )
    return device.layout(layers, kv_dtype(stored, draft.dtype), config.cache.block_size)


# ── the same tokens ──────────────────────────────────────────────────────────────────────────────


def _check_vocabulary(
    folder: Path,
    draft: LoadedModel,
    target: LoadedModel,
    tokenizer: Tokenizer | None,
    vocabulary: ReducedVocabulary | None,
) -> None:
    """Raises ConfigError unless each id means the same to both; padding rows may differ."""
    own, size = draft.spec.decoder.vocab_size, target.spec.decoder.vocab_size
    _check_reduced(folder, None if vocabulary is None else vocabulary.map)
    ids = own if vocabulary is None else vocabulary.map.original_size
    found = None if tokenizer is None else _tokenizer(folder, ids)
    if tokenizer is not None and found is not None:
        different = _first_difference(tokenizer, found)
        if different is not None:
            raise ConfigError(
                f"The draft model {folder} has other tokens than its target: id {different} is "
                f"{found.id_to_token(different)!r} there and {tokenizer.id_to_token(different)!r} "
                f"here (vocabularies of {own:,} and {size:,}). Choose one of the target's family."
            )
    elif own != size:
        raise ConfigError(
            f"The draft model {folder} has a vocabulary of {own:,} ids and its target one of "
            f"{size:,}, and no tokenizers say whether that is padding. Leave out "
            "skip_tokenizer_init and give both folders their tokenizers, or choose a draft model "
            "of the same vocabulary."
        )


def _check_reduced(folder: Path, target: VocabMap | None) -> None:
    """A reduced vocabulary is both models' or none's: each reads the other's tokens."""
    own = VocabMap.load(folder) if folder.is_dir() else None
    if own is None and target is None:
        return
    if own is None or target is None or own.kept.tolist() != target.kept.tolist():
        counts = [f"{len(x):,} of {x.original_size:,}" if x else "all" for x in (own, target)]
        raise ConfigError(
            f"The draft model {folder} has {counts[0]} ids of its vocabulary and its target "
            f"{counts[1]}: one would be given tokens that it doesn't have. Reduce both to the same "
            "ids, or neither."
        )


def _tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    """The folder's; None where it has none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        return None
    return open_tokenizer(folder, vocab_size=vocab_size)


def _first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """The first id that isn't the same token to both."""
    for token_id in range(max(one.vocab_size, other.vocab_size)):
        if one.id_to_token(token_id) != other.id_to_token(token_id):
            return token_id
    return None


class FittedLogits:
    """A draft model's logits over the target's ids, where these are more or fewer: padding rows.

    What only one of the two has can't be guessed.
    """

    def __init__(self, runner: Runner, num_ids: int, vocab_size: int) -> None:
        """num_ids: the draft model's; vocab_size: the target's."""
        self._runner = runner
        self._num_ids = num_ids
        self._size = vocab_size
        self._logits = torch.empty((0, vocab_size))

    def __call__(self, step: Step) -> Tensor:
        """Logits [S, V], good until the next call."""
        logits = self._runner.forward(step)
        if self._num_ids >= self._size:
            return logits[:, : self._size]
        rows = logits.shape[0]
        with torch.inference_mode():
            if rows > len(self._logits):
                held = max(rows, min(2 * len(self._logits), KEPT_ROWS))
                self._logits = logits.new_empty((held, self._size))
            wide = self._logits[:rows]
            wide[:, : self._num_ids] = logits
            wide[:, self._num_ids :] = -torch.inf
            return wide
