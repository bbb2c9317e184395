"""Whether models can run on a GPU is found out in the order in which it can be mended."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from penstock.kernels import why_not_on

SECOND = torch.device("cuda", 1)


def with_shared(kib: int) -> SimpleNamespace:
    """Properties of a GPU."""
    return SimpleNamespace(shared_memory_per_block_optin=kib << 10)


@pytest.fixture
def two_hoppers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with CUDA, Triton and two GPUs; nothing wrong."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (
        ("is_available", True),
        ("device_count", 2),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "Some GPU"),
        ("get_device_properties", with_shared(227)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("two_hoppers")
def test_nothing_is_wrong() -> None:
    assert why_not_on(SECOND) is None


@pytest.mark.usefixtures("two_hoppers")
def test_what_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for target, name, value, words in (
        (None, "", None, "TRITON_INTERPRET=1 interprets the kernels"),
        (importlib.util, "find_spec", lambda name: None, "pip install triton"),
        (torch.cuda, "get_device_properties", lambda device: with_shared(99), "99 KiB of shared"),
        (torch.cuda, "get_device_capability", lambda device: (8, 9), "capability 8.9, but"),
        (torch.cuda, "device_count", lambda: 1, "no GPU 1: this machine has cuda:0"),
        (torch.cuda, "is_available", lambda: False, "finds no NVIDIA GPU"),
        (torch.version, "cuda", None, "was built without CUDA"),
    ):
        if target is not None:  # each comes before those above
            monkeypatch.setattr(target, name, value)
        assert words in str(why_not_on(SECOND))
