"""From a configuration to everything that an engine runs on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from penstock.cache import PagedLayout, RecentBlocks, any_part, block_rows
from penstock.cache.disk import DiskStore
from penstock.config import EngineConfig, ModelConfig
from penstock.config.lora import LoraConfig
from penstock.errors import ConfigError, WeightsError
from penstock.hardware import release_freed_memory
from penstock.models.exported import read_exported, verify_exported
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_dummy, load_model
from penstock.models.sources import open_tokenizer
from penstock.models.weights import Progress
from penstock.parallel import Ranks, Ring
from penstock.runtime.adapters import Adapters, check_foldless
from penstock.runtime.beside import Opened, Opener, Placed, Target
from penstock.runtime.companion import CompanionCache
from penstock.runtime.device import Device, check_device, device_of
from penstock.runtime.draft_model import open_draft
from penstock.runtime.eagle import open_eagle
from penstock.runtime.engine_folder import EngineFolder, is_engine
from penstock.runtime.forwards import forward_of, forward_of_engine, forward_on
from penstock.runtime.graphs import StepLimits
from penstock.runtime.identity import identity
from penstock.runtime.medusa import open_medusa
from penstock.runtime.memory import SEES_ALL, Horizon, horizon_of
from penstock.runtime.plan import Plan
from penstock.runtime.projector import check_unasked, projector_of, with_projector
from penstock.runtime.runner import Forward, Runner
from penstock.runtime.sizing import (
    empty_blocks,
    longest_sequence,
    others_layouts,
    sized_cache,
    with_depth,
    within_room,
)
from penstock.runtime.stateful import check_stateful, settled
from penstock.runtime.team import Team
from penstock.runtime.vision import Sight, check_seeing, pictures_of, tokens_together
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.step import KV, Step
from penstock.tokenizer import Tokenizer, VocabMap
from penstock.tokenizer.vocab_map import FILE

logger = logging.getLogger("penstock")

_OPENERS: dict[str, Opener] = {
    "draft_model": open_draft,
    "medusa": open_medusa,
    "eagle": open_eagle,
    "eagle3": open_eagle,
}
"""Of the methods for which something is loaded beside the target."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A loaded model, its tokenizer, and its cache."""

    model: LoadedModel
    tokenizer: Tokenizer | None
    layout: PagedLayout
    num_blocks: int
    runner: Runner
    engine: EngineFolder | None = None  # what it was loaded from, where that was built
    draft: Placed | None = None  # what guesses beside it, where something was loaded for that
    adapters: Adapters | None = None  # slots for them, with enable_lora
    sight: Sight | None = None  # of a model that sees pictures
    team: Team | None = None  # the other processes that the model is divided among
    disk: DiskStore | None = None  # where prefixes outlive the process

    def settle(self, config: EngineConfig) -> EngineConfig:
        """`config`, with a built engine's own values where nothing was chosen."""
        if self.engine is not None:
            config = self.engine.settle(config)
        elif self.layout.recent_window:
            config = config.storing("kivi")
        if self.layout.states is not None:
            check_stateful(config, self.model.spec.decoder.layers)
            config = settled(config, self.layout.states)
        if self.adapters is not None:  # whatever the configuration says of them
            asked = config.speculative
            LoraConfig(enable_lora=True).check_method(None if asked is None else asked.method)
        if self.sight is not None:
            sight = self.sight
            check_seeing(config, len(sight.placed.store), sight.spare > 0, sight.together)
        if self.draft is None:
            return config
        self._check_kept(config)
        return with_depth(config, self.draft.asked)

    def _check_kept(self, config: EngineConfig) -> None:
        """Raises ConfigError for steps that are larger than the room for their states."""
        kept, most = self.model.model.kept, config.scheduler.max_num_batched_tokens
        if kept is not None and most > len(kept.store):
            raise ConfigError(
                f"max_num_batched_tokens={most}, but the runtime was loaded with room for the "
                f"states of {len(kept.store)} tokens. Lower it, or load the runtime with it."
            )

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return any_part(self.runner.kv).device

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        """Of all caches that a block has a part of, the target's first: of each rank its own."""
        others = () if self.team is None else others_layouts(self.model, self.layout)
        own = (self.layout, *others)
        return own if self.draft is None else (*own, *self.draft.layouts)

    @property
    def whole_layout(self) -> PagedLayout:
        """The target's cache as it would be if one process had all of it."""
        if self.team is None:
            return self.layout
        heads = tuple(layer.attention.cached for layer in self.model.spec.decoder.layers)
        return replace(self.layout, heads=heads, ranks=1)

    @property
    def cache_bytes(self) -> int:
        """Of all caches; committed as they are first used."""
        return sum(layout.nbytes(self.num_blocks) for layout in self.layouts)

    @property
    def horizon(self) -> Horizon:
        """What the model's layers see, where blocks may be let go beyond that."""
        if len(any_part(self.runner.kv)) == self.num_blocks:
            return SEES_ALL
        return horizon_of(self.model.spec.decoder, self.model.max_model_len)

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
        check_unasked(folder, config.model)
        return _load_engine(folder, config)
    config = with_projector(folder, config)
    device = device_of(config.model.device)
    check_device(config, device)
    if config.model.verify:
        if read_exported(folder) is None:
            raise ConfigError(
                f"verify=True checks the sums of an engine or an export, but {folder} has none. "
                "Leave it out."
            )
        verify_exported(folder)
    config = as_exported(folder, config)
    check_device(config, device)  # of what an export was made for, too
    config.check_together()
    if config.lora.enable_lora and device.by_triton:
        raise ConfigError(
            "enable_lora is built for CPUs: set device='cpu', or merge the adapter for this GPU "
            "(penstock export --merge-lora)."
        )
    team = _team(folder, config, device)
    try:
        return _load(folder, config, device, progress, team)
    except BaseException:
        if team is not None:
            team.close()
        raise


