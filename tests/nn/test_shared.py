"""What a model is to ranks that share its sequences: what a row costs, how long texts may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.errors import ConfigError
from penstock.nn.shared import check_shareable, row_worth
from penstock.nn.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
)
from penstock.ops.ranks import HEADER
from penstock.parallel import Ring
from penstock.runtime.team import PLACE_BYTES

SEEN = AttentionSpec(4, 2, 16, 0.25, None)
LATENT = AttentionSpec(16, 16, 192, 1.0, None, latent=LatentSpec(512, 128))


def decoder(*layers: LayerSpec) -> DecoderSpec:
    return DecoderSpec(300, 64, layers, NormSpec(), 1000)


def ring(place_bytes: int = PLACE_BYTES) -> Ring:
    return Ring(0, 2, torch.empty(HEADER + 2 * place_bytes, dtype=torch.uint8, device="meta"))


def test_what_a_row_is_worth() -> None:
    """Products of 64 by 128 + 64 for attention, and the block's; 2 · 64 for each position."""
    dense, narrow = LayerSpec(SEEN, MlpSpec(128)), LayerSpec(SEEN, MlpSpec(128, gated=False))
    assert row_worth(decoder(dense)) == 64 * (192 + 3 * 128) // 128 == 288
    assert row_worth(decoder(narrow)) == 64 * (192 + 2 * 128) // 128 == 224
    of_experts = MlpSpec(32, experts=ExpertsSpec(8, 2, normalize=True, shared=16))
    experts = LayerSpec(SEEN, of_experts)
    assert row_worth(decoder(experts)) == 64 * (192 + 3 * (2 * 32 + 16)) // 128 == 216
    assert row_worth(decoder(dense, experts)) == (288 + 216) // 2


def test_latents_pass_by_in_texts_of_any_length() -> None:
    """Of heads with as many values, rows have parts where ranks meet: 65,792 bytes a span."""
    latents = decoder(LayerSpec(LATENT, MlpSpec(128)))
    check_shareable(latents, ring(), 262_144)
    heads = LayerSpec(AttentionSpec(16, 16, 512, 1.0, None), MlpSpec(128))
    check_shareable(decoder(heads), ring(), 261_120)
    for spec in (decoder(heads), replace(latents, layers=(*latents.layers, heads))):
        with pytest.raises(ConfigError, match=r"have room for 261,120 of them, but .* 262,144"):
            check_shareable(spec, ring(), 262_144)
