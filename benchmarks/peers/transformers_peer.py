"""transformers on torch, in bfloat16: what everybody has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.home import call_runner, job, python_of, versions
from benchmarks.peers.protocol import Format, Found, Missing, Reply, Settings, Work

INSTALL = """
mkdir -p transformers && cd transformers
python3 -m venv venv
venv/bin/pip install "torch>=2.11,<2.14" "transformers>=5"
"""


@dataclass(frozen=True, slots=True)
class Transformers:
    """`generate`, greedy, with its own cache and scaled-dot-product attention."""

    home: Path
    name: str = "transformers"
    formats: tuple[Format, ...] = (Format("bfloat16", 16, 2.0, 2.0, "bfloat16"),)
    install: str = INSTALL

    @property
    def _python(self) -> Path:
        return python_of(self.home / "transformers")

    def available(self) -> Found | Missing:
        if not self._python.exists():
            return Missing(f"there is no {self._python}.")
        found = versions(self._python, "transformers", "torch")
        return Found(found) if found else Missing(f"{self._python} has no transformers.")

    def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
        return checkpoint

    def run(self, model: Path, form: Format, works: Sequence[Work], settings: Settings) -> Reply:
        return call_runner(
            self._python,
            "run_transformers",
            job(model, works, settings),
            timeout_s=settings.timeout_s,
            threads=settings.threads,
        )
