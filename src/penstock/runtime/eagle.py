"""An EAGLE head beside its target: loaded, found to fit, given its part of each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.cache import PagedLayout, copy_blocks, kv_dtype
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.models.heads.eagle import FILES, EagleCheckpoint, open_eagle_checkpoint
from penstock.nn import DecoderSpec, KeptStates
from penstock.nn.eagle import EagleHead, FeatureHead, FusingHead
from penstock.quant import formats_of
from penstock.roofline import Cost, CostModel, StepSize
from penstock.runtime.beside import Target, bytes_of, guessing_folder, keep_states
from penstock.runtime.companion import CompanionCache
from penstock.runtime.device import Device
from penstock.runtime.forwards import forward_beside
from penstock.runtime.program import Program
from penstock.runtime.runner import Forward
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.speculate.draft_loop import DraftForward, DraftLimits
from penstock.speculate.eagle import EagleProposer, Shape, shelf_rows
from penstock.speculate.eagle_passes import Head, Ids, scratch_blocks
from penstock.step import KV, Step

READ_AT_ONCE = 512
"""States of a prompt that are read in one pass, at most."""


@dataclass(frozen=True, slots=True)
class PlacedEagle:
    """A head and its cache."""

    head: EagleHead
    by_states: Forward
    by_features: Forward
    kv: KV
    kept: KeptStates
    layout: PagedLayout
    companion: CompanionCache  # its cache, as what moves with the target's blocks
    vocabulary: ReducedVocabulary | None
    ids: Ids | None
    asked: SpeculativeConfig
    num_blocks: int

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return (self.layout,)

    @property
    def companions(self) -> tuple[CompanionCache, ...]:
        return (self.companion,)

    @property
    def weight_bytes(self) -> int:
        head = self.head
        stores = head.states.nbytes + head.features.nbytes + head.given.nbytes
        return bytes_of(head) - stores

    def costs(self, contexts: Sequence[int], depth: int) -> Iterator[Cost]:
        """Of the passes of a draft, one for each depth. contexts: of the sequences that get one."""
        spec, formats = self.head.spec, self.head.formats
        size = (spec.vocab_size if spec.head_size is None else spec.head_size, spec.hidden)
        decoder = DecoderSpec(*size, (spec.layer,), spec.norm, 0)
        model = CostModel(decoder, formats, self.layout, self.head.dtype)
        for done in range(depth):
            # the first one reads a row that the target has given, the others one for each way
            ways = [context + done for context in contexts for _ in range(self._ways(done))]
            of_layer = model.cost(StepSize([1] * len(ways), ways, len(ways)))
            nbytes, products = of_layer.weight_bytes, dict(of_layer.products)
            for matrix in self.head.mixing(by_states=not done):
                stored, n, k = matrix.weight_format, matrix.out_features, matrix.in_features
                nbytes += stored.nbytes(n, k)
                flops = products.get(stored.compute, 0) + 2 * n * k * len(ways)
                products[stored.compute] = flops
            yield Cost(nbytes, of_layer.kv_bytes, products)

    def _ways(self, done: int) -> int:
        """Rows of a sequence in a pass."""
        return self.asked.width if done else 1

    def proposer(self, asked: SpeculativeConfig, limits: DraftLimits) -> EagleProposer:
        self._check_room(asked, limits)
        head, depth = self.head, asked.num_speculative_tokens
        assert asked.method is not None and depth is not None  # filled in
        own = self.head.spec.head_size
        seen = Head(
            by_states=self._narrowed(self.by_states),
            by_features=self._narrowed(self.by_features),
            states=head.states,
            features=head.features,
            given=head.given,
            kept=self.kept.store,
            copy=self._copy,
            num_blocks=self.kv[0][0].shape[0],
            num_logits=head.spec.vocab_size if own is None else own,
            ids=self.ids,
        )
        shape = Shape(depth, asked.width, asked.most_tokens)
        proposer = EagleProposer(asked.method, seen, limits, shape, self.num_blocks)
        self.companion.stamps = proposer.stamps  # of the engine that has the cache now
        return proposer

    def _check_room(self, asked: SpeculativeConfig, limits: DraftLimits) -> None:
        """Raises ConfigError for drafts that are larger than what was made room for."""
        depth = asked.num_speculative_tokens
        assert depth is not None  # filled in
        needed = scratch_blocks(limits.max_num_seqs, asked.width, depth, limits.block_size)
        held = self.kv[0][0].shape[0] - self.num_blocks
        rows = limits.max_num_seqs * asked.width
        if needed > held or rows > len(self.head.given):
            raise ConfigError(
                f"Drafts of {depth} tokens one after another and {asked.width} beside each other, "
                f"of {limits.max_num_seqs} sequences, need {needed} blocks and {rows} rows beside "
                f"the cache, but the runtime was loaded with {held} and {len(self.head.given)}. "
                "Load it with this speculative_config and max_num_seqs."
            )

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the head's cache, (from, to)."""
        with torch.inference_mode():
            if isinstance(self.by_states, Program):
                self.by_states.copy_blocks(pairs)
            else:
                copy_blocks(self.companion.rows, pairs)

    def _narrowed(self, forward: Forward) -> DraftForward:
        """`forward` over the head's cache, of steps with the tokenizer's ids."""

        def run(step: Step) -> Tensor:
            with torch.inference_mode():
                narrow = step if self.vocabulary is None else self.vocabulary.narrow(step)
                return forward(narrow, self.kv)

        return run


