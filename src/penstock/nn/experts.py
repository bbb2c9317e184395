"""A feed-forward block of experts, of which a router chooses a few for each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.errors import UnsupportedModelError, WeightsError
from penstock.nn.linear import Linear
from penstock.nn.mlp import Mlp
from penstock.nn.norm import Norm, Scale
from penstock.nn.parameters import Loadable, Packing, Vector, as_float32, room_for
from penstock.nn.spec import ExpertsSpec, MlpSpec, NormSpec
from penstock.ops import ACTIVATIONS
from penstock.parallel import Part, Ranks
from penstock.quant import Codes, Dense, Packed, WeightFormat
from penstock.quant.formats.quantized import Quantized

_Part = Tensor | None
_Tensors = tuple[Tensor, _Part, _Part, _Part, _Part, _Part]


class Expert(Loadable):
    """One expert's matrix: it goes into its bank, and nothing of it stays here."""

    def __init__(self, bank: ExpertBank, number: int) -> None:
        super().__init__()
        self._bank = [bank]  # in a list: it is this module's parent
        self.number = number

    def expected(self) -> dict[str, tuple[int, ...]]:
        return self._bank[0].whole()

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        bank = self._bank[0]
        tensor = bank.own_rows(name, tensor)
        if name == "bias":
            bank.put_bias(self.number, as_float32(tensor))
        elif isinstance(tensor, Codes):
            bank.put(self.number, bank.weight_format.pack_codes(tensor, bank.gated))
        else:
            bank.put(self.number, bank.weight_format.pack(tensor, bank.gated))

    @property
    def nbytes(self) -> int:
        return 0  # its bank's

    @property
    def keeper(self) -> Loadable:
        return self._bank[0]


class ExpertBank(Packing):
    """One matrix of each expert, [E, …] of a format's tensors; its children name them one by one.

    gated: each is gate above up, [2·N, K]. Where ranks share it, part: the rows of each that this
    one has; own: the experts that it has, or all.
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        out_features: int,
        bias: bool,
        weight_format: WeightFormat,
        *,
        gated: bool = False,
        part: Part | None = None,
        own: range | None = None,
    ) -> None:
        super().__init__()
        self.own_experts = range(count) if own is None else own
        self.count = len(self.own_experts)
        self.in_features = in_features
        self.out_features = out_features if part is None else part.size
        self.part = part
        self.has_bias = bias
        self.weight_format = weight_format
        self.gated = gated
        self._there: set[int | str] = set()  # experts' numbers, and their biases'
        for number in range(count):
            expert = Expert(self, number)
            expert.elsewhere = number not in self.own_experts
            self.add_module(str(number), expert)

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {}  # of its children

    @property
    def nbytes(self) -> int:
        return self.count * super().nbytes

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        raise WeightsError(f"A bank of experts takes them one by one, not {name!r}.")

    @property
    def is_complete(self) -> bool:
        return len(self._there) == self.count * (2 if self.has_bias else 1)

    def put(self, number: int, packed: Packed) -> None:
        """Take one expert's matrix as it is stored.

        Raises WeightsError where it has other parts than those that are there.
        """
        if self.packed and self.packed.keys() != packed.keys():
            raise WeightsError(
                f"Expert {number} is stored as {', '.join(packed)}, others as "
                f"{', '.join(self.packed)}: a layer's experts must be quantized alike."
            )
        for part, stored in packed.items():
            bank = self.packed.get(part)
            if bank is None:
                bank = room_for((self.count, *stored.shape), stored)
            elif stored.dtype is torch.float32 and bank.dtype is torch.float16:
                bank = bank.float()  # scales that float16 holds, but for this one's
            if part not in self.packed or bank is not self.packed[part]:
                self.own(part, bank)
                self.packed[part] = self.parameter(part)
            self.packed[part][number - self.own_experts.start] = stored
        self._there.add(number)

    def put_bias(self, number: int, bias: Tensor) -> None:
        """Take one expert's bias, float32."""
        if self._parameters["bias"] is None:
            self.own("bias", bias.new_empty((self.count, *bias.shape)))
        self.parameter("bias")[number - self.own_experts.start] = bias
        self._there.add(f"bias {number}")

    @property
    def tensors(self) -> _Tensors:
        """As `ops.experts` takes them."""
        packed = self.packed
        more = (packed.get("scale"), packed.get("zero"), packed.get("outer"))
        return packed["weight"], *more, packed.get("input_scale"), self._parameters["bias"]


