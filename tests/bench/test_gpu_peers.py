"""`benchmarks/gpu`: transformers on the same requests."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import peers, summary
from benchmarks.gpu.document import Context, Document

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="dry runs interpret Triton's kernels: the GPU has real ones"
)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sets it where it looks whether a step can be compiled."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def context(out: Path, seconds: float = 60.0, device: str = "cpu", dry: bool = True) -> Context:
    return Context(torch.device(device), dry, True, Document(out), time.monotonic() + seconds)


def test_everybody_makes_the_tokens_that_are_asked_for(tmp_path: Path) -> None:
    where = context(tmp_path)
    given = peers.requests(where)
    asked = sum(count for _, count in given)
    found = {name: run() for name, run in peers.items(where)}
    assert list(found) == [
        "penstock", "transformers-continuous", "transformers-2", "transformers-1",
        "transformers-static-2",
    ]  # fmt: skip
    for name, one in found.items():
        assert one["requests"] == 4 and one["output_tokens"] == asked, name
        assert one["output_tokens_per_s"] == pytest.approx(asked / one["seconds"]), name
    assert found["transformers-1"]["sampled"] is True


def test_requests_are_sorted_and_padded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Longest first; a batch runs until its last is through, and counts what was asked for."""
    seen: list[tuple[list[int], int]] = []

    class Model:
        device = torch.device("cpu")

        def generate(self, ids: Any, *, attention_mask: Any, max_new_tokens: int, **_: Any) -> Any:
            assert (ids[attention_mask == 0] == 0).all()
            assert attention_mask[:, -1].tolist() == [1] * len(ids)
            seen.append((attention_mask.sum(1).tolist(), max_new_tokens))
            return torch.zeros(len(ids), ids.shape[1] + max_new_tokens, dtype=torch.long)

    given = [([5] * 3, 2), ([6] * 9, 1), ([7] * 4, 6), ([8] * 1, 3)]
    found = peers.by_generate(context(tmp_path), Model(), given, 2)
    assert seen[0][1] == 4  # what warms up
    assert seen[1:] == [([9, 4], 6), ([3, 1], 3)]
    assert (found["batch"], found["output_tokens"], found["prompt_tokens"]) == (2, 12, 17)
    seen.clear()
    monkeypatch.setattr(peers, "SAMPLE", 2)
    found = peers.one_by_one(context(tmp_path), Model(), given, 1)
    assert seen[1:] == [([9], 1), ([3], 2)] and found["output_tokens"] == 3


def test_who_is_late_made_fewer(tmp_path: Path) -> None:
    def late(given: Any, end: float) -> int:
        raise peers.LateError(f"{end}")

    found = peers.timed([([5, 6], 7)], late, 3.0)
    assert found["output_tokens_per_s_below"] == 7 / found["late_after_s"] and found["why"] == "3.0"
    with pytest.raises(RuntimeError, match="6 tokens were made of 7"):
        peers.timed([([5, 6], 7)], lambda given, end: 6, 3.0)

    class Model:
        def generate(self, ids: Any, **_: Any) -> Any:
            time.sleep(0.01)
            return ids.repeat(1, 5)

    given = [([5], 4)] * 4
    found = peers.by_generate(context(tmp_path, 0.025), _on_cpu(Model()), given, 1)
    assert "output_tokens_per_s" not in found and "requests were left" in found["why"]

    document = Document(tmp_path)
    document.put("peers", "penstock", {"result": {"output_tokens_per_s": 90.0}})
    document.put("peers", "transformers-8", {"result": {"output_tokens_per_s": 20.0}})
    assert summary._against_transformers(document) == 4.5
    below = {"output_tokens_per_s_below": 30.0}
    document.put("peers", "transformers-continuous", {"result": below})
    assert summary._against_transformers(document) == 3.0


def _on_cpu(model: Any) -> Any:
    model.device = torch.device("cpu")
    return model


def test_ways_that_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

    monkeypatch.setattr(peers, "_model", lambda where: None)
    assert peers.theirs(context(tmp_path), full) == {"skipped": "CUDA out of memory. Tried"}
    found = peers.theirs(context(tmp_path, 5.4, dry=False), full, 8, 75.0)
    assert found == {"skipped": "5 s were left, which is less than 75"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "missing" in peers.theirs(context(tmp_path), full)


def test_options_that_a_version_has() -> None:
    def stop(block: bool, timeout: float | None = None) -> None: ...

    assert peers.accepted(stop, hard_stop=True, timeout=1) == {"timeout": 1}
