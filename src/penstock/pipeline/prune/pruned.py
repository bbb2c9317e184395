"""A checkpoint without some of its layers and neurons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.models.over import Over
from penstock.models.registry import spec_of
from penstock.pipeline.parts import Parts
from penstock.quant import Codes

_LAYER = re.compile(r"(^|\.)(\d+)(?=\.|$)")
"""A tensor's layer: the first number in its name."""

_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Lists of config.json with an entry for each layer."""


class Pruned(Over):
    """`parts` with these layers, and of each these neurons where they are given."""

    def __init__(
        self, parts: Parts, layers: Sequence[int], neurons: Sequence[Tensor] | None = None
    ) -> None:
        """Raises UnsupportedModelError where what is left can't be said in a config.json."""
        super().__init__(parts.source)
        self._config = _config(parts, layers, neurons)
        self._names: dict[str, str] = {}  # as it is called here: as it was
        self._rows: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}
        new = {old: at for at, old in enumerate(layers)}
        used = {name: target for target, names in parts.names.items() for name in names}
        for name in parts.source.names():
            layer = _LAYER.search(name) if _is_of_layer(used.get(name), name) else None
            if layer is None:
                self._names[name] = name
                continue
            at = new.get(int(layer[2]))
            if at is None:
                continue
            called = f"{name[: layer.start(2)]}{at}{name[layer.end(2) :]}"
            self._names[called] = name
            if neurons is not None:
                self._cut(called, used.get(name, ""), neurons[at])
        self._check(parts, layers, neurons)

    def _cut(self, name: str, target: str, kept: Tensor) -> None:
        if target.endswith(("mlp.up.weight", "mlp.up.bias")):
            self._rows[name] = kept
        elif target.endswith("mlp.down.weight"):
            self._columns[name] = kept

    def _check(self, parts: Parts, layers: Sequence[int], neurons: Sequence[Tensor] | None) -> None:
        """What config.json now says is what was kept."""
        spec = parts.spec.decoder
        kept = [spec.layers[i] for i in layers]
        if neurons is not None:
            kept = [
                replace(one, mlp=replace(one.mlp, intermediate=len(own)))
                for one, own in zip(kept, neurons, strict=True)
            ]
            for name in (*self._rows, *self._columns):
                at = 0 if name in self._rows else 1
                found = self.base.shape(self._names[name])
                if found[at] != spec.layers[0].mlp.intermediate:
                    raise UnsupportedModelError(
                        f"{self._names[name]} is {list(found)}, gate and up in one tensor, of "
                        f"which neurons of {parts.spec.family!r} can't be left out. Leave out "
                        "layers."
                    )
        try:
            now = spec_of(self._config, str(self.path)).decoder
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{len(layers)} of {len(spec.layers)} layers can't be said in config.json: {error}"
            ) from error
        if now != replace(spec, layers=tuple(kept)):
            raise UnsupportedModelError(
                f"The layers of {parts.spec.family!r} differ by their numbers, so that config.json "
                f"can't say that {len(layers)} of {len(spec.layers)} are left: each would be "
                "computed as another. Leave out neurons, or none."
            )

    @property
    def config(self) -> dict[str, Any]:
        """Of what is left."""
        return self._config

    def files(self) -> list[Path]:
        """None: what tells one pruning from another isn't in files."""
        raise ConfigError(f"What is left of {self.path} is in memory alone: write it to a folder.")

    def names(self) -> list[str]:
        """Of what is left, sorted."""
        return sorted(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        shape = list(super().shape(self._names[name]))
        if name in self._rows:
            shape[0] = len(self._rows[name])
        if name in self._columns:
            shape[1] = len(self._columns[name])
        return tuple(shape)

    def scheme(self, name: str) -> None:
        """None is quantized."""

    def read(self, name: str) -> Tensor | Codes:
        """A tensor."""
        found = super().read(self._names[name])
        assert isinstance(found, Tensor)  # Parts refuses others
        if name in self._rows:
            found = found[self._rows[name]]
        if name in self._columns:
            found = found[:, self._columns[name]].contiguous()
        return found


def _is_of_layer(target: str | None, name: str) -> bool:
    """Whether a tensor is a layer's; of one that no parameter is made of its name says so."""
    if target is not None:
        return target.startswith("layers.")
    return re.search(r"(^|\.)(layers|h)\.\d+\.", name) is not None


def _config(
    parts: Parts, layers: Sequence[int], neurons: Sequence[Tensor] | None
) -> dict[str, Any]:
    """Lists with an entry for each layer lose theirs as well."""
    count, found = parts.num_layers, dict(parts.source.config)

    def of_layers(level: Mapping[str, Any]) -> dict[str, Any]:
        now: dict[str, Any] = {}
        for key, value in level.items():
            now[key] = value
            if isinstance(value, dict):
                now[key] = of_layers(value)
            elif key in ("num_hidden_layers", "n_layer") and value == count:
                now[key] = len(layers)
            elif key in _BY_LAYER and isinstance(value, list) and len(value) == count:
                now[key] = [value[i] for i in layers]
            elif key == "intermediate_size" and neurons is not None:
                now[key] = len(neurons[0])
        return now

    return of_layers(found)
