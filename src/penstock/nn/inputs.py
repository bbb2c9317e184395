"""What each layer has of a token beside the residual stream (per-layer embeddings).

A table has a row of each token for all layers together; a product of the embedding, normed layer by
layer, is added to it. A layer multiplies by its part what a small matrix makes of the stream.
Source: Gemma 3n's and Gemma 4's model cards, and transformers' `gemma4`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.nn.linear import Embedding, Linear
from penstock.nn.mlp import add_product
from penstock.nn.norm import Norm
from penstock.nn.spec import DecoderSpec, InputsSpec, LayerSpec, NormSpec
from penstock.quant import Dense, Storage, WeightFormat

_HALF = math.sqrt(0.5)
"""Of each of the two that are added."""


class LayerInputs(nn.Module):
    """`forward(tokens, embedded)` → the inputs of all layers, side by side, [T, layers · dim]."""

    def __init__(
        self,
        hidden: int,
        layers: int,
        spec: InputsSpec,
        norm: NormSpec,
        dtype: torch.dtype,
        storage: Storage,
    ) -> None:
        """dtype: of the table and the matrix, which no format rounds."""
        super().__init__()
        if storage.name != "panels":
            raise UnsupportedModelError(
                "Inputs of layers (per-layer embeddings) are built for CPUs only: choose "
                "device='cpu'."
            )
        wide = layers * spec.dim
        scale = torch.tensor(spec.dim**0.5, dtype=dtype).item()  # as the embedding's is rounded
        self.table = Embedding(spec.vocab_size, wide, dtype, scale * _HALF)
        self.projection = Linear(hidden, wide, False, Dense(dtype, storage))
        # of a product that is divided by the root of `hidden`: the same but for epsilon
        self.norm = Norm(spec.dim, replace(norm, eps=norm.eps * hidden), _HALF)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        inputs: Tensor = self.norm(self.projection(embedded))
        ops.add_(inputs, self.table(tokens))
        return inputs


def layer_inputs(spec: DecoderSpec, dtype: torch.dtype, storage: Storage) -> LayerInputs | None:
    """What makes a decoder's layers their inputs; None: they have none."""
    if spec.inputs is None:
        return None
    return LayerInputs(spec.hidden, len(spec.layers), spec.inputs, spec.norm, dtype, storage)


class OwnInput(nn.Module):
    """residual += norm(out(act(gate(residual)) · input)), in place, of one layer's input."""

    def __init__(
        self,
        hidden: int,
        spec: LayerSpec,
        norm: NormSpec,
        formats: Mapping[str, WeightFormat],
        number: int,
    ) -> None:
        """number: the layer's, by which its input is found."""
        super().__init__()
        dim = spec.input_dim
        self.first = number * dim
        self.gate = Linear(
            hidden, dim, False, formats["input_gate"], activation=spec.mlp.activation
        )
        self.out = Linear(dim, hidden, False, formats["input_out"])
        self.norm = Norm(hidden, norm)

    def forward(self, residual: Tensor, inputs: Tensor, adapters: Tensor | None) -> None:
        """residual [T, D]; inputs of all layers."""
        h = self.gate(residual, None, adapters)
        ops.multiply_(h, inputs, self.first)
        add_product(residual, self.out, h, self.norm, adapters)
