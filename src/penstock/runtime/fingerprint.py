"""What an engine is made for: the machine's kind, and the versions that its parts must agree on."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from penstock.hardware import detect
from penstock.kernels import native
from penstock.runtime.plan import PLAN_VERSION

FOLDER_VERSION = 3
"""Of the layout of an engine folder, of its manifest and of packed weights."""

_WORDS = {
    "folder": "the layout of engine folders",
    "plan": "plans",
    "penstock": "Penstock",
    "torch": "torch",
    "arch": "processors of the kind",
    "isa": "the instruction set",
}

_OF_ANY = ("folder", "plan", "penstock")
"""Those that a GPU's engine must agree on, too."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All of it must be the same where an engine runs; `machine` is for whoever reads it."""

    folder: int
    plan: int
    penstock: str
    torch: str  # major.minor
    arch: str  # of the processor: x86_64
    isa: str  # whose kernels were timed: avx2, avx512-bf16, …; `reference` without the library
    machine: Mapping[str, Any]  # processor, cores, flags

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        """Raises TypeError for other keys, as of another version's folder."""
        return cls(**data)

    def differences(self, here: Fingerprint, on_gpu: bool = False) -> list[str]:
        """What keeps an engine with this fingerprint from running where `here` is: sentences.

        on_gpu: it is for one. Nothing in it depends on the processor or torch then.
        """
        found = []
        for name, words in _WORDS.items():
            if on_gpu and name not in _OF_ANY:
                continue
            then, now = getattr(self, name), getattr(here, name)
            if then != now:
                found.append(f"it was built for {words} {then}, here is {now}")
        return found


def fingerprint() -> Fingerprint:
    """Of this machine and installation, with the instruction set that is in use now."""
    hardware = detect()
    return Fingerprint(
        folder=FOLDER_VERSION,
        plan=PLAN_VERSION,
        penstock=sys.modules["penstock"].__version__,
        torch=".".join(str(torch.__version__).split(".")[:2]),
        arch=platform.machine(),
        isa=native.isa or "reference",
        machine={
            "processor": hardware.processor,
            "cores": hardware.cores,
            "flags": list(hardware.flags),
        },
    )
