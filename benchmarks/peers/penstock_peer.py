"""Penstock itself, in a process of its own like the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.home import call_runner, job
from benchmarks.peers.protocol import Format, Found, Missing, Reply, Settings, Work

import penstock

DEFAULT_FORMATS = ("bfloat16", "w8a16", "w8a8", "w4a16", "w4a8")


@dataclass(frozen=True, slots=True)
class Penstock:
    """The public `LLM`, with this interpreter. A format it doesn't know fails in its own words.

    Bytes are estimates until a run: the engine says what it reads.
    """

    home: Path
    name: str = "Penstock"
    formats: tuple[Format, ...] = (
        Format("bfloat16", 16, 2.0, 2.0, "bfloat16"),
        Format("w8a16", 8, 1.0, 1.0, "int8"),
        Format("w8a8", 8, 1.0, 1.0, "int8"),
        Format("w4a16", 4, 0.5 + 2 / 32, 1.0, "int8"),
        Format("w4a8", 4, 0.5 + 2 / 32, 1.0, "int8"),
        Format("w4a16-g128", 4, 0.5 + 2 / 128, 1.0, "int8"),
        Format("w4a8-g128", 4, 0.5 + 2 / 128, 1.0, "int8"),
    )
    install: str = ""

    def available(self) -> Found | Missing:
        return Found(penstock.__version__)

    def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
        return checkpoint

    def run(self, model: Path, form: Format, works: Sequence[Work], settings: Settings) -> Reply:
        return call_runner(
            Path(sys.executable),
            "run_penstock",
            job(model, works, settings, arguments=arguments(form)),
            timeout_s=settings.timeout_s,
            threads=settings.threads,
        )


def arguments(form: Format) -> dict[str, Any]:
    """Of `penstock.LLM`: weights are quantized while they load."""
    return {} if form.bits == 16 else {"quantization": form.name}
