"""What a model takes of a device's memory: known from its headers, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from penstock import ops
from penstock.cache import PagedLayout, recent_blocks
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kernels import native
from penstock.models.hub import resolve
from penstock.models.load import Description, LoadedModel, describe, weight_bytes
from penstock.models.weights import check_complete
from penstock.nn import Decoder, DecoderSpec, LayerSpec
from penstock.nn.attention import Bases
from penstock.nn.conv import Convolution
from penstock.nn.decoder import MATRICES
from penstock.nn.experts import ExpertBank
from penstock.nn.linear import Embedding, Linear
from penstock.nn.mla import HeadBanks
from penstock.nn.parameters import Loadable, Vector
from penstock.ops.linear import ROW_CODES
from penstock.ops.ranks import HEADER
from penstock.parallel import Ranks, Stage
from penstock.quant import WeightFormat, formats_of
from penstock.roofline.cost import matrices
from penstock.runtime.device import Device, check_device
from penstock.runtime.engine_folder import is_engine
from penstock.runtime.forwards import workspace_bytes
from penstock.runtime.loader import as_exported, check_divided
from penstock.runtime.meetings import met_bytes
from penstock.runtime.memory import SEES_ALL, Horizon, activation_bytes, horizon_of
from penstock.runtime.parts import largest_part
from penstock.runtime.program import Program
from penstock.runtime.projector import projector_of, with_projector
from penstock.runtime.sizing import layout_of
from penstock.runtime.stateful import with_states
from penstock.runtime.team import PLACE_BYTES
from penstock.runtime.vision import largest_picture, sight_bytes

_TWO_BYTES = ("amx", "amx-emulated", "avx512-bf16")
"""Kernels that multiply rows of bfloat16 as they are; others widen them to float32 first."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model, of its keys and values, and of its largest step."""

    described: Description
    model: LoadedModel  # without its weights
    config: EngineConfig
    device: Device
    layout: PagedLayout
    weights: int  # as they lie in memory, rotary tables included
    workspace: int  # activations of the largest step, and what kernels take beside them
    horizon: Horizon  # what layers see, where blocks beyond that are let go
    step_tokens: int  # of the largest step
    ranks: Ranks | None = None  # whose part it is, of a model that several processes have
    meeting: int = 0  # where those of a stage meet; all of them map the same

    @property
    def workspace_tokens(self) -> int:
        """Of the step that the workspace is for: on a GPU the largest that there may be."""
        limit = self.config.scheduler.max_num_batched_tokens
        return limit if self.device.by_triton else self.step_tokens

    @property
    def decoder(self) -> DecoderSpec:
        return self.described.spec.decoder

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers; of codes where recent tokens are also kept as they were written."""
        return sum(map(self.layout.bytes_per_token, range(len(self.layout.heads))))

    def blocks(self, sequences: int, tokens: int) -> int:
        """That so many sequences of so many tokens fill.

        With a window each keeps what it sees, and one reads its prompt beside that.
        """
        size = self.layout.block_size
        held = self.horizon.blocks(size, tokens)
        reading = self.horizon.most_blocks(size, tokens, self.step_tokens) - held
        return sequences * held + reading

    def cache_bytes(self, sequences: int, tokens: int) -> int:
        """Of those blocks, as far as the load writes to it.

        Where a window lets go of blocks that are found again, all that there are come in use: those
        for sequences to grow into (`Planned.num_blocks`), too.
        """
        layout, states = self.layout, self.layout.states
        if states is not None:  # of those that run; others lie where there is room
            layout = replace(layout, states=replace(states, slots=2 * sequences))
        if window := layout.recent_window:
            recent = recent_blocks(window, layout.block_size, tokens, sequences, self.step_tokens)
            layout = replace(layout, max_recent_blocks=min(recent, layout.max_recent_blocks))
        found_again = self.horizon and self.config.cache.enable_prefix_caching
        growth = sequences if found_again else 0
        return layout.nbytes(self.blocks(sequences, tokens) + growth)

    def total(self, sequences: int, tokens: int) -> int:
        """Of everything."""
        return self.weights + self.workspace + self.cache_bytes(sequences, tokens) + self.meeting

    def of_more(self, max_num_seqs: int, step_tokens: int) -> Footprint:
        """The same of an engine for so many sequences, whose largest step has so many tokens."""
        limits = replace(self.config.scheduler, max_num_seqs=max_num_seqs)
        config = replace(self.config, scheduler=limits)
        return _measured(self.described, self.model, config, self.device, step_tokens, self.ranks)


def footprint(config: EngineConfig, device: Device, step_tokens: int | None = None) -> Footprint:
    """Of a model that one process has: see `footprints`."""
    (found,) = footprints(config, device, step_tokens)
    return found


def footprints(
    config: EngineConfig, device: Device, step_tokens: int | None = None
) -> tuple[Footprint, ...]:
    """Of what `load_runtime` would load, for each process that has a part of it, stage by stage; a
    folder without weights stands for random ones.

    Headers are checked as a load would check them. device: where it is to run, which needn't be in
    this machine. step_tokens: of the largest step that will come, where it is smaller than the
    configuration's. Drafts, adapters and the process itself come on top.
    Raises ConfigError for an engine folder, which says its own bytes, and PenstockError for what
    can't be divided.
    """
    check_device(config, device)
    check_divided(config, device)
    if config.parallel.context_parallel_size > 1:
        raise ConfigError(
            f"What {config.parallel.described} takes isn't planned: each rank has what one process "
            "has, but for its part of the cache. Leave it out."
        )
    folder = resolve(config.model.model, config.model.revision)
    if is_engine(folder):
        raise ConfigError(
            f"{folder} is a built engine: penstock doctor says what it takes. Plan with the model "
            "that it was built of."
        )
    config = as_exported(folder, with_projector(folder, config))
    check_device(config, device)  # of what an export was made for, too
    found = _described(folder, config, device)
    if found.source is not None:
        check_complete(found.spec, found.source, found.formats, found.dtype)
    return tuple(
        _measured(found, found.loaded(found.decoder(ranks)), config, device, step_tokens, ranks)
        for ranks in _ranks_of(config)
    )


def total_of(parts: Sequence[Footprint], sequences: int, tokens: int) -> int:
    """Of the processes of one machine: where those of a stage meet is there once."""
    each = sum(part.total(sequences, tokens) - part.meeting for part in parts)
    return each + meetings_of(parts)


def meetings_of(parts: Sequence[Footprint]) -> int:
    """Where ranks meet, in all stages."""
    return sum(part.meeting for part in parts if part.ranks is not None and part.ranks.rank == 0)


def _ranks_of(config: EngineConfig) -> list[Ranks | None]:
    """Those that have a part of the model each, as `Team` places them; None: there is one."""
    asked = config.parallel
    if asked.size == 1:
        return [None]
    width, stages = asked.tensor_parallel_size, asked.pipeline_parallel_size
    meeting = torch.empty(HEADER + 2 * PLACE_BYTES, dtype=torch.uint8)  # never touched
    return [
        Ranks(
            rank,
            width,
            meeting,
            asked.enable_expert_parallel,
            _stage(number, stages),
        )
        for number, rank in product(range(stages), range(width))
    ]


def _stage(number: int, count: int) -> Stage | None:
    """One that hands on to a socket of any number: nothing will."""
    if count == 1:
        return None
    return Stage(number, count, -1 if number == 0 else 0, -1 if number == count - 1 else 0)


def _measured(
    found: Description,
    model: LoadedModel,
    config: EngineConfig,
    device: Device,
    step_tokens: int | None,
    ranks: Ranks | None,
) -> Footprint:
    layout = layout_of(config, model, device, model.model.cached_layers)
    horizon = horizon_of(found.spec.decoder, found.max_model_len)
    most = config.scheduler.max_num_batched_tokens
    tokens = most if step_tokens is None else min(step_tokens, most)
    workspace, meeting = _workspace(found, config, device, tokens, ranks)
    tables = sum(table.nbytes for table in model.model.buffers())
    return Footprint(
        described=found,
        model=model,
        config=config,
        device=device,
        layout=layout,
        weights=weight_bytes(model.model) + tables,
        workspace=workspace,
        horizon=SEES_ALL if layout.recent_window else horizon,
        step_tokens=tokens,
        ranks=ranks,
        meeting=meeting,
    )


def _described(folder: Path, config: EngineConfig, device: Device) -> Description:
    model = config.model
    random = model.load_format == "dummy" or (
        (folder / "config.json").is_file()
        and not any(p for kind in ("safetensors*", "bin") for p in folder.glob(f"*.{kind}"))
    )
    return describe(
        folder,
        dummy=random,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        strict=model.strict,
        quantization=model.quantization,
        max_attention_window=model.max_attention_window,
        sink_token_length=model.sink_token_length,
        mmproj=projector_of(model),
        storage=device.storage(ordered=model.deterministic is not False),
    )


def _workspace(
    found: Description, config: EngineConfig, device: Device, tokens: int, ranks: Ranks | None
) -> tuple[int, int]:
    """What the largest step takes, and where ranks meet in it: a stand-in's program says it, or
    what a GPU sets aside.
    """
    spec, limits = found.spec.decoder, config.scheduler
    chosen = config.model.mm_processor_kwargs
    said = projector_of(config.model) or found.folder
    picture = largest_picture(said, found.spec, chosen, found.max_model_len)
    seen = sight_bytes(spec, found.dtype.itemsize, tokens, picture)
    if device.by_triton or native.handle is None:
        beside = workspace_bytes(device, config.model)
        return beside + seen + activation_bytes(spec, found.dtype.itemsize, limits), 0
    model = _stand_in(spec, found.dtype, ranks)
    layout = device.layout(
        model.cached_layers, found.dtype, config.cache.block_tokens(found.max_model_len)
    )
    kv = with_states(layout, config, found.loaded(model), model.cached_layers).allocate(1)
    program, rows = Program(model, kv), limits.max_num_seqs
    if ranks is not None and ranks.stage is not None:
        tokens = largest_part(tokens, ranks.stage.count)
    touched = program.touched(tokens, rows)
    met = 0
    if model.ranks is not None:
        met = met_bytes(program, tokens, rows, found.dtype.itemsize, PLACE_BYTES)
    return touched + seen + _scratch(found, tokens), met


def _stand_in(spec: DecoderSpec, dtype: torch.dtype, ranks: Ranks | None) -> Decoder:
    """A decoder with no values: memory that is never touched, and the same for matrices alike."""
    size = 1 if ranks is None else ranks.size
    few = tuple(_with_few_experts(layer, size) for layer in spec.layers)
    model = Decoder(replace(spec, layers=few), formats_of(None, dtype), dtype, 1, ranks)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, Linear | ExpertBank):
            many = module.count if isinstance(module, ExpertBank) else 0
            rows = module.out_features * (2 if module.gated else 1)
            key = (many, rows, module.in_features, int(module.gated))
            if key not in known:
                known[key] = _packed(module, rows, many, dtype)
            module.own("weight", known[key])
            module.packed["weight"] = module.parameter("weight")
            if module.has_bias:
                module.own("bias", torch.empty((many, rows) if many else (rows,)))
        elif isinstance(module, HeadBanks):
            for name, (n, k) in module.shapes().items():
                packed: torch.Tensor = ops.op("pack").fake(torch.empty((n, k)), dtype, False)
                module.own(name, packed.new_empty((len(module.kept), *packed.shape)))
        elif isinstance(module, Embedding):
            columns = len(module.columns)
            module.own("weight", torch.empty((module.vocab_size, columns), dtype=dtype))
        elif isinstance(module, Vector):
            module.own("weight", torch.empty(len(module.kept)))
        elif isinstance(module, Convolution):
            module.own("weight", torch.empty((module.width, module.channels)))
            if module.has_bias:
                module.own("bias", torch.empty(module.channels))
        elif isinstance(module, Bases):
            sides, _, dim, kept = module.shape
            module.own("weight", torch.empty((sides, len(module.kept), dim, kept)))
        elif isinstance(module, Loadable) and module.keeper is module:
            for name, shape in module.expected().items():
                module.own(name, torch.empty(shape))
    return model


def _with_few_experts(layer: LayerSpec, ranks: int) -> LayerSpec:
    experts = layer.mlp.experts
    if experts is None:
        return layer
    few = replace(experts, count=max(experts.per_token, ranks), groups=1, top_groups=1)
    return replace(layer, mlp=replace(layer.mlp, experts=few))


def _packed(module: Linear | ExpertBank, rows: int, many: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix as it is packed, or one of each expert."""
    one = torch.empty((rows, module.in_features))
    packed: torch.Tensor = ops.op("pack").fake(one, dtype, module.gated)
    return packed.new_empty((many, *packed.shape)) if many else packed


def _scratch(found: Description, tokens: int) -> int:
    """What kernels take beside a step's tensors, nearly: the widest rows as they multiply them, and
    of experts what each choice gives."""
    spec, itemsize = found.spec.decoder, found.dtype.itemsize
    rows = max(k * _width(stored, found.dtype) for _, stored, k in _matrices(found))
    chosen = max((x.mlp.experts.per_token for x in spec.layers if x.mlp.experts), default=0)
    return tokens * (rows + chosen * spec.hidden * itemsize)


def _matrices(found: Description) -> Iterator[tuple[str, WeightFormat, int]]:
    """Name, format and K of the layers' matrices."""
    spec = found.spec.decoder
    for i, layer in enumerate(spec.layers):
        for name, (_, k) in matrices(spec, layer).items():
            yield name, found.formats.of(f"layers.{i}.{MATRICES[name]}"), k


def _width(stored: WeightFormat, dtype: torch.dtype) -> int:
    """Bytes of a row's value as the kernels that meet this format read it."""
    if ROW_CODES[stored.row_codes].startswith("int8"):
        return 1
    return 2 if dtype is torch.bfloat16 and native.isa in _TWO_BYTES else 4
