"""Medusa heads beside their target: loaded, found to fit, made ready to guess."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.cache import PagedLayout
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.hardware import Compute
from penstock.models.heads.kinds import method_of
from penstock.models.heads.medusa import FILES, open_medusa_checkpoint
from penstock.models.heads.source import Ids
from penstock.nn import KeptStates
from penstock.nn.linear import Linear
from penstock.nn.medusa import MedusaHeads
from penstock.quant import formats_of
from penstock.roofline import Cost
from penstock.runtime.beside import Target, bytes_of, guessing_folder, keep_states
from penstock.runtime.companion import CompanionCache
from penstock.runtime.device import Device
from penstock.runtime.heads import HeadsRunner
from penstock.speculate.draft_loop import DraftLimits
from penstock.speculate.medusa import MedusaProposer, TreeLimits

MOST_ROWS = 32
"""Sequences that one pass guesses for: logits of all heads are kept, float32. More take more."""


@dataclass(frozen=True, slots=True)
class Medusa:
    """Loaded heads; opened and placed are the same, as they have no cache."""

    heads: MedusaHeads
    format: str  # of their weights
    kept: KeptStates
    ids: Ids | None  # what the columns of their logits stand for
    asked: SpeculativeConfig
    device: Device
    runner: HeadsRunner | None = None  # once they are placed

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return ()

    @property
    def companions(self) -> tuple[CompanionCache, ...]:
        return ()

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.heads)

    @property
    def later_bytes(self) -> int:
        """Of stores and logits, which are committed as they are first used."""
        heads, spec = self.heads, self.heads.spec
        rows = len(heads.features) * (1 if heads.shared is None else spec.num_heads)
        given = heads.logits if heads.shared is None else heads.states
        last = rows * spec.num_rows * torch.float32.itemsize  # what the program ends with
        if self.device.is_gpu:
            return last  # the others are taken already
        return self.kept.store.nbytes + heads.features.nbytes + given.nbytes + last

    def cost(self, rows: int) -> Cost:
        """Of guessing for so many sequences at once: all matrices are read, in one pass."""
        if not rows:
            return Cost(0, 0, {})
        nbytes, products = 0, dict[Compute, int]()
        for matrix, each in self.heads.matrices():
            stored, n, k = matrix.weight_format, matrix.out_features, matrix.in_features
            nbytes += stored.nbytes(n, k)
            products[stored.compute] = products.get(stored.compute, 0) + 2 * n * k * each * rows
        return Cost(nbytes, 0, products)

    def described(self, num_blocks: int) -> str:
        count = self.heads.spec.num_heads
        return (
            f"; guesses by {count} Medusa head{'s' * (count > 1)}, {self.format} "
            f"({self.weight_bytes / (1 << 20):.1f} MiB)"
        )

    def place(self, num_blocks: int, eager: bool) -> Medusa:
        width = self.asked.width
        return replace(self, runner=HeadsRunner(self.heads, self.device, eager, width))

    def proposer(self, asked: SpeculativeConfig, limits: DraftLimits) -> MedusaProposer:
        assert self.runner is not None  # placed
        depth, held = asked.num_speculative_tokens, self.heads.spec.num_heads
        assert depth is not None  # settled
        if depth > held:
            raise ConfigError(
                f"num_speculative_tokens={depth}, but the runtime was loaded with {held} Medusa "
                "heads. Load it with this speculative_config."
            )
        tree = TreeLimits(depth, asked.width, asked.most_tokens)
        return MedusaProposer(self.runner, self.kept.store, tree, self.ids)


def open_medusa(config: EngineConfig, target: Target) -> Medusa:
    """The heads that `config` asks for. Raises ConfigError for heads of another model."""
    asked = config.speculative
    assert asked is not None  # the caller looked
    decoder = target.loaded.model
    if asked.quantization is not None and decoder.dtype is not torch.bfloat16:
        raise ConfigError(
            f"quantization={asked.quantization!r} of Medusa heads goes with a target that computes "
            "in bfloat16, and this one computes in float32. Leave one of the two out."
        )
    folder = guessing_folder(asked, target, also=FILES)
    method = method_of(folder)
    if method not in ("medusa", None):
        raise ConfigError(f"{folder} holds an EAGLE head, not Medusa's: set method={method!r}.")
    reduced = None if target.vocabulary is None else target.vocabulary.map
    found = open_medusa_checkpoint(folder, decoder.spec.hidden, decoder.spec.vocab_size, reduced)
    spec = found.of(asked.num_speculative_tokens or found.spec.num_heads)
    where, head = target.device.torch, decoder.head
    formats = formats_of(asked.quantization, decoder.dtype).stored_as(target.storage(config))
    copies = spec.projection == "target" and asked.quantization is not None
    spec = replace(spec, projection="one") if copies else spec
    rows = min(config.scheduler.max_num_seqs, MOST_ROWS)
    heads = MedusaHeads(spec, decoder.norm, head, formats, decoder.dtype, rows, where)
    found.fill(heads)
    if copies:  # of the target's own head, which stays as it is
        stored = head.weight_format.unpack(head.packed, head.out_features, head.in_features)
        [projection] = heads.projections
        assert isinstance(projection, Linear)
        projection.load("weight", stored)
    heads.to(where)
    kept = keep_states(config, target, (len(decoder.spec.layers),))
    filled = replace(asked, num_speculative_tokens=spec.num_heads)
    return Medusa(heads.eval(), formats.name, kept, found.ids, filled, target.device)
