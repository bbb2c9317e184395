"""Measured tables: kept row by row, and in the pages as the results have them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from penstock.models.hub import resolve
from penstock.models.sources import open_source

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Script = Callable[[str], ModuleType]


def row(scheme: str, method: str, kl: float, **more: Any) -> dict[str, Any]:
    return {
        "part": "grid", "scheme": scheme, "method": method, "calibrator": "", "bits": 4.125,
        "kl": kl, "perplexity": 12.5, "reference_perplexity": 12.0, "same_likeliest_token": 0.9,
        **more,
    }  # fmt: skip


def test_an_interrupted_run_goes_on(benchmark: Script, tmp_path: Path) -> None:
    rows, file = benchmark("rows").Rows, tmp_path / "r.json"
    first = rows("b", {"window": (1, 2)}, file, resume=True)
    assert first.all == []
    first.add({"name": "a", "kl": 1.0})
    again = rows("b", {"window": (1, 2)}, file, resume=True)
    assert again.find(name="a") == {"name": "a", "kl": 1.0}
    assert again.find(name="a", kl=2.0) is None
    again.add({"name": "b"})
    assert [r["name"] for r in json.loads(file.read_text())["results"]] == ["a", "b"]
    assert rows("b", {"window": (1, 2)}, file, resume=False).all == []


def test_rows_of_another_setup_are_refused(benchmark: Script, tmp_path: Path) -> None:
    rows, file = benchmark("rows").Rows, tmp_path / "r.json"
    rows("b", {"tokens": 1}, file, resume=False).add({})
    with pytest.raises(SystemExit, match=r"'tokens': 1.*not with .*'tokens': 2"):
        rows("b", {"tokens": 2}, file, resume=True)


def test_what_is_read_once_is_remembered(benchmark: Script) -> None:
    class Counting:
        reads = 0

        def read(self, ids: list[int], first: int, layers: bool) -> Any:
            self.reads += 1
            return type("Reading", (), {"logits": torch.tensor([len(ids), first])})()

    counting = Counting()
    reader = benchmark("remembered").Remembered(counting)
    for _ in range(2):
        assert reader.read([5, 6, 7], 1).logits.tolist() == [3, 1]
        assert reader.read([5, 6, 7], 2).logits.tolist() == [3, 2]
    assert counting.reads == 2
    reader.read([5, 6, 7], 1, layers=True)
    assert counting.reads == 3


def test_pages_are_filled_in(benchmark: Script, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.md"
    page.parent.mkdir()
    page.write_text("a\n<!-- k: x -->\nold\n<!-- /k -->\nb\n<!-- k: y z -->\n<!-- /k -->\n")
    (tmp_path / "other.md").write_text("nothing\n")
    tables = {"x": lambda: "one\n", "y z": lambda: "two\n"}
    assert benchmark("pages").fill(tmp_path, "k", tables) == [page]
    assert page.read_text() == (
        "a\n<!-- k: x -->\none\n<!-- /k -->\nb\n<!-- k: y z -->\ntwo\n<!-- /k -->\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [("<!-- k: w -->\n<!-- /k -->\n", "asks for 'w'. Tables: x"), ("<!-- k: x -->\n", "has no")],
)
def test_pages_that_ask_for_what_is_not(
    benchmark: Script, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(SystemExit, match=said):
        benchmark("pages").fill(tmp_path, "k", {"x": lambda: "one\n"})


def test_methods_of_a_format(benchmark: Script) -> None:
    rows = [
        row("w4a16-g128", "rtn", 0.04),
        row("w4a16-g128", "gptq", 0.01),
        row("w4a16-tensor", "rtn", 0.2),
        {**row("w4a16-tensor", "gptq", 0), "kl": 0.1, "perplexity": 13.25},
        {"part": "grid", "scheme": "w4a16-tensor", "method": "qat",
         "not": "layers.0.attention.qkv in w4a16-tensor: rows share a scale."},
        row("nf4-g64", "rtn", 0.03),
    ]  # fmt: skip
    text = benchmark("methods_tables").of_format(rows, "int4")
    assert text.splitlines() == [
        "| format | bits | rtn | gptq |",
        "|---|---|---|---|",
        "| w4a16-g128 | 4.12 | 0.04000 (12.50) | 0.01000 (12.50) |",
        "| w4a16-tensor | 4.12 | 0.20000 (12.50) | 0.10000 (13.25) |",
        "",
        "- No `qat` of w4a16-tensor: rows share a scale.",
    ]


def test_a_method_beside_rounding(benchmark: Script) -> None:
    rows = [row("w4a16-g128", "rtn", 0.04), row("w4a16-g128", "gptq", 0.01)]
    text = benchmark("methods_tables").of_method(rows, "gptq")
    assert "| w4a16-g128 | 4.12 | 0.04000 | 0.01000 | 75% | 12.500 | 12.500 |" in text


def test_every_case_is_measured_or_says_why_not(benchmark: Script) -> None:
    methods = benchmark("methods")
    cases = list(methods.grid())
    assert len(cases) == len(set(cases)) == len(methods.FORMATS) * 7
    reasons = {(c.scheme, c.method): methods.why_not(c) for c in cases}
    assert reasons["w4a16-g128", "gptq"] is None
    assert reasons["w8a8", "smoothquant"] is None
    assert "nothing to smooth" in reasons["w4a16-g128", "smoothquant"]
    assert reasons["w4a16-g128", "qat"] is None
    assert "it takes long" in reasons["w4a16-channel", "qat"]


def test_planted_outliers_change_no_bit(benchmark: Script) -> None:
    """The model that SmoothQuant is measured on computes what it did."""
    from penstock.bench.reader import LocalReader

    methods = benchmark("methods")
    source = open_source(resolve("stories"))
    ids = list(range(3, 40))
    plain, planted = (
        LocalReader(methods.runtime_of(s)).read(ids, 1).logits
        for s in (source, methods.with_outliers(source))
    )
    assert torch.equal(plain, planted)


def test_the_pages_hold_the_results(benchmark: Script, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    methods = json.loads((RESULTS / "methods-stories.json").read_text())
    pages = benchmark("methods_tables").write_pages(methods, docs)
    drift = json.loads((RESULTS / "drift-stories.json").read_text())["results"]
    pages += benchmark("pages").fill(docs, "drift", benchmark("drift").tables(drift))
    engines = json.loads((RESULTS / "engines-qwen2.5-0.5b.json").read_text())["results"]
    assert all(map(benchmark("engine_proof").holds, engines))
    pages += benchmark("pages").fill(docs, "engines", benchmark("engine_proof").tables(engines))
    assert len(pages) >= 20
    for page in pages:
        assert page.read_text() == (ROOT / "docs" / page.relative_to(docs)).read_text(), page.name
