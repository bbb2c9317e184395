from __future__ import annotations

import pytest

from tests.models.tiny import Make, makes_once


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Tiny checkpoints by name, each made once."""
    return makes_once(tmp_path_factory)
