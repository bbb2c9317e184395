"""What rows are rounded to beside matrices that are quantized already: `a8` and `a16`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.checkpoint import Source
from penstock.models.over import Over
from penstock.quant import Codes, Scheme

ACTIVATIONS = ("a8", "a16")
"""What `quantization` may be of a checkpoint that is quantized already: 8 bits, in blocks where
weights are in symmetric groups, or 16."""


class Activated(Over):
    """A quantized source whose codes meet other activations; nothing is rounded again."""

    def __init__(self, base: Source, quantization: str) -> None:
        """Raises ConfigError where no matrix meets either, or one's scale is calibrated."""
        super().__init__(base)
        self._quantization = quantization
        schemes = {s for s in map(base.scheme, base.names()) if s is not None}
        static = sorted(scheme.name for scheme in schemes if scheme.static)
        if not static and any(map(_takes, schemes)):
            return
        found = ", ".join(sorted(scheme.name for scheme in schemes))
        why = f"its matrices are {found}: only integers and K-quants meet either"
        if not schemes:
            why = "it isn't quantized"
        if static:
            why = f"the scale of its activations is calibrated ({', '.join(static)})"
        raise ConfigError(
            f"quantization={quantization!r} can't take effect on {base.path}, as {why}. Leave it "
            "out" + ("." if schemes else ", or choose w8a8 or w4a8.")
        )

    def scheme(self, name: str) -> Scheme | None:
        """Of the base, with these activations."""
        found = self._base.scheme(name)
        return None if found is None else activated(found, self._quantization)


class Widened(Over):
    """A quantized source's values, in float32."""

    def scheme(self, name: str) -> Scheme | None:
        """None: nothing is quantized any more."""
        return None

    def read(self, name: str) -> Tensor | Codes:
        """A tensor."""
        found = self._base.read(name)
        return found.dequantize() if isinstance(found, Codes) else found


def activated(scheme: Scheme, quantization: str) -> Scheme:
    """`scheme` with the activations that `a8` or `a16` asks for, where it meets either."""
    if not _takes(scheme):
        return scheme
    if quantization == "a16":
        return scheme.stored
    in_blocks = scheme.is_k or (scheme.group > 0 and scheme.symmetric)
    return replace(scheme, activations="int8_blocks" if in_blocks else "int8")


def _takes(scheme: Scheme) -> bool:
    return (scheme.is_integer or scheme.is_k) and not scheme.rotated
