"""What ends a command is told as that, whatever error comes of it."""

from __future__ import annotations

import threading

import pytest

from penstock.cli import ending


def test_an_error_after_sigterm_is_its(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code that is interrupted may raise an error of its own."""
    asked = threading.Event()
    monkeypatch.setattr(ending, "_asked", asked)
    with pytest.raises(ValueError, match="of C code"), ending.terminated_first():
        raise ValueError("of C code")
    asked.set()
    with pytest.raises(ending.Terminated), ending.terminated_first():
        raise ValueError("of C code")
