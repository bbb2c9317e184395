"""Values that no model can be run with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from penstock.errors import WeightsError
from penstock.models.checkpoint import Source
from penstock.nn.decoder import stored_in

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_finite(name: str, values: Tensor) -> None:
    """Raises WeightsError where a tensor called `name`, as stored or packed, has NaN or infinity.

    Codes are left out: formats check what theirs stand for as they pack.
    """
    bad = _broken(values)
    if bad:
        raise WeightsError(_told(bad, values, name))


def why_not_finite(model: nn.Module, tensors: Mapping[str, tuple[str, ...]]) -> str:
    """Where a model's logits that aren't finite come from, as a sentence or two.

    tensors: `LoadedModel.tensors`. It reads all of the weights that are here, which takes as long
    as a step.
    """
    for name, tensor in model.named_parameters():
        bad = _broken(tensor)
        if bad:
            return _told(bad, tensor, _named(name, tensor, tensors))
    shared = any(getattr(module, "part", None) or getattr(module, "elsewhere", False)
                 for module in model.modules())  # fmt: skip
    whose = "Of its weights those that this process has are" if shared else "Its weights are all"
    return (
        f"{whose} finite, so numbers grew too large on the way: a damaged checkpoint, a "
        "config.json that isn't its own, or a format with too few bits. Compare dtype float32."
    )


def blamed(parts: Iterable[str], source: Source) -> list[str]:
    """Those of some tensors of a checkpoint that have NaN or infinity; all where none is found."""
    read = {part: source.read(part) for part in parts}
    found = [part for part, t in read.items() if isinstance(t, Tensor) and _broken(t)]
    return found or list(read)


def _named(parameter: str, values: Tensor, tensors: Mapping[str, tuple[str, ...]]) -> str:
    """The checkpoint's tensors that a parameter is made of; of experts, those that are broken."""
    module = parameter.rpartition(".")[0]
    found = tensors.get(parameter, ())
    banked = [name for name in tensors if stored_in(name.rpartition(".")[0]) == module]
    if not found and banked:
        bad = [f"{module}.{e}.weight" for e, own in enumerate(values) if _broken(own)]
        found = tuple(part for name in bad for part in tensors.get(name, ()))
    if not found:  # its module makes several parameters of one tensor
        found = tuple(
            part for name in tensors if name.startswith(f"{module}.") for part in tensors[name]
        )
    return ", ".join(found) or parameter


def _told(bad: int, values: Tensor, name: str) -> str:
    return (
        f"{bad} of {values.numel()} values of {name} are NaN or infinite. The checkpoint is "
        "damaged: copy or convert it again."
    )


def _broken(values: Tensor) -> int:
    """How many floats are NaN or infinite."""
    if values.dtype not in _FLOATS or not values.numel() or values.is_meta:
        return 0
    if all(math.isfinite(end) for end in values.aminmax()):  # NaN is both ends; no copy is made
        return 0
    return int((~values.isfinite()).sum())