def _team(folder: Path, config: EngineConfig, device: Device) -> Team | None:
    """The other ranks, which load their parts meanwhile."""
    check_divided(config, device)
    return None if config.parallel.size == 1 else Team(config, folder)


def check_divided(config: EngineConfig, device: Device) -> None:
    """Raises ConfigError for ranks where there are none."""
    if config.parallel.size > 1 and device.by_triton:
        raise ConfigError(
            f"{config.parallel.described} is built for CPUs: set device='cpu', or leave it out."
        )


def _load(
    folder: Path,
    config: EngineConfig,
    device: Device,
    progress: Progress | None,
    team: Team | None,
) -> Runtime:
    """The runtime of a folder's model, of which `team` has the other parts."""
    ranks = None if team is None else team.ranks
    loaded = load_weights_of(folder, config.model, device, progress, ranks)
    loaded, vocabulary = _reduced(folder, loaded)
    release_freed_memory()  # as packing leaves it
    check_stateful(config, loaded.spec.decoder.layers)
    if team is not None:
        team.loaded()
    tokenizer = _tokenizer(config, folder, loaded, vocabulary)
    target = Target(folder, loaded, tokenizer, vocabulary, device=device)
    opened = open_beside(config, target)
    layout, blocks = sized_cache(config, loaded, opened, device=device)
    if team is not None and team.most_blocks is not None:
        longest = longest_sequence(config, loaded, layout, opened)
        blocks = within_room(blocks, team.most_blocks, layout, loaded.max_model_len, longest)
    all_blocks = blocks + empty_blocks(loaded, layout, opened)
    if team is not None:
        team.allocate(all_blocks)
    kv = layout.allocate(all_blocks, device.torch)
    sight = _sight(folder, config, loaded, tokenizer, layout.block_size, device)
    if device.by_triton:
        forward = forward_on(
            device, loaded.model, kv, _limits(config, loaded, layout), config.model
        )
    else:
        threads = None if team is None else team.threads
        forward = forward_of(loaded.model, kv, config.model.enforce_eager, threads=threads)
    adapters, adapted = _adapters(folder, config, loaded, kv)
    placed = None if opened is None else opened.place(blocks, config.model.enforce_eager)
    companions = _companions(placed)
    columns = loaded.spec.decoder.vocab_size
    part = loaded.model.own_part if loaded.model.ring is not None else None
    both_ways = None if sight is None else sight.both_ways
    runner = runner_over(
        forward, kv, layout, vocabulary, None, companions, adapted, team, columns, part, both_ways
    )
    disk = _disk(folder, config, loaded, layout, kv, opened, sight, device)
    return Runtime(
        loaded, tokenizer, layout, blocks, runner, None, placed, adapters, sight, team, disk
    )


