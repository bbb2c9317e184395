"""OpenVINO GenAI, exported with optimum-intel and compressed by NNCF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.home import (
    CONVERT_TIMEOUT_S,
    RUNNERS,
    call,
    call_runner,
    job,
    once,
    python_of,
    versions,
)
from benchmarks.peers.protocol import Format, Found, Missing, Reply, Settings, Work

PACKAGES = ("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers", "torch")

# optimum-intel 2.2 with transformers 5.5 can't import its own OVModelForCausalLM
INSTALL = """
mkdir -p openvino && cd openvino
python3 -m venv venv
venv/bin/pip install "torch>=2.11,<2.14" openvino-genai "optimum-intel<2" "transformers<5" nncf
"""

QUANTIZATION: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"bits": 8, "sym": True},
    "int4 g128": {"bits": 4, "sym": True, "group_size": 128, "ratio": 1.0},
}


@dataclass(frozen=True, slots=True)
class OpenVino:
    """Its own defaults: an 8-bit cache of keys and values, activations as this CPU likes them."""

    home: Path
    name: str = "OpenVINO"
    formats: tuple[Format, ...] = (
        Format("bf16", 16, 2.0, 2.0, "bf16"),
        Format("int8", 8, 1.0, 1.0, "int8"),
        Format("int4 g128", 4, 0.5 + 2 / 128, 1.0, "int8"),  # a float16 scale for 128 weights
    )
    install: str = INSTALL

    @property
    def _python(self) -> Path:
        return python_of(self.home / "openvino")

    def available(self) -> Found | Missing:
        if not self._python.exists():
            return Missing(f"there is no {self._python}.")
        found = versions(self._python, *PACKAGES)
        return Found(found) if found else Missing(f"{self._python} has no {PACKAGES[0]}.")

    def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
        def convert(folder: Path) -> None:
            told = {
                "model": str(checkpoint),
                "out": str(folder),
                "quantization": QUANTIZATION[form.name],
            }
            script = RUNNERS / "convert_openvino.py"
            command = [self._python, script, json.dumps(told)]
            call(command, timeout_s=CONVERT_TIMEOUT_S, threads=1)

        return once(cache / f"openvino-{form.name.replace(' ', '-')}", convert)

    def run(self, model: Path, form: Format, works: Sequence[Work], settings: Settings) -> Reply:
        return call_runner(
            self._python,
            "run_openvino",
            job(model, works, settings),
            timeout_s=settings.timeout_s,
            threads=settings.threads,
        )
