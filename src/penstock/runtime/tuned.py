"""What timing chose for an engine: nothing of it changes a bit of any result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.runtime.program import Program


@dataclass(frozen=True, slots=True)
class Tuned:
    """Choices by the tokens of a step. Further kinds (kernel variants) are further fields."""

    threads: tuple[tuple[int, int], ...] = ()  # (tokens, threads): `Program.use_threads`
    prefill_tokens: int | None = None  # of a step with prompts; None: the engine's largest

    def apply(self, program: Program) -> None:
        """Let the program heed them."""
        if self.threads:
            program.use_threads(self.threads)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tuned:
        """What `as_dict` has given. Raises TypeError or ValueError for anything else."""
        chosen = dict(data)
        chosen["threads"] = tuple((int(tokens), int(count)) for tokens, count in data["threads"])
        return cls(**chosen)
