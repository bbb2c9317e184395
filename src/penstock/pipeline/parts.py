"""A decoder's matrices as its checkpoint has them: which tensors, which rows."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError, WeightsError, listed
from penstock.models.checkpoint import Source
from penstock.models.finite import check_finite
from penstock.models.registry import spec_of
from penstock.models.spec import ModelSpec, Ones
from penstock.models.weights import plan_weights
from penstock.nn.decoder import has_latents, has_states, layer_matrices, stored_in
from penstock.quant import Codes, Scheme
from penstock.quant.scheme import GROUPS, Kind

Tensors = dict[str, Tensor]


def _modules(spec: ModelSpec) -> list[str]:
    """Every matrix of the layers."""
    layers = enumerate(spec.decoder.layers)
    return [f"layers.{i}.{m}" for i, layer in layers for m in layer_matrices(layer)]


@dataclass(frozen=True, slots=True)
class Parts:
    """Every parameter of a decoder, and the checkpoint's tensors it is made of, in order."""

    source: Source
    spec: ModelSpec
    names: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(source: Source) -> Parts:
        """Raises UnsupportedModelError where a matrix's values lie in another order.

        Raises ConfigError where something is quantized already.
        """
        spec = spec_of(source.config, str(source.path))
        quantized = [name for name in source.names() if source.scheme(name) is not None]
        if quantized:
            raise ConfigError(
                f"{len(quantized)} tensors of {source.path} are quantized already, the first "
                f"{quantized[0]}. Give the unquantized checkpoint."
            )
        plans, unknown = plan_weights(source.names(), spec)
        if unknown:
            raise WeightsError(
                f"{len(unknown)} tensors in {source.path} have no place in {spec.family!r}: "
                f"{listed(unknown)}."
            )
        matrices = {f"{module}.{of}" for module in _modules(spec) for of in ("weight", "bias")}
        moved = [t for t, p in plans.items() if t in matrices and p.rule.transform]
        if moved:
            raise UnsupportedModelError(
                f"{spec.family!r} checkpoints hold {len(moved)} matrices with their values in "
                "another order, or beside rows that no format rounds "
                f"({plans[moved[0]].parts[0]}), so codes can't be handed back to them. Models of "
                "this family are rounded as they are loaded: quantization='w8a8', 'w4a8'."
            )
        missing = [t for t, plan in plans.items() if None in plan.parts]
        if missing:
            raise WeightsError(f"{source.path} lacks a part of {listed(missing)}.")
        names = {t: tuple(p for p in plan.parts if p is not None) for t, plan in plans.items()}
        return Parts(source, spec, names)

    @property
    def num_layers(self) -> int:
        """Of the decoder."""
        return len(self.spec.decoder.layers)

    def modules(self) -> list[str]:
        """Every matrix of the layers, then `head`."""
        return [*_modules(self.spec), "head"]

    def check_dense(self, what: str) -> None:
        """Raises UnsupportedModelError where layers have experts, latents, states, or norms without
        weights; what: `GPTQ`.
        """
        if has_states(self.spec.decoder.layers):
            raise UnsupportedModelError(
                f"{self.spec.family!r} has layers with states, which {what} isn't built for. "
                "Round to nearest: --quant without --calib."
            )
        if self.spec.decoder.reads_beside:
            raise UnsupportedModelError(
                f"{self.spec.family!r} has layers that read other layers' keys and values, or "
                f"inputs of their own, which {what} isn't built for. Round to nearest: --quant "
                "without --calib."
            )
        if has_latents(self.spec.decoder.layers):
            raise UnsupportedModelError(
                f"{self.spec.family!r} attends over latents (MLA), which {what} isn't built for. "
                "Round to nearest: --quant without --calib."
            )
        if self.has_plain_norms:
            raise UnsupportedModelError(
                f"{self.spec.family!r} has norms without weights, which {what} isn't built for. "
                "Round to nearest: --quant without --calib."
            )
        if any(layer.mlp.experts is not None for layer in self.spec.decoder.layers):
            raise UnsupportedModelError(
                f"{self.spec.family!r} has experts, which {what} isn't built for: each sees only "
                "the tokens that chose it. Round to nearest: --quant without --calib."
            )

    @property
    def has_plain_norms(self) -> bool:
        """Whether norms have no weights."""
        return any(isinstance(rule, Ones) for rule in self.spec.rules)

    def head(self) -> tuple[str, ...]:
        """The tensor that is the output head; of a tied one the embedding, wherever it lies."""
        if self.spec.decoder.tied and "embed.weight" in self.names:
            return self.names["embed.weight"]
        return self.names["head.weight"]

    def embedding(self) -> str:
        """The tensor that holds the embedding."""
        return self.names.get("embed.weight", self.names.get("head.weight", ("",)))[0]

    def shape(self, module: str) -> tuple[int, int]:
        """[N, K] of a matrix, all parts together."""
        parts = self.head() if module == "head" else self.names[f"{module}.weight"]
        shapes = [self.source.shape(part) for part in parts]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def layer(self, i: int) -> Tensors:
        """A layer's tensors by their names in it, in float32."""
        prefix = f"layers.{i}."
        return {
            target.removeprefix(prefix): self._whole(parts)
            for target, parts in self.names.items()
            if target.startswith(prefix)
        }

    def matrix(self, module: str) -> Tensor:
        """A layer's matrix [N, K], all parts together, in float32."""
        return self._whole(self.names[f"{module}.weight"])

    def _whole(self, names: tuple[str, ...]) -> Tensor:
        """The rows of several tensors as one, in float32."""
        parts = [self.read(name) for name in names]
        try:
            return torch.cat(parts)
        except RuntimeError as error:
            shapes = ", ".join(f"{n} {list(p.shape)}" for n, p in zip(names, parts, strict=True))
            raise WeightsError(f"These tensors don't fit together: {shapes}. {error}") from error

    def read(self, name: str) -> Tensor:
        """A tensor in float32; WeightsError where a value isn't finite."""
        found = self.source.read(name)
        assert isinstance(found, Tensor)  # `of` refuses others
        values = found.to(torch.float32, copy=True)
        check_finite(name, values)
        return values

    def split(self, target: str, whole: Tensor) -> dict[str, Tensor]:
        """The rows of the parameter `target` by the checkpoint's names."""
        names = self.names[target]
        rows = [self.source.shape(name)[0] for name in names]
        return dict(zip(names, whole.split(rows), strict=True))

    def check_groups(self, schemes: Mapping[str, Scheme | None], kinds: Container[Kind]) -> None:
        """Raises ConfigError for a matrix of `kinds` whose K isn't a multiple of its group."""
        for module, scheme in schemes.items():
            if scheme is None or not scheme.group or scheme.kind not in kinds:
                continue
            n, k = self.shape(module)
            if k % scheme.group:
                raise ConfigError(
                    f"{module} [{n}, {k}] has no whole number of groups of {scheme.group} "
                    f"({scheme.name}), which this layout demands. {_way_out(module, k, scheme)}"
                )


