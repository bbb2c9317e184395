"""Variants of products are timed, chosen and replayed; those that mean nothing are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import EngineFolderError
from penstock.pipeline import tuning
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.tuning import Timing, Timings, VariantTiming, candidates, choose
from penstock.runtime.engine_folder import TIMINGS, digest, sha256
from penstock.runtime.program import LinearVariant
from penstock.runtime.tuned import Tuned
from tests.pipeline.conftest import Build, needs_native

FAR, NEAR = LinearVariant(ahead_cache=2), LinearVariant(ahead_bytes=2048)


def timings(*entries: tuple[str, int, LinearVariant, float], waited: float = 0.0) -> Timings:
    steps = (Timing(1, 1, 1.0), Timing(8, 1, 2.0))
    return Timings(steps, waited, tuple(VariantTiming(*entry) for entry in entries))


def test_what_is_chosen() -> None:
    """Of each form and number of rows the fastest, where it is clearly faster than the default."""
    found = timings(
        ("a", 1, LinearVariant(), 1.0), ("a", 1, FAR, 0.90), ("a", 1, NEAR, 0.94),
        ("a", 8, LinearVariant(), 1.0), ("a", 8, FAR, 0.96),
        ("b", 1, LinearVariant(), 1.0), ("b", 1, FAR, 1.2), ("b", 1, NEAR, 0.5),
    )  # fmt: skip
    chosen = choose(found, (1, 8, 8))
    assert chosen.variants == (("a", 1, FAR), ("a", 8, LinearVariant()), ("b", 1, NEAR))
    disturbed = timings(("a", 1, LinearVariant(), 1.0), ("a", 1, FAR, 0.5), waited=0.5)
    assert choose(disturbed, (1, 8, 8)).variants == ()
    assert Tuned.from_dict(json.loads(json.dumps(chosen.as_dict()))) == chosen


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9, 16, 17, 512])
def test_the_default_is_tried_first_and_nothing_twice(rows: int) -> None:
    tried = candidates(rows)
    assert tried[0] == LinearVariant() and len(set(tried)) == len(tried)


@needs_native
def test_a_second_build_replays_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "VARIANT_MARGIN", 2.0)  # whatever was fastest
    first, second = (
        build(
            BuildOptions(
                model="stories", output=tmp_path / name, profile=(1, 8, 32), max_num_seqs=8
            )
        )
        for name in "ab"
    )
    assert [report["timings"] for report in (first, second)] == ["measured", "replayed"]
    assert first["chosen"]["variants"] and first["chosen"] == second["chosen"]
    kept = json.loads((tmp_path / "a" / TIMINGS).read_text())
    assert kept["variants"] == json.loads((tmp_path / "b" / TIMINGS).read_text())["variants"]
    forms = {entry["product"] for entry in kept["variants"]}
    assert len(forms) == 5 and all(form.startswith("linear") for form in forms)
    assert {entry["rows"] for entry in kept["variants"]} == {1, 2, 4, 8, 16, 32}


@needs_native
def test_where_steps_take_long_nothing_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_VARIANTS_S", 0.0)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    report = build(
        BuildOptions(model="stories", output=tmp_path / "e", profile=(1, 8, 8), max_num_seqs=8)
    )
    assert report["chosen"]["variants"] == () and report["chosen"]["threads"]


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what was chosen, and every sum that would notice."""
    found = json.loads((folder / TIMINGS).read_text())
    change(found["chosen"])
    (folder / TIMINGS).write_text(json.dumps(found))
    manifest = json.loads((folder / "engine.json").read_text())
    size = (folder / TIMINGS).stat().st_size
    manifest["files"][TIMINGS] = {"bytes": size, "sha256": sha256(folder / TIMINGS)}
    manifest["digest"] = digest(manifest)
    (folder / "engine.json").write_text(json.dumps(manifest))


@needs_native
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"stride_bytes": 1}, "unexpected keyword argument 'stride_bytes'"),
        ({"ahead_cache": 7}, "ahead_cache=7 isn't a number from 0 to 3"),
        ({"part_bytes": -5}, "part_bytes=-5 isn't a number from 0 to"),
    ],
)
def test_one_that_means_nothing_is_refused(
    engine_of: Build, tmp_path: Path, how: dict[str, int], words: str
) -> None:
    folder = Path(shutil.copytree(engine_of(), tmp_path / "engine"))
    edit(folder, lambda chosen: chosen.update(variants=[["linear", 1, how]]))
    with pytest.raises(EngineFolderError, match=words):
        LLM(folder)


@needs_native
def test_one_of_another_plan_is_refused(engine_of: Build, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(engine_of(), tmp_path / "engine"))
    edit(folder, lambda chosen: chosen.update(variants=[["linear of nothing", 1, {}]]))
    with pytest.raises(EngineFolderError, match="'linear of nothing', which isn't in the plan"):
        LLM(folder)


@needs_native
def test_those_of_other_passes_are_left_out_where_heads_guess(
    engine_of: Build, tmp_path: Path
) -> None:
    """Its steps are recorded anew, then fused by the decoder itself, and have other products."""
    folder = Path(shutil.copytree(engine_of(passes=()), tmp_path / "engine"))
    plain = LLM(folder)
    timed = plain.runtime.runner._forward.products  # type: ignore[attr-defined]
    how = {"ahead_cache": 2}
    edit(folder, lambda chosen: chosen.update(variants=[[product, 1, how] for product in timed]))
    guessing = LLM(folder, speculative_config={"method": "medusa", "model": "stories-medusa"})
    own = guessing.runtime.runner._forward.products  # type: ignore[attr-defined]
    assert set(timed) - set(own) and set(timed) & set(own)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    (a,), (b,) = (llm.generate("Once upon a time", greedy) for llm in (plain, guessing))
    assert a.outputs[0].token_ids == b.outputs[0].token_ids