def _disk(
    folder: Path,
    config: EngineConfig,
    loaded: LoadedModel,
    layout: PagedLayout,
    kv: KV,
    opened: Opened | None,
    sight: Sight | None,
    device: Device,
) -> DiskStore | None:
    """Where blocks are kept on disk; None where that isn't asked for. Raises ConfigError."""
    asked = config.cache
    if asked.prefix_cache_dir is None:
        return None
    why = None
    if opened is not None:
        why = "blocks have a part of a draft model's or of heads that guess"
    elif horizon_of(loaded.spec.decoder, loaded.max_model_len):
        why = "blocks are let go that a window has passed by"
    if why is not None:
        raise ConfigError(f"prefix_cache_dir isn't built where {why}. Leave it out.")
    seed = config.model.seed if config.model.load_format == "dummy" else None
    scaling = None if sight is None else sight.pictures.scaling
    ordered = config.model.deterministic is not False
    beside = projector_of(config.model)
    name = identity(folder, loaded, layout, seed, device.described(ordered), scaling, beside)
    limit = int(asked.prefix_cache_disk_space * (1 << 30))
    store = DiskStore(Path(asked.prefix_cache_dir), name, block_rows(kv), limit)
    logger.info(
        "Prefixes outlive the process in %s: %d blocks, %.0f MiB.",
        store.files.folder, len(store.files), store.files.nbytes / (1 << 20),
    )  # fmt: skip
    return store


def _sight(
    folder: Path,
    config: EngineConfig,
    loaded: LoadedModel,
    tokenizer: Tokenizer | None,
    block_size: int,
    device: Device,
) -> Sight | None:
    """A seeing model's tower, ready for steps; None of others."""
    spec, vision = loaded.spec.pictures, loaded.spec.decoder.vision
    chosen = config.model.mm_processor_kwargs
    if spec is None or vision is None:
        if chosen is not None:
            raise ConfigError(
                "mm_processor_kwargs are of models that see pictures: leave them out."
            )
        return None
    rows = config.scheduler.max_num_batched_tokens
    ropes = [layer.attention.rope for layer in loaded.spec.decoder.layers]
    turns = any(rope is not None and rope.sections for rope in ropes)
    together = tokens_together(loaded.spec)
    if together and device.by_triton:
        logger.warning("Pictures of this model are read on CPUs only; texts run.")
        return None
    check_seeing(config, rows, turns, together)
    said = projector_of(config.model) or folder
    pictures = pictures_of(said, spec, vision, tokenizer, chosen)
    return Sight(loaded.model, pictures, device, block_size, rows, together)


def _adapters(
    folder: Path, config: EngineConfig, loaded: LoadedModel, kv: KV
) -> tuple[Adapters | None, Forward | None]:
    """Slots, and what runs steps whose tokens have adapters."""
    asked = config.lora
    if not asked.enable_lora:
        return None, None
    check_foldless(folder)
    adapters = Adapters(loaded, asked.max_loras, asked.max_lora_rank)
    eager = config.model.enforce_eager
    return adapters, forward_of(loaded.model, kv, eager, "A step with adapters", adapted=True)


def load_weights_of(
    folder: Path,
    model: ModelConfig,
    device: Device,
    progress: Progress | None = None,
    ranks: Ranks | Ring | None = None,
) -> LoadedModel:
    """The model as `model` asks for it; ranks: the part of this one."""
    dummy = model.load_format == "dummy"
    load = partial(load_dummy, seed=model.seed)
    if not dummy:
        load = partial(load_model, ranks=ranks, mmproj=projector_of(model))
    return load(
        folder,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        strict=model.strict,
        quantization=model.quantization,
        progress=progress,
        storage=device.storage(ordered=model.deterministic is not False),
        device=device.torch,
        max_attention_window=model.max_attention_window,
        sink_token_length=model.sink_token_length,
    )


