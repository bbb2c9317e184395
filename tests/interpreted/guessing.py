"""Who guesses for `tests.speculate.rounds`' model, by every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.speculate.eagle_reference import make_tensors
from tests.speculate.eagle_reference import write as write_eagle
from tests.speculate.rounds import D, V, sure_head, sure_heads, target

__all__ = ["guessing", "target"]


def guessing(method: str, folder: Path) -> dict[str, Any]:
    """A speculative_config whose weights are written to `folder`; the draft isn't the target."""
    path = folder / method
    found: dict[str, Any] = {"method": method, "adaptive": False}
    if method == "draft_model":
        found["model"] = target(path, 0.0, 2.0, num_layers=1)
    elif method in ("medusa", "medusa-shared"):
        found["method"] = "medusa"
        found["model"] = sure_heads(path, "each" if method == "medusa" else "target")
    elif method == "eagle":
        found["model"] = sure_head(path)
    elif method == "eagle3":
        sizes = {"hidden_size": D, "vocab_size": V, "head_dim": 16}
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
        found["model"] = write_eagle(path, make_tensors(True, hidden=D, vocab=V), **sizes, **layers)
    if method not in ("draft_model", "self", "ngram"):
        found["num_speculative_tokens"] = 3 if found["method"] == "medusa" else 2
    return found
