"""How a GPU's steps are put together from kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from penstock.config.checks import one_of
from penstock.errors import ConfigError, nearest

MOST_CAPTURED = 1024
"""Sequences of the largest graph."""


_MODES: dict[str | int, str] = {0: "none", 3: "compile", "vllm_compile": "compile"}
"""vLLM's other names of the modes."""


@dataclass(frozen=True, slots=True)
class CompilationConfig:
    """Who launches the kernels of a step; vLLM's names."""

    mode: Literal["none", "compile"] = "none"  # compile: torch.compile makes code of each step
    # full_decode_only: steps that only decode are recorded once and then replayed as a whole
    cudagraph_mode: Literal["none", "full_decode_only"] = "full_decode_only"
    cudagraph_capture_sizes: tuple[int, ...] | None = None  # sequences; None: 1, 2, 4, 8, 16, 24, …

    def __post_init__(self) -> None:
        for name in ("mode", "cudagraph_mode"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, value.lower())
        if isinstance(self.mode, str | int) and not isinstance(self.mode, bool):
            object.__setattr__(self, "mode", _MODES.get(self.mode, self.mode))
        try:
            one_of(self, "mode", ("none", "compile"))
            one_of(self, "cudagraph_mode", ("none", "full_decode_only"))
        except ConfigError as error:
            raise ConfigError(f"compilation_config: {error}") from error
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        if not isinstance(sizes, list | tuple) or not sizes:
            raise ConfigError(
                f"cudagraph_capture_sizes must be a list of numbers of sequences, not {sizes!r}."
            )
        for size in sizes:
            whole = isinstance(size, int) and not isinstance(size, bool)
            if not whole or not 1 <= size <= MOST_CAPTURED:
                raise ConfigError(
                    f"cudagraph_capture_sizes must be integers from 1 to {MOST_CAPTURED:,}, not "
                    f"{size!r}."
                )
        if self.cudagraph_mode == "none":
            raise ConfigError(
                "cudagraph_mode='none' leaves cudagraph_capture_sizes nothing to decide. Give one "
                "of them."
            )
        object.__setattr__(self, "cudagraph_capture_sizes", tuple(sorted(set(sizes))))

    @classmethod
    def of(cls, value: object) -> CompilationConfig | None:
        """From what a caller gave: a dictionary, one of these, or None for the defaults."""
        if value is None or isinstance(value, CompilationConfig):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"compilation_config must be a dictionary, not {type(value).__name__}: "
                '{"cudagraph_mode": "none"} is one.'
            )
        names = [f.name for f in fields(cls)]
        for name in value:
            if name not in names:
                raise ConfigError(
                    f"{name!r} isn't in a compilation_config.{nearest(str(name), names)} It may "
                    f"have {', '.join(names)}."
                )
        chosen: dict[str, Any] = dict(value)
        return cls(**chosen)
