"""The feed-forward block, and how a block's last product gets into the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from penstock import ops
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm, Scale
from penstock.nn.spec import MlpSpec
from penstock.parallel import Part, Ranks
from penstock.quant import WeightFormat


def add_product(
    residual: Tensor,
    linear: Linear,
    x: Tensor,
    post_norm: Norm | Scale | None,
    adapters: Tensor | None,
) -> None:
    """residual += linear(x), normed or scaled before where that comes after the block."""
    if post_norm is None:
        linear.add_(residual, x, adapters)
    else:
        ops.add_(residual, post_norm(linear(x, None, adapters)))


class Mlp(nn.Module):
    """Feed-forward block: norm, up and activation in one operator; `down` is the last step.

    `up` holds gate and up in one matrix when gated. ranks: share the columns of both.
    """

    def __init__(
        self,
        hidden: int,
        spec: MlpSpec,
        up: WeightFormat,
        down: WeightFormat,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        up_part = down_part = None
        if ranks is not None:
            up_part = Part.of(ranks.split(spec.intermediate))
            down_part = Part.of(ranks.split(hidden))
        self.up = Linear(
            hidden,
            spec.intermediate,
            spec.bias,
            up,
            activation="none" if spec.row_operator else spec.activation,
            gated=spec.gated,
            part=up_part,
        )
        inner = spec.intermediate
        if spec.row_operator:
            inner = ops.row_operator(spec.row_operator).columns(inner)
        self.down = Linear(inner, hidden, spec.bias, down, part=down_part)

    def begin(self, residual: Tensor, norm: Norm | None, adapters: Tensor | None) -> Tensor:
        """All but the last product: [T, intermediate]."""
        h: Tensor = self.up(residual, norm, adapters)
        if self.spec.row_operator:
            return ops.foreign_rows(h, self.spec.row_operator, self.down.in_features)
        return h

    def end_(
        self, residual: Tensor, h: Tensor, post_norm: Norm | Scale | None, adapters: Tensor | None
    ) -> None:
        """residual += the last product of h, in place."""
        add_product(residual, self.down, h, post_norm, adapters)
