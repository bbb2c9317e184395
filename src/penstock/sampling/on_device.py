"""The draws of `truncation` for logits on a GPU: the host asks for no value and waits for nothing.

A row whose survivors may lie beyond the candidates is drawn from its whole vocabulary by one
operator, which has nothing to do for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.draw import BEYOND
from penstock.sampling import truncation
from penstock.sampling.truncation import NARROW, WIDE, Cuts, Drawn

Draw = Callable[[Tensor, Cuts, Tensor], Drawn]


def draw_nucleus(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Rows with a temperature and top_p."""
    tokens, peaks = ops.draw_nucleus(logits, cuts.temperature, cuts.top_p, u, NARROW, WIDE)
    return _beyond(tokens, logits, cuts, u), peaks


def draw_leading(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Rows with a top_k below NARROW, a min_p, or both, and perhaps top_p."""
    scaled, ids, peaks, more = ops.scaled_top_k(
        logits, cuts.temperature, cuts.top_k, cuts.log_min_p, NARROW
    )
    tokens = ops.draw_from(ids, scaled.softmax(-1), u, cuts.top_p)
    return _beyond(tokens.masked_fill_(more, BEYOND), logits, cuts, u), peaks


def draw_full(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Rows with any parameters."""
    ids, peaks = ops.argmax(logits)
    return _beyond(torch.full_like(ids, BEYOND), logits, cuts, u), peaks


def _beyond(tokens: Tensor, logits: Tensor, cuts: Cuts, u: Tensor) -> Tensor:
    return ops.draw_beyond(
        tokens, logits, cuts.temperature, cuts.top_k, cuts.top_p, cuts.log_min_p, u
    )


INSTEAD: Final[dict[Draw, Draw]] = {
    truncation.draw_nucleus: draw_nucleus,
    truncation.draw_leading: draw_leading,
    truncation.draw_full: draw_full,
}
"""What stands here for the host's ways; the others ask for nothing either."""
