"""`penstock tune`: what it says, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

Run = Callable[..., Result]
SMALL = ("--input-len", 24, "--output-len", 8, "--max-num-seqs", 2, "--seconds", 0.1)


def test_what_a_server_is_started_with(penstock: Run, tmp_path: Path) -> None:
    kept = tmp_path / "made" / "t.json"
    result = penstock("tune", "stories", *SMALL, "--goodput", "ttft:9000 itl:9000", "--json", kept)
    assert result.exit_code == 0, result.output
    found = json.loads(kept.read_text())
    chunk = found["best"]["chunk"]
    assert result.stdout.split() == (
        f"penstock serve stories --max-num-seqs 2 --max-num-batched-tokens {chunk}".split()
    )
    said = " ".join(result.stderr.split())
    assert "99% of the requests within: first token 9000 ms, gap 9000 ms" in said
    assert "steps of 2,048, 1 at once" in said and "More might hold as well" in said
    assert found["setup"]["levels"] == {"ttft": 9.0, "itl": 9.0}
    assert len(found["points"]) == 10


def test_levels_that_nothing_keeps(penstock: Run) -> None:
    result = penstock("tune", "stories", *SMALL, "--goodput", "ttft:0.0001")
    assert result.exit_code == 1 and not result.stdout
    assert "Not even one request at a time keeps these limits" in result.stderr


def test_what_is_refused(penstock: Run) -> None:
    for arguments, says in (
        (["--goodput", ""], "--goodput is empty: say chat, voice or limits such as ttft:500"),
        (["--goodput", "ttfs:3"], "isn't one of chat, voice, ttft:MS, tpot:MS, itl:MS, e2el:MS"),
        (["--input-len", 9000], "9000 tokens in the cache and 128 to generate are 9128"),
        (["nowhere/at/all"], "nowhere/at/all"),
    ):
        result = penstock("tune", *arguments)
        assert result.exit_code == 1, result.output
        assert says in " ".join(result.stderr.split())
