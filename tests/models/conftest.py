from __future__ import annotations

import pytest
from tiny import Make, makes_once

from penstock import ops
from penstock.kernels import native


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Tiny checkpoints by name, each made once."""
    return makes_once(tmp_path_factory)


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on the Python references, then on whatever the dispatcher prefers."""
    which: str = request.param
    if which == "native" and not ops.has_native("linear"):
        pytest.skip(f"no native kernels: {native.reason}")
    if which == "reference":
        for name in ops.op_names():
            monkeypatch.setattr(ops, name, ops.op(name).reference)
    return which
