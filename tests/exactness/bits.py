"""A small decoder with exactly reproducible weights, and ways to run it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from penstock.cache import RecentBlocks, StateLayout, kv_dtype
from penstock.nn import (
    AttentionSpec,
    ConvSpec,
    Decoder,
    DecoderSpec,
    DeltaSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)
from penstock.nn.decoder import has_states
from penstock.nn.linear import Linear
from penstock.nn.parameters import Loadable
from penstock.nn.spec import NO_ATTENTION, NO_MLP
from penstock.quant import Codes, WeightFormats, format_of, formats_of, parse_scheme
from penstock.quant.formats.quantized import Quantized
from penstock.quant.methods.rtn import quantize
from penstock.quant.names import head_scheme
from penstock.runtime import Forward, Program
from penstock.runtime.device import CPU
from penstock.step import StatefulStep, Step

BLOCK = 32
WINDOW = 48
"""Tokens that a `kivi` cache keeps as they are: few, so that most of a prompt is coded."""
INPUT_SCALE = 0.03125
"""Of static activations."""


def integers(count: int, seed: int) -> np.ndarray:
    """SplitMix64: the same on every machine (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(shape: tuple[int, ...], scale: float, seed: int) -> Tensor:
    """Uniform in ±scale, from integers by exact operations."""
    n = int(np.prod(shape))
    values = (integers(n, seed) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1
    return torch.from_numpy(values * np.float32(scale)).reshape(shape)


MIXED = " of experts"
"""Ends the name of a form whose feed-forward blocks are mixtures."""
LATENT = " over latents"
"""… of one that attends over latents."""
RANKED = " of low rank"
"""… of one that keeps keys and values in fewer dimensions than their heads have."""
STATED = " with states"
"""… of one whose layers have states in place of keys and values, but for one."""
CONVOLVED = " of convolutions"
"""… of one whose layers have short convolutions in that place, but for one."""
SCANNED = " of Mamba"
"""… of one whose layers have Mamba 2 in that place, but for one."""
BESIDE = " of Mamba beside attention"
"""… of one whose layers have both, which read the same."""
SLOTS = 600
"""For states."""


def mixed_spec() -> DecoderSpec:
    """`decoder_spec` with experts, of which a few have most tokens; one layer stays dense."""
    spec = decoder_spec()
    many = MlpSpec(96, experts=ExpertsSpec(11, 4, normalize=True))
    few = MlpSpec(160, "gelu_tanh", experts=ExpertsSpec(3, 2, normalize=False))
    first, second, third = spec.layers
    layers = replace(first, mlp=many), replace(second, mlp=few), third
    return replace(spec, layers=layers)


def latent_spec() -> DecoderSpec:
    """`decoder_spec` with attention over latents, and experts in groups beside a shared one."""
    rope = RopeSpec(10000.0, 32, interleaved=True)
    wide = AttentionSpec(6, 6, 80, 80**-0.5, rope, latent=LatentSpec(96, 48, query_rank=64))
    plain = replace(wide, latent=LatentSpec(40, 56), rope=replace(rope, interleaved=False))
    many = ExpertsSpec(
        12, 3, normalize=True, sigmoid=True, correction=True, groups=4, top_groups=2, scale=1.5,
        shared=96,
    )  # fmt: skip
    few = ExpertsSpec(8, 2, normalize=False, groups=2, top_groups=1, scale=2.0)
    layers = (
        LayerSpec(wide, MlpSpec(352)),
        LayerSpec(plain, MlpSpec(96, experts=many)),
        LayerSpec(wide, MlpSpec(160, experts=few)),
    )
    return replace(decoder_spec(), layers=layers)


def ranked_spec() -> DecoderSpec:
    """`decoder_spec` with layers of different ranks, one of them the heads' dimensions."""
    layers = [
        replace(layer, attention=replace(layer.attention, kv_rank=rank))
        for layer, rank in zip(decoder_spec().layers, (48, 16, 64), strict=True)
    ]
    return replace(decoder_spec(), layers=tuple(layers))


def stated_spec() -> DecoderSpec:
    """`decoder_spec` with gated delta rules around attention that has a gate."""
    first, second, third = decoder_spec().layers
    narrow = AttentionSpec(6, 3, 48, 48**-0.5, None, delta=DeltaSpec(80, 4))
    wide = AttentionSpec(4, 4, 64, 64**-0.5, None, delta=DeltaSpec(32, 2))
    layers = (
        replace(first, attention=narrow),
        replace(second, attention=replace(first.attention, gated=True)),
        replace(third, attention=wide),
    )
    return replace(decoder_spec(), layers=layers)


def convolved_spec() -> DecoderSpec:
    """`decoder_spec` with short convolutions around attention, one with biases."""
    first, second, third = decoder_spec().layers
    biased = AttentionSpec(
        1, 1, 224, 1.0, None, qkv_bias=True, out_bias=True, conv=ConvSpec(224, 3, bias=True)
    )
    wide = AttentionSpec(1, 1, 224, 1.0, None, conv=ConvSpec(224, 9))
    layers = (
        replace(first, attention=biased),
        replace(second, attention=first.attention),
        replace(third, attention=wide),
    )
    return replace(decoder_spec(), layers=layers)


def scanned_spec() -> DecoderSpec:
    """`decoder_spec` with Mamba 2 around attention: one group and many, with biases and without."""
    first, second, third = decoder_spec().layers
    biased = AttentionSpec(
        10, 1, 48, 1.0, None, qkv_bias=True, out_bias=True, mamba=MambaSpec(32, 4, 1e-5)
    )
    wide = AttentionSpec(6, 3, 32, 1.0, None, mamba=MambaSpec(80, 2, 1e-5, conv_bias=False))
    layers = (
        replace(first, attention=biased),
        replace(second, attention=first.attention),
        replace(third, attention=wide),
    )
    return replace(decoder_spec(), layers=layers)


def beside_spec() -> DecoderSpec:
    """`decoder_spec` with Mamba 2 beside attention: with a norm and without, steps of their own;
    and a layer without attention.
    """
    first, second, third = decoder_spec().layers
    plain = MambaSpec(32, 4, 1e-5, normed=False, own_steps=True, out_scale=0.7)
    alone = AttentionSpec(10, 1, 48, 1.0, None, mamba=plain)
    normed = AttentionSpec(6, 3, 32, 1.0, None, mamba=MambaSpec(80, 2, 1e-5, out_scale=1.5))
    layers = (
        LayerSpec(NO_ATTENTION, MlpSpec(352, "gelu", gated=False)),
        LayerSpec(alone, NO_MLP, waits=True),
        first,
        LayerSpec(normed, NO_MLP, post_norm=True, waits=True),
        second,
        third,
    )
    return replace(decoder_spec(), layers=layers)


def decoder_spec(layers: int = 3) -> DecoderSpec:
    """Every feature that changes the order of additions: GQA, window, soft cap, norms, biases."""
    rope = RopeSpec(10000.0, 64)
    wide = AttentionSpec(6, 2, 64, 64**-0.5, rope, qkv_bias=True, qk_norm="head")
    local = AttentionSpec(6, 2, 64, 64**-0.5, rope, window=50, softcap=30.0, sinks=True)
    mlp = MlpSpec(352)
    kinds = (
        LayerSpec(wide, mlp),
        LayerSpec(local, MlpSpec(352, "gelu_tanh"), post_norm=True),
        LayerSpec(wide, MlpSpec(352, "gelu", bias=True)),
    )
    return DecoderSpec(
        vocab_size=517,
        hidden=224,
        layers=tuple(kinds[i % 3] for i in range(layers)),
        norm=NormSpec(eps=1e-6),
        max_position=2048,
        tied=True,
        final_softcap=25.0,
    )


def _loaded(module: Loadable, values: Tensor) -> Tensor | Codes:
    """What a checkpoint holds: codes where activations have a calibrated scale."""
    stored = module.weight_format if isinstance(module, Linear) and values.dim() == 2 else None
    if isinstance(stored, Quantized) and stored.scheme.static:
        return quantize(values, stored.scheme, INPUT_SCALE)
    return values


def fill(model: Decoder) -> Decoder:
    """Give every parameter its reproducible values."""
    seed = 1
    for module in model.modules():
        if isinstance(module, Loadable):
            for name, shape in module.expected().items():
                scale = 1.7 / shape[-1] ** 0.5 if len(shape) > 1 else 0.5
                module.load(name, _loaded(module, uniform(shape, scale, seed) + (len(shape) == 1)))
                seed += 1
    return model


def build(dtype: torch.dtype = torch.bfloat16, quantization: str | None = None) -> Decoder:
    kinds = {MIXED: mixed_spec, LATENT: latent_spec, RANKED: ranked_spec, STATED: stated_spec}
    kinds |= {CONVOLVED: convolved_spec, SCANNED: scanned_spec, BESIDE: beside_spec}
    for ending, spec in kinds.items():
        if quantization is not None and quantization.endswith(ending):
            name = quantization.removesuffix(ending)
            formats = formats_of(None if name == "bfloat16" else name, dtype)
            return fill(Decoder(spec(), formats, dtype))
    if quantization is None or not quantization.endswith("-static"):
        return fill(Decoder(decoder_spec(), formats_of(quantization, dtype), dtype))
    scheme = parse_scheme(quantization)
    formats = WeightFormats(format_of(scheme), format_of(head_scheme(scheme)))
    return fill(Decoder(decoder_spec(), formats, dtype))


def prompt(length: int, seed: int, vocab: int = 517) -> list[int]:
    return (integers(length, seed) % np.uint64(vocab)).astype(int).tolist()


@dataclass
class Stream:
    """One sequence: its tokens, how many are in the cache, and its blocks."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0
    slot: int = -1  # of its state
    states: dict[int, int] = field(default_factory=dict)  # after so many tokens, of whole blocks


class Machine:
    """A decoder and a cache; runs batches of chunks and keeps nothing else.

    program: as one native call a step, instead of operator by operator.
    """

    def __init__(
        self, model: Decoder, blocks: int = 256, kv: str = "auto", program: bool = False
    ) -> None:
        window, layers = WINDOW if kv == "kivi" else 0, model.spec.layers
        layout = CPU.layout(layers, kv_dtype(kv, model.dtype), BLOCK)
        if window:
            layout = replace(layout, recent_window=window, max_recent_blocks=blocks)
        self.stated = has_states(layers)
        self.slots = list(range(SLOTS))
        if self.stated:
            shapes = tuple(layer.attention.state_shapes for layer in layers)
            layout = replace(layout, states=StateLayout(shapes, model.dtype, SLOTS))
        self.kv = layout.allocate(blocks)
        for layer in self.kv:  # NaN wherever nothing has been written
            for part in layer[:6]:
                part.view(torch.uint8).fill_(0xFF)
        self.recent = RecentBlocks(self.kv, window, BLOCK) if window else None
        self.forward: Forward = Program(model, self.kv) if program else model
        # handed out in a scrambled order, so that neighbours in a sequence aren't in memory
        self.free = [int(i) for i in np.argsort(integers(blocks, 99), kind="stable")]

    def stream(self, tokens: list[int], shared: Stream | None = None, hit: int = 0) -> Stream:
        """A new sequence; its first `hit` tokens are already in the blocks of `shared`."""
        need = -(-len(tokens) // BLOCK)
        blocks = [] if shared is None else shared.blocks[: hit // BLOCK]
        own = [self.free.pop() for _ in range(need - len(blocks))]
        slot = shared.states[hit] if shared is not None and self.stated else -1
        return Stream(tokens, blocks + own, hit, slot)

    def _stated(self, step: Step, chunks: list[tuple[Stream, int]]) -> Step:
        """With the states that streams go on from and leave: after whole blocks, and at the end."""
        states, kept, row = [], [], 0
        for stream, n in chunks:  # which are moved on already
            first, before = stream.done - n, stream.slot
            for end in sorted(
                {*range(-(-(first + 1) // BLOCK) * BLOCK, stream.done, BLOCK), stream.done}
            ):
                stream.slot = self.slots.pop()
                kept.append([row + end - first - 1, stream.slot])
                if end % BLOCK == 0:
                    stream.states[end] = stream.slot
            if before >= 0 and before not in stream.states.values():
                self.slots.insert(0, before)  # the last to be taken again: this step reads it
            states.append(before)
            row += n
        as_ints = (torch.tensor(x, dtype=torch.int32) for x in (states, kept))
        arrays = (getattr(step, one.name) for one in fields(Step))
        return StatefulStep(*arrays, *as_ints)

    def run(self, chunks: list[tuple[Stream, int]]) -> list[Tensor]:
        """One step: the next n tokens of each stream; logits [n, V] of each."""
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for stream, n in chunks:
            for at in range(stream.done, stream.done + n):
                tokens.append(stream.tokens[at])
                positions.append(at)
                slots.append(stream.blocks[at // BLOCK] * BLOCK + at % BLOCK)
            stream.done += n
            starts.append(len(tokens))
            lengths.append(stream.done)
        width = max(len(stream.blocks) for stream, _ in chunks)
        table = [s.blocks + [0] * (width - len(s.blocks)) for s, _ in chunks]

        def ints(x: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(x, dtype=torch.int32)

        step = Step(
            ints(tokens), ints(positions), ints(slots), ints(starts), ints(lengths), ints(table),
            torch.arange(len(tokens), dtype=torch.int32),
        )  # fmt: skip
        if self.stated:
            step = self._stated(step, chunks)
        if self.recent is not None:
            self.recent.enter(step)
        with torch.inference_mode():
            logits = self.forward(step, self.kv)
        if self.recent is not None:
            self.recent.leave(step)
        return list(logits.clone().split([n for _, n in chunks]))


def alone(model: Decoder, tokens: list[int], chunk: int | None = None, kv: str = "auto") -> Tensor:
    """Logits [T, V] of one sequence by itself, in chunks."""
    machine = Machine(model, kv=kv)
    stream = machine.stream(tokens)
    size = chunk or len(tokens)
    parts = []
    while stream.done < len(tokens):
        parts += machine.run([(stream, min(size, len(tokens) - stream.done))])
    return torch.cat(parts)


def digest(logits: Tensor) -> str:
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()