def _check_rows(part: str, held: WeightFormat) -> None:
    """Raises UnsupportedModelError for what no GPU's kernel multiplies: before a weight is read."""
    if held.storage.name != "rows" or isinstance(held, Dense):
        return
    scheme = held.scheme if isinstance(held, Quantized) else None
    plain = scheme is not None and scheme.bits == 8 and not held.row_codes and scheme.symmetric
    if scheme is None or not plain or scheme.group:
        raise UnsupportedModelError(
            f"Experts in {held.name} ({part}) aren't built for GPUs: those in bfloat16, w8a16 and "
            "fp8 by rows are. Choose quantization='w8a16', or device='cpu'."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Divided:
    """How ranks share a mixture; without ranks, nothing is said."""

    up: Part | None = None  # of each expert's matrices
    down: Part | None = None
    own: range | None = None  # experts
    arguments: dict[str, Any] = field(default_factory=dict)  # of `ops.experts`

    @classmethod
    def among(cls, ranks: Ranks | None, count: int, wide: int, hidden: int) -> _Divided:
        """count experts, from `hidden` to `wide` values and back."""
        if ranks is None:
            return cls()
        if ranks.whole_experts:
            share = ranks.split(count, 1)
            whole = {"meeting": ranks.meeting, "expert_bounds": share.ends, "rank": ranks.rank}
            return cls(own=share.own, arguments=whole)
        up, down = ranks.split(wide), ranks.split(hidden)
        columns = {
            "meeting": ranks.meeting, "up_bounds": up.ends, "down_bounds": down.ends,
            "rank": ranks.rank,
        }  # fmt: skip
        return cls(Part((up.own,), wide), Part((down.own,), hidden), arguments=columns)


class _Apart(nn.Module):
    """Norms of the stream for the router and the experts, and of what each of both blocks gives."""

    def __init__(self, hidden: int, norm: NormSpec) -> None:
        super().__init__()
        self.router = Norm(hidden, norm, hidden**-0.5)
        self.experts = Norm(hidden, norm)
        self.experts_post = Norm(hidden, norm)
        self.shared_post = Norm(hidden, norm)


class Experts(nn.Module):
    """down[e](act(gate[e]) · up[e]), or down[e](act(up[e])) where not gated, of the experts that a
    token's router chooses, weighed.

    shared: a block that every token goes through beside them, or takes a share of.
    """

    def __init__(
        self,
        hidden: int,
        spec: MlpSpec,
        experts: ExpertsSpec,
        up: WeightFormat,
        down: WeightFormat,
        dtype: torch.dtype,
        shared: Mlp | None = None,
        ranks: Ranks | None = None,
        norm: NormSpec | None = None,
        latent: tuple[WeightFormat, WeightFormat] | None = None,
    ) -> None:
        """dtype: of activations, and of the router, which no format rounds. ranks: share the
        columns of all experts' matrices, or the experts. norm: of those that are apart.
        latent: formats of the matrices to the values that experts read, and from those they give.
        """
        super().__init__()
        self.spec = spec
        self.experts = experts
        self.hidden = hidden
        for part, held in (("up", up), ("down", down)):
            _check_rows(part, held)
        own = Dense(dtype, up.storage)
        count, wide, biased = experts.count, spec.intermediate, spec.bias
        self.router = Linear(hidden, count, experts.router_bias, own, out_dtype=torch.float32)
        self.divided = _Divided.among(ranks, count, wide, hidden)
        by = self.divided
        self.narrow: Linear | None = None
        self.widen: Linear | None = None
        inner = experts.latent or hidden
        if latent is not None:
            self.narrow = Linear(hidden, inner, False, latent[0])
            self.widen = Linear(inner, hidden, False, latent[1])
        self.up = ExpertBank(
            count, inner, wide, biased, up, gated=spec.gated, part=by.up, own=by.own
        )
        self.down = ExpertBank(count, wide, inner, biased, down, part=by.down, own=by.own)
        self.correction = Vector(count) if experts.correction else None
        self.shared = shared
        self.shared_gate = Vector(hidden) if experts.shared_gate else None
        self.weighs = Vector(count) if experts.weighed else None
        self.norms: _Apart | None = None
        if experts.apart and norm is not None:
            self.norms = _Apart(hidden, norm)
        alone = experts.apart or experts.weighed or experts.latent
        if alone and up.storage.name != "panels":
            raise UnsupportedModelError(
                "Experts with norms or weights of their own, or in a narrower space, are built for "
                "CPUs only: choose device='cpu'."
            )

    def begin(self, residual: Tensor, norm: Norm | None, adapters: Tensor | None) -> Tensor:
        """All but the addition; adapters change what is shared, not experts."""
        if self.norms is not None:
            return self._begin_apart(self.norms, residual, norm, adapters)
        x = residual if norm is None else norm(residual)
        y: Tensor
        if self.narrow is not None and self.widen is not None:
            y = self.widen(self(self.narrow(x, None, adapters), x), None, adapters)
        else:
            y = self(x)
        if self.shared is not None:
            h = self.shared.begin(x, None, adapters)
            if self.shared_gate is not None:
                ops.gate_rows_(h, x, self.shared_gate.parameter("weight"))
            self.shared.end_(y, h, None, adapters)
        return y

    def _begin_apart(
        self, norms: _Apart, residual: Tensor, norm: Norm | None, adapters: Tensor | None
    ) -> Tensor:
        """The same of a block each of whose parts reads the stream; norm: of what is shared."""
        y: Tensor = norms.experts_post(self(norms.experts(residual), norms.router(residual)))
        if self.shared is not None:
            h = self.shared.begin(residual, norm, adapters)
            self.shared.end_(y, h, norms.shared_post, adapters)
        return y

    def end_(
        self, residual: Tensor, y: Tensor, post_norm: Norm | Scale | None, adapters: Tensor | None
    ) -> None:
        """residual += y, in place."""
        ops.add_(residual, y if post_norm is None else post_norm(y))

    def forward(self, x: Tensor, asked: Tensor | None = None) -> Tensor:
        """x [T, D] → [T, D], of those that are chosen; asked: what the router reads instead."""
        return ops.experts(
            x,
            self.router.packed["weight"],
            self.router._parameters["bias"],
            *self.up.tensors,
            *self.down.tensors,
            self.experts.per_token,
            self.experts.normalize,
            self.up.out_features,
            self.down.out_features,
            ACTIVATIONS.index(self.spec.activation),
            self.up.weight_format.row_codes,
            self.up.weight_format.levels,
            self.down.weight_format.row_codes,
            self.down.weight_format.levels,
            None if self.correction is None else self.correction.parameter("weight"),
            self.experts.sigmoid,
            self.experts.groups,
            self.experts.top_groups,
            self.experts.scale,
            **self.divided.arguments,
            eps=self.experts.eps,
            gated=self.spec.gated,
            asked=asked,
            each=None if self.weighs is None else self.weighs.parameter("weight"),
        )
