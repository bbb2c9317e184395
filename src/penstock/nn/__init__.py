"""The modules that every model is made of."""

from penstock import kernels as _kernels  # the native library registers its operators
from penstock.nn.decoder import Decoder, KeptStates
from penstock.nn.spec import (
    AttentionSpec,
    ConvSpec,
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

__all__ = [
    "AttentionSpec",
    "ConvSpec",
    "Decoder",
    "DecoderSpec",
    "DeltaSpec",
    "ExpertsSpec",
    "InputsSpec",
    "KeptStates",
    "LatentSpec",
    "LayerSpec",
    "MambaSpec",
    "MlpSpec",
    "NormSpec",
    "RopeSpec",
]

del _kernels
