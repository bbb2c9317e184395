"""What timing chose for an engine: nothing of it changes a bit of any result."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.runtime.program import LinearVariant, Program


@dataclass(frozen=True, slots=True)
class Tuned:
    """Choices by the tokens of a step, or the rows of a product."""

    threads: tuple[tuple[int, int], ...] = ()  # (tokens, threads): `Program.use_threads`
    prefill_tokens: int | None = None  # of a step with prompts; None: the engine's largest
    variants: tuple[tuple[str, int, LinearVariant], ...] = ()
    """(product, rows, how): `Program.use_variants`."""

    def among(self, products: Container[str]) -> Tuned:
        """What of it goes with a program that has these products only."""
        return replace(self, variants=tuple(v for v in self.variants if v[0] in products))

    def apply(self, program: Program) -> None:
        """Let the program heed them. Raises KernelError for a product that it doesn't have."""
        if self.threads:
            program.use_threads(self.threads)
        if self.variants:
            program.use_variants(self.variants)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tuned:
        """What `as_dict` has given. Raises TypeError or ValueError for anything else."""
        chosen = dict(data)
        chosen["threads"] = tuple((int(tokens), int(count)) for tokens, count in data["threads"])
        chosen["variants"] = tuple(
            (str(product), int(rows), LinearVariant(**how))
            for product, rows, how in data["variants"]
        )
        return cls(**chosen)