def _way_out(module: str, k: int, scheme: Scheme) -> str:
    """What to do about a matrix whose K isn't a multiple of its scheme's group."""
    fit = [group for group in GROUPS if k % group == 0]
    if scheme.kind in ("mxfp4", "nvfp4") or not fit:
        ways = "Choose another scheme"
    else:
        ways = f"Choose a group of {' or '.join(map(str, fit))}"
    pattern = re.sub(r"^layers\.\d+", "*", stored_in(module))
    return f"{ways}, or keep such matrices as they are: --special '{pattern}=none'."


def bits_per_weight(scheme: Scheme | None, n: int, k: int, stored: int = 16) -> float:
    """Of a matrix [N, K] in a file: codes, scales and zero points over its values.

    Scales of groups count as 16 bits (of mxfp4 and nvfp4 8), those of rows and tensors as 32; an
    unquantized value has `stored` bits.
    """
    if scheme is None:
        return float(stored)
    groups = math.ceil(k / scheme.group) if scheme.group else 1
    rows = n if scheme.rows == 1 else math.ceil(n / scheme.rows) if scheme.rows else 1
    scale = 8 if scheme.kind in ("mxfp4", "nvfp4") else 16 if scheme.group else 32
    zero = 0 if scheme.symmetric else scheme.bits
    return scheme.bits + rows * groups * (scale + zero) / (n * k)


def joined(parts: list[Tensor | Codes]) -> Tensor | Codes:
    """A parameter from its parts: codes where all are."""
    codes = [part for part in parts if isinstance(part, Codes)]
    if len(codes) == len(parts):
        return Codes.stack(codes)
    return torch.cat([p.dequantize() if isinstance(p, Codes) else p.float() for p in parts])