@dataclass(frozen=True, slots=True)
class OpenedEagle:
    """A head whose cache has no size yet."""

    head: EagleHead
    kept: KeptStates
    layout: PagedLayout
    vocabulary: ReducedVocabulary | None
    ids: Ids | None
    asked: SpeculativeConfig
    scratch: int  # blocks behind those of the pool
    shelf_bytes: int  # of states that are laid aside, at most
    device: Device

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return (self.layout,)

    @property
    def later_bytes(self) -> int:
        """Of the blocks that ways through trees are in, and of states."""
        head = self.head
        if self.device.is_gpu:  # where stores are taken already
            return self.layout.nbytes(self.scratch) + self.shelf_bytes
        stores = (self.kept.store, head.states, head.features, head.given)
        return (
            self.layout.nbytes(self.scratch)
            + self.shelf_bytes
            + sum(store.nbytes for store in stores)  # whose memory is committed at its first use
        )

    def described(self, num_blocks: int) -> str:
        kind = "EAGLE-3" if self.head.spec.fuses else "EAGLE"
        return (
            f"; drafts by an {kind} head, {self.head.formats.name}, whose part of each block is in "
            f"{self.layout.stored} ({self.layout.nbytes(num_blocks + self.scratch) >> 20} MiB)"
        )

    def place(self, num_blocks: int, eager: bool) -> PlacedEagle:
        kv, head = self.layout.allocate(num_blocks + self.scratch, self.device.torch), self.head
        forward, sizes = partial(forward_beside, self.device), (len(head.given), self.asked.width)
        return PlacedEagle(
            head,
            forward(head.by_states(), kv, eager, "A head's first pass", sizes),
            forward(head.by_features(), kv, eager, "A head's later pass", sizes),
            kv,
            self.kept,
            self.layout,
            CompanionCache(kv),
            self.vocabulary,
            self.ids,
            self.asked,
            num_blocks,
        )


def open_eagle(config: EngineConfig, target: Target) -> OpenedEagle:
    """The head that `config` asks for.

    Raises an error for one that isn't of the target, or of another kind.
    """
    asked, decoder = config.speculative, target.loaded.model
    assert asked is not None and asked.num_speculative_tokens is not None  # the caller looked
    folder = guessing_folder(asked, target, also=FILES)
    reduced = None if target.vocabulary is None else target.vocabulary.map
    found = open_eagle_checkpoint(
        folder, asked.method == "eagle3", decoder, reduced, config.model.strict
    )
    head = _head(found, config, target).to(target.device.torch)
    limits = config.scheduler
    rows = limits.max_num_seqs * max(asked.width, asked.num_speculative_tokens + 1)
    head.make_room(max(rows, min(READ_AT_ONCE, limits.max_num_batched_tokens)))
    kept = keep_states(config, target, found.spec.states)
    ids = found.ids
    if head.head is None and reduced is not None:
        ids = reduced.kept.astype("int64")
    scratch = scratch_blocks(
        limits.max_num_seqs, asked.width, asked.num_speculative_tokens, config.cache.block_size
    )
    own = None if reduced is None else ReducedVocabulary(reduced)
    aside = limits.max_num_seqs * shelf_rows(config.cache.block_size, asked.num_speculative_tokens)
    shelf_bytes = aside * found.spec.width * head.dtype.itemsize
    layout = _layout(config, head, target.device)
    return OpenedEagle(head, kept, layout, own, ids, asked, scratch, shelf_bytes, target.device)


def _head(found: EagleCheckpoint, config: EngineConfig, target: Target) -> EagleHead:
    """The head with its weights, in the target's dtype or quantized."""
    asked, decoder = config.speculative, target.loaded.model
    assert asked is not None  # the caller looked
    if asked.quantization is not None and decoder.dtype is not torch.bfloat16:
        raise ConfigError(
            f"quantization={asked.quantization!r} of a head computes in bfloat16, but its target "
            "runs in float32, whose states it reads. Leave it out, or load the target with "
            "dtype='bfloat16'."
        )
    kind = FusingHead if found.spec.fuses else FeatureHead
    formats = formats_of(asked.quantization, decoder.dtype).stored_as(target.storage(config))
    head = kind(found.spec, decoder, formats, target.loaded.max_model_len)
    found.fill(head)
    return head.eval()


def _layout(config: EngineConfig, head: EagleHead, device: Device) -> PagedLayout:
    """The target's blocks; quantized as the target's where the head's dtype allows it."""
    stored = config.cache.kv_cache_dtype
    if stored not in ("int8", "fp8", "fp8_e4m3", "int4") or head.dtype is not torch.bfloat16:
        stored = "auto"
    return device.layout([head.spec.layer], kv_dtype(stored, head.dtype), config.cache.block_size)
