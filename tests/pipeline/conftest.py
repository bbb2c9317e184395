"""A tiny checkpoint of each family that is asked for, and windows of random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from penstock.pipeline.calibration import CalibrationSet
from tests.models.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            folder = Path(tmp_path_factory.mktemp(name))
            made[name] = make_tiny(name, folder)
        return made[name]

    return make


@pytest.fixture(scope="session")
def calibration() -> CalibrationSet:
    random = torch.Generator().manual_seed(0)
    windows = [torch.randint(3, 320, (size,), generator=random) for size in (100, 90, 120, 60)]
    return CalibrationSet("random", tuple(tuple(window.tolist()) for window in windows))


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are far too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
