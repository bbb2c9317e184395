"""The modules that every model is made of."""

from penstock.nn.decoder import Decoder
from penstock.nn.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)

__all__ = [
    "AttentionSpec",
    "Decoder",
    "DecoderSpec",
    "LayerSpec",
    "MlpSpec",
    "NormSpec",
    "RopeSpec",
]
