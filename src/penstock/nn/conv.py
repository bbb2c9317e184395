"""A short convolution where other layers have attention: `ops.short_conv` has the formula."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.nn.parameters import Loadable, as_float32, plain
from penstock.nn.spec import AttentionSpec
from penstock.quant import Codes, WeightFormat
from penstock.step import LayerCache, Step


class Convolution(Loadable):
    """Weights of each channel's latest inputs, [C, 1, W] in a checkpoint: kept as [W, C]."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.channels = channels
        self.width = width
        self.has_bias = bias

    def expected(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.channels, 1, self.width)}
        return shapes | ({"bias": (self.channels,)} if self.has_bias else {})

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        values = plain(tensor)
        self.own(name, as_float32(values[:, 0].t() if name == "weight" else values))


def on_cpu(formats: Mapping[str, WeightFormat]) -> None:
    """Raises UnsupportedModelError for a layer with states whose matrices lie as a GPU's do."""
    if formats["out"].storage.name != "panels":
        raise UnsupportedModelError(
            "Layers with states in place of keys and values are built for CPUs only: choose "
            "device='cpu'."
        )


class ConvAttention(nn.Module):
    """norm, one projection → gate, convolution, gate; `out` is the caller's last step.

    `mixed` makes the first gate, the second, and what goes through them.
    """

    def __init__(
        self, hidden: int, spec: AttentionSpec, formats: Mapping[str, WeightFormat]
    ) -> None:
        super().__init__()
        assert spec.conv is not None
        on_cpu(formats)
        columns = sum(spec.qkv_columns) + spec.out_dim
        self.spec = spec
        self.mixed = Linear(hidden, columns, spec.qkv_bias, formats["mixed"])
        self.conv = Convolution(spec.conv.dim, spec.conv.width, spec.conv.bias)
        self.out = Linear(spec.out_dim, hidden, spec.out_bias, formats["out"])

    def forward(self, x: Tensor, before: Norm | None, step: Step, cache: LayerCache) -> Tensor:
        """x [T, D] → [T, `out_dim`], for `out`; writes inputs."""
        _, inputs = cache
        return ops.short_conv(
            self.mixed(x, before, step.adapters),
            self.conv.parameter("weight"),
            self.conv.parameter("bias") if self.conv.has_bias else None,
            step.query_start,
            step.context_len,
            step.states,
            step.kept,
            inputs,
        )