def _limits(config: EngineConfig, loaded: LoadedModel, layout: PagedLayout) -> StepLimits:
    limits = config.scheduler
    return StepLimits(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        layout.blocks_for(loaded.max_model_len),
    )


def _load_engine(folder: Path, config: EngineConfig) -> Runtime:
    if config.model.load_format == "dummy":
        raise ConfigError(f"{folder} was built with its weights: leave load_format='dummy' out.")
    if config.parallel.size > 1:
        raise ConfigError(
            f"{folder} was built for one process: {config.parallel.described} goes with a model or "
            "an export. Leave it out."
        )
    if config.model.max_attention_window is not None:
        raise ConfigError(
            f"{folder} was built to see all of its context: max_attention_window goes with a model "
            "or an export. Leave it out."
        )
    if config.lora.enable_lora:
        raise ConfigError(
            f"{folder} is a built engine, whose steps have no place for adapters: enable_lora goes "
            "with a model or an export. Or merge the adapter (penstock export --merge-lora)."
        )
    engine = EngineFolder.open(folder, verify=config.model.verify)
    model, device = config.model, engine.device(config.model.device)
    check_device(config, device)
    config = engine.settle(config)
    assert config.model.max_model_len is not None  # settled
    loaded = engine.load(
        config.model.max_model_len,
        strict=model.strict,
        device=device,
        ordered=model.deterministic is not False,
    )
    loaded, vocabulary = _reduced(folder, loaded)
    tokenizer = _tokenizer(config, folder, loaded, vocabulary)
    # a CPU's are in the page cache, which counts as free
    mapped = 0 if device.is_gpu else engine.manifest["weights"]["bytes"]
    opened = open_beside(config, Target(folder, loaded, tokenizer, vocabulary, engine, device))
    layout, blocks = sized_cache(config, loaded, opened, mapped, device)
    kv = layout.allocate(blocks + empty_blocks(loaded, layout, opened), device.torch)
    sight = _sight(folder, config, loaded, tokenizer, layout.block_size, device)
    eager, hidden = config.model.enforce_eager, None
    if device.by_triton:
        forward = forward_on(device, loaded.model, kv, _limits(config, loaded, layout), model)
    else:
        forward, hidden = forward_of_engine(engine, loaded.model, kv, eager)
    placed = None if opened is None else opened.place(blocks, eager)
    both_ways = None if sight is None else sight.both_ways
    runner = runner_over(
        forward, kv, layout, vocabulary, hidden, _companions(placed), both_ways=both_ways
    )
    disk = _disk(folder, config, loaded, layout, kv, opened, sight, device)
    return Runtime(
        loaded, tokenizer, layout, blocks, runner, engine, placed, sight=sight, disk=disk
    )


def open_beside(config: EngineConfig, target: Target) -> Opened | None:
    """What `config` asks to guess beside the target; None where nothing is loaded for that."""
    method = None if config.speculative is None else config.speculative.method
    opener = _OPENERS.get(method or "")
    return None if opener is None else opener(config, target)


def _companions(placed: Placed | None) -> tuple[CompanionCache, ...]:
    return () if placed is None else placed.companions


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
    companions: Sequence[CompanionCache] = (),
    adapted: Forward | None = None,
    team: Team | None = None,
    columns: int = 0,
    part: Callable[[Step], Step] | None = None,
    both_ways: Forward | None = None,
) -> Runner:
    """What runs `forward` over the cache `kv` of that layout, beside other caches."""
    recent = None
    if layout.recent_window:
        recent = RecentBlocks(kv, layout.recent_window, layout.block_size)
    return Runner(
        forward, kv, vocabulary, hidden_plan, recent, companions, adapted, team, columns, part,
        both_ways,
    )  # fmt: skip
