"""Decoders that the roofline's tests count by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.cache import StateLayout
from penstock.nn import (
    AttentionSpec,
    DecoderSpec,
    DeltaSpec,
    ExpertsSpec,
    InputsSpec,
    LatentSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)
from penstock.nn.decoder import has_states
from penstock.quant import Dense, WeightFormats
from penstock.roofline import CostModel
from penstock.runtime.device import CPU

BF16 = WeightFormats(Dense(torch.bfloat16), Dense(torch.bfloat16))


def qwen(window: int = 0) -> DecoderSpec:
    """Qwen2.5-0.5B's shape: 494,032,768 parameters, of which norms and biases are few."""
    attention = AttentionSpec(14, 2, 64, 0.125, RopeSpec(1e6, 64), qkv_bias=True, window=window)
    layer = LayerSpec(attention, MlpSpec(4864))
    return DecoderSpec(151936, 896, (layer,) * 24, NormSpec(), 32768, tied=True)


def mixed() -> DecoderSpec:
    """Every term at once: windows in turn, an untied head, positions, all the norms."""
    plain = AttentionSpec(4, 2, 32, 1.0, RopeSpec(1e4, 16), qk_norm="head")
    layers = (
        LayerSpec(replace(plain, window=6), MlpSpec(96, "gelu_tanh"), post_norm=True),
        LayerSpec(plain, MlpSpec(64, "gelu", gated=False)),
        LayerSpec(replace(plain, qk_norm="full", rope=None, window=9), MlpSpec(96)),
    )
    return DecoderSpec(
        512, 64, layers, NormSpec(), 128, embed_scale=8.0, learned_positions=128, final_softcap=30.0
    )


def costs(
    spec: DecoderSpec, formats: WeightFormats = BF16, dtype: torch.dtype = torch.bfloat16
) -> CostModel:
    layout = CPU.layout(spec.layers, dtype, 32)
    if has_states(spec.layers):
        shapes = tuple(layer.attention.state_shapes for layer in spec.layers)
        layout = replace(layout, states=StateLayout(shapes, dtype, 8))
    return CostModel(spec, formats, layout, dtype)


def of_experts() -> DecoderSpec:
    """Qwen3-30B-A3B's layer, and a dense one: 4,096 and 512 rows of q and of kv, 128 experts."""
    attention = AttentionSpec(32, 4, 128, 128**-0.5, RopeSpec(1e6, 128), qk_norm="head")
    many = MlpSpec(768, experts=ExpertsSpec(128, 8, normalize=True))
    layers = (LayerSpec(attention, many), LayerSpec(attention, MlpSpec(6144)))
    return DecoderSpec(151936, 2048, (*layers, layers[0]), NormSpec(), 40960)


def of_latents() -> DecoderSpec:
    """DeepSeek-V2-Lite's layer, one without experts, and one whose queries are compressed."""
    rope = RopeSpec(1e4, 64, interleaved=True)
    plain = AttentionSpec(16, 16, 192, 192**-0.5, rope, latent=LatentSpec(512, 128))
    tight = replace(plain, latent=LatentSpec(512, 128, query_rank=1536))
    many = MlpSpec(1408, experts=ExpertsSpec(64, 6, normalize=False, shared=2816))
    layers = LayerSpec(plain, MlpSpec(10944)), LayerSpec(plain, many), LayerSpec(tight, many)
    return DecoderSpec(102400, 2048, layers, NormSpec(), 163840)


def of_inputs() -> DecoderSpec:
    """Gemma 4 E2B's: 15 layers that write keys and values, 20 that read those of the 14th, 15th."""
    slides = AttentionSpec(
        8, 1, 256, 1.0, RopeSpec(1e4, 256), qk_norm="head", window=512, value_norm=True
    )
    whole = replace(slides, head_dim=512, rope=RopeSpec(1e6, 512), window=0)
    kinds, layers = ([slides] * 4 + [whole]) * 7, []
    for i, kind in enumerate(kinds):
        reads = None if i < 15 else 14 if kind is whole else 13
        mlp = MlpSpec(6144 if i < 15 else 12_288, "gelu_tanh")
        attention = replace(kind, reads=reads)
        layers.append(LayerSpec(attention, mlp, post_norm=True, input_dim=256, scalar=True))
    return DecoderSpec(
        262_144, 1536, tuple(layers), NormSpec(), 131_072, tied=True, embed_scale=39.25,
        final_softcap=30.0, inputs=InputsSpec(256, 262_144),
    )  # fmt: skip


def of_mamba() -> DecoderSpec:
    """Granite 4.0 H 1B's: 36 layers of Mamba 2, and 4 that attend."""
    mamba = AttentionSpec(48, 1, 128, 1.0, None, mamba=MambaSpec(64, 4, 1e-5))
    attends = AttentionSpec(12, 4, 128, 128**-1.0, None)
    mlp = MlpSpec(4096)
    layers = (LayerSpec(mamba, mlp),) * 9 + (LayerSpec(attends, mlp),)
    return DecoderSpec(100352, 1536, layers * 4, NormSpec(eps=1e-5), 131072, tied=True)


def of_states() -> DecoderSpec:
    """Qwen3.5-0.8B's: 18 gated delta rules, and 6 layers of gated attention."""
    delta = AttentionSpec(16, 16, 128, 128**-0.5, None, delta=DeltaSpec(128, 4))
    rope = RopeSpec(1e7, 64)
    attends = AttentionSpec(8, 2, 256, 256**-0.5, rope, qk_norm="head", gated=True)
    mlp = MlpSpec(3584)
    layers = (LayerSpec(delta, mlp),) * 3 + (LayerSpec(attends, mlp),)
    return DecoderSpec(248320, 1024, layers * 6, NormSpec(offset=1.0), 262144, tied=True)
