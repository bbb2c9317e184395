"""What keys and values are stored as: a half or less of bfloat16's bytes, at a measured drift.

Sources: fp8 (E4M3), Micikevicius et al. 2022, arXiv:2209.05433; int8 with a scale for each token
and head, and int4 with a step and a minimum for each group, as KVQuant's and KIVI's per-token
variants, arXiv:2401.18079, arXiv:2402.02750; kivi as the last one's title has it: `ops.kivi`.
"""

from __future__ import annotations

import torch

from penstock.errors import ConfigError

PLAIN = ("bfloat16", "float32")
"""As they are: the model's own dtype, by its name."""

_STORED = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int4": torch.uint8,  # two codes a byte
    "kivi": torch.uint8,  # the same, with a window: `PagedLayout.recent_window`
}

RECENT_WINDOW = 128
"""Tokens that `kivi` keeps as they are unless asked otherwise; KIVI's own choice."""


def kv_dtype(name: str, activations: torch.dtype) -> torch.dtype:
    """The storage that `kv_cache_dtype=name` means beside activations of that dtype.

    Raises ConfigError for a name that can't stand beside them.
    """
    own = str(activations).removeprefix("torch.")
    if name in ("auto", own):
        return activations
    if name in PLAIN:
        raise ConfigError(
            f"kv_cache_dtype={name!r}, but this model runs in {own}, and attention multiplies keys "
            f"and values of that. Say kv_cache_dtype={own!r}, or dtype={name!r} too."
        )
    if activations is not torch.bfloat16:
        raise ConfigError(
            f"kv_cache_dtype={name!r} is widened to bfloat16, but this model runs in {own}. Add "
            f"dtype='bfloat16', or say kv_cache_dtype={own!r}."
        )
    return _STORED[name]


def kv_name(name: str, activations: torch.dtype) -> str:
    """One name for each way to store: that of the model's dtype for `auto`, `fp8` for its alias."""
    aliases = {"auto": str(activations).removeprefix("torch."), "fp8_e4m3": "fp8"}
    return aliases.get(name, name)
