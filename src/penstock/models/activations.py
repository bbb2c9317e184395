"""What rows are rounded to beside matrices that are quantized already: `a8` and `a16`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.over import Over
from penstock.models.weights import Source
from penstock.quant import Codes, Scheme
from penstock.quant.scheme import Activations

ACTIVATIONS: dict[str, Activations] = {"a8": "int8", "a16": "float"}
"""What `quantization` may be of a checkpoint that is quantized already."""


class Activated(Over):
    """A quantized source whose codes meet other activations; nothing is rounded again."""

    def __init__(self, base: Source, quantization: str) -> None:
        """Raises ConfigError where that changes no matrix, or one whose scale is calibrated."""
        super().__init__(base)
        self._activations = ACTIVATIONS[quantization]
        schemes = {s for s in map(base.scheme, base.names()) if s is not None}
        static = sorted(scheme.name for scheme in schemes if scheme.static)
        if static or not any(map(self._takes, schemes)):
            found = ", ".join(sorted(scheme.name for scheme in schemes)) or "not quantized"
            why = (
                f"the scale of its activations is calibrated ({', '.join(static)})"
                if static
                else f"its matrices are {found}: only integers and K-quants meet either"
            )
            raise ConfigError(
                f"quantization={quantization!r} can't take effect on {base.path}, as {why}. Leave "
                "it out" + ("." if schemes else ", or choose w8a8 or w4a8.")
            )

    def scheme(self, name: str) -> Scheme | None:
        """Of the base, with these activations."""
        found = self._base.scheme(name)
        if found is None or not self._takes(found):
            return found
        return replace(found, activations=self._activations)

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or the base's codes."""
        found = self._base.read(name)
        return self._changed(found) if isinstance(found, Codes) else found

    def _changed(self, codes: Codes) -> Codes:
        if not self._takes(codes.scheme):
            return codes
        return replace(codes, scheme=replace(codes.scheme, activations=self._activations))

    @staticmethod
    def _takes(scheme: Scheme) -> bool:
        return (scheme.is_integer or scheme.is_k) and not scheme.rotated
