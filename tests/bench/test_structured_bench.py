"""`penstock bench structured`: what it reads, counts, judges and times."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from pathlib import Path

import pytest

from penstock.bench.structured import benchmark, compiling, outputs, speed
from penstock.bench.structured.benchmark import Options
from penstock.bench.structured.runs import PROMPT, Answer, jobs_of, pick
from penstock.bench.structured.schemas import Schema, built_in, read_schemas
from penstock.config import EngineConfig
from penstock.errors import ConfigError, RequestError
from penstock.runtime import Runtime, load_runtime

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
REFUSED = {"type": "array", "uniqueItems": True}


def nothing(*_: object) -> None:
    """Instead of showing progress."""


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return Options(None, 4, 24, 1, 0).config("stories")


@pytest.fixture(scope="module")
def runtime(config: EngineConfig) -> Runtime:
    return load_runtime(config)


@pytest.fixture(scope="module")
def prompt(runtime: Runtime) -> list[int]:
    assert runtime.tokenizer is not None
    return runtime.tokenizer.encode(PROMPT)


# ── schemas ──────────────────────────────────────────────────────────────────────────────────


def archive_of(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_every_form_of_a_collection(tmp_path: Path) -> None:
    """Alone, in a list, by lines, wrapped with its tests, as text, in a folder, in an archive."""
    (tmp_path / "a.json").write_text(json.dumps(NUMBER))
    (tmp_path / "b.json").write_text(json.dumps([NUMBER, {"schema": REFUSED, "tests": []}]))
    (tmp_path / "deeper").mkdir()
    lines = [json.dumps({"json_schema": json.dumps(NUMBER)}), "", "true"]
    (tmp_path / "deeper" / "c.jsonl").write_text("\n".join(lines))
    (tmp_path / "notes.txt").write_text("not JSON")
    want = [
        Schema("a", NUMBER),
        Schema("b 1", NUMBER),
        Schema("b 2", REFUSED),
        Schema("c 1", NUMBER),
        Schema("c 2", True),
    ]
    assert read_schemas(tmp_path) == want
    assert read_schemas(tmp_path / "b.json") == want[1:3]
    files = {p.name: p.read_text() for p in sorted(tmp_path.rglob("*.*")) if p.is_file()}
    assert read_schemas(archive_of(tmp_path / "all.tar.xz", files)) == want


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.json", None, "no such file"),
        ("a.json", "{", "isn't JSON"),
        ("a.json", "[3]", "a is 3, which is no schema"),
        ("a.json", '{"schema": "{"}', '"schema" isn\'t JSON'),
        ("a.txt", "{}", "holds no schema"),
        ("a.jsonl", "", "holds no schema"),
        ("a.tar.xz", "no archive", "can't be read"),
    ],
)
def test_what_holds_no_schemas(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_schemas(tmp_path / name)


def test_picks_are_spread() -> None:
    schemas = [Schema(str(i), True) for i in range(10)]
    assert [s.name for s in pick(schemas, 5)] == ["0", "2", "4", "6", "8"]
    assert [s.name for s in pick(schemas[:2], 5)] == ["0", "1", "0", "1", "0"]


# ── compiling ────────────────────────────────────────────────────────────────────────────────


def test_what_compiles_and_what_does_not(runtime: Runtime) -> None:
    schemas = [
        Schema("a", NUMBER),
        Schema("b", REFUSED),
        Schema("c", {"properties": {"x": REFUSED}}),
    ]
    found = compiling.compile_all(runtime, schemas, nothing)
    assert [one.name for one in found.schemas] == ["a"]
    ((reason, same),) = found.refused.items()
    assert reason == "'uniqueItems' can't be held to while a text is written"
    assert same.names == ["b", "c"] and "llguidance" in same.message
    assert found.hits == 3  # a refusal is remembered too
    told = found.as_dict()
    assert (told["schemas"], told["compiled"]) == (3, 1)
    assert told["compile_ms"]["max"] == pytest.approx(max(found.seconds) * 1e3)
    with pytest.raises(ConfigError, match="None of 1 schemas"):
        compiling.compile_all(runtime, schemas[1:2], nothing)


def test_all_of_ours_compile(runtime: Runtime) -> None:
    assert compiling.compile_all(runtime, built_in(), nothing).schemas == built_in()


# ── outputs ──────────────────────────────────────────────────────────────────────────────────


def answer(text: str, reason: str | None = "stop", schema: object = NUMBER) -> Answer:
    error = None if reason else RequestError("broke at 12 of 30")
    return Answer(text, Schema("s", schema), text, [1, 2], reason, error)  # type: ignore[arg-type]


def test_outputs_are_counted_and_judged() -> None:
    pytest.importorskip("jsonschema", reason="judges outputs")
    given = ["7", "77", "777", "[", '"x"']
    answers = [answer(text) for text in given]
    answers += [answer("7", "length"), answer("", None), answer("", None)]
    answers.append(answer("1", schema={"$ref": "https://nowhere.example/schema"}))
    found = outputs.judge(answers, 2.0)
    assert (found.runs, found.finished, found.cut, found.tokens) == (9, 6, 1, 18)
    assert dict(found.failed) == {"broke at N of N": 2}
    assert found.valid == 2
    assert [one["output"] for one in found.invalid] == ["777", "[", '"x"']
    assert "maximum" in found.problems[0] and "isn't JSON" in found.problems[1]
    assert len(found.unread) == 1
    assert found.as_dict()["output_tokens_per_s"] == 9.0


@pytest.mark.parametrize(("text", "valid"), [("32.33", True), ("32.335", False), ("1e-999", False)])
def test_numbers_are_judged_as_they_are_written(text: str, valid: bool) -> None:
    """By floats 32.33 / 0.01 isn't whole."""
    pytest.importorskip("jsonschema", reason="judges outputs")
    cents = {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0, "maximum": 100.0}
    found = outputs.judge([answer(text, schema=cents)], 1.0)
    assert (found.valid == 1) is valid and not found.unread


def test_formats_are_judged() -> None:
    pytest.importorskip("jsonschema", reason="judges outputs")
    dated = {"type": "string", "format": "date"}
    given = [answer('"2026-02-28"', schema=dated), answer('"2026-02-31"', schema=dated)]
    assert outputs.judge(given, 1.0).valid == 1


def test_without_jsonschema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = outputs.judge([answer("777")], 1.0)
    assert (found.finished, found.validated, found.as_dict()["validated_by"]) == (1, False, None)


def test_the_model_writes_what_is_valid(
    config: EngineConfig, runtime: Runtime, prompt: list[int]
) -> None:
    pytest.importorskip("jsonschema", reason="judges outputs")
    meter = benchmark.Meter(config, runtime)
    number = {"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 2}
    schemas = [Schema("a", NUMBER), Schema("b", number), Schema("refused", REFUSED)]
    found = outputs.run_outputs(meter, schemas, 12, 24, 3, prompt, nothing)
    assert found.finished + found.cut == 8
    assert found.valid == found.finished > 3
    assert list(found.failed.values()) == [4]  # each a request's error
    again = outputs.run_outputs(meter, schemas, 12, 24, 3, prompt, nothing)
    assert again.tokens == found.tokens


# ── speed ────────────────────────────────────────────────────────────────────────────────────


def test_held_and_free_steps_are_the_same_steps(
    config: EngineConfig, runtime: Runtime, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "WAVES", 2)
    without = benchmark.without_jumps(config)
    found = speed.run_overhead(
        without, (runtime, load_runtime(config)), built_in(), 12, 0, 2, prompt, nothing
    )
    assert len(found.rounds) == 2
    for pair in found.pairs:
        assert pair.held.size == pair.free.size
        assert pair.held.size.queries == [1] * 4
    steps = sum(map(len, found.rounds))
    assert len(found.masks) == steps  # those of prompts and of smaller batches aren't among them
    assert all(len(one.fill_s) == 4 for one in found.masks)
    told = found.as_dict()
    waited = sum(one.wait_s for one in found.masks)
    held = sum(pair.held.seconds for pair in found.pairs)
    assert told["waited_share"] == pytest.approx(waited / held)
    assert all(sum(one.wait_s for one in p.masks) <= p.held.seconds for p in found.pairs)
    assert told["overhead"] == pytest.approx(found.share)
    assert told["mask_ms"]["p99"] >= told["mask_ms"]["p50"] > 0


def test_a_batch_that_is_never_full(
    config: EngineConfig, runtime: Runtime, prompt: list[int]
) -> None:
    with pytest.raises(ConfigError, match="before 4 of them decoded together"):
        speed.run_overhead(
            config, (runtime, load_runtime(config)), [Schema("a", {"const": 1})], 24, 0, 1,
            prompt, nothing,
        )  # fmt: skip


def test_jumps_change_no_output(config: EngineConfig, runtime: Runtime, prompt: list[int]) -> None:
    configs = (config, benchmark.without_jumps(config))
    found = speed.run_jumps(configs, runtime, built_in(), 24, 0, 1, prompt, nothing, compact=True)
    (on,), (off,) = found.on, found.off
    assert found.differing == []
    assert on.tokens == off.tokens and off.jumped == 0
    assert on.jumped > 0.2 * on.tokens and on.steps < off.steps


def test_an_output_that_differs_is_told(
    config: EngineConfig, runtime: Runtime, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(([[1], [2]], [[1], [3]]))
    one = speed.JumpRound(1.0, 5, 2, 1)
    monkeypatch.setattr(speed, "_jump_round", lambda *_: (one, next(calls)))
    monkeypatch.setattr(speed, "WAVES", 1)
    monkeypatch.setattr(speed, "pick", lambda *_: [Schema("a", NUMBER), Schema("b", NUMBER)])
    found = speed.run_jumps((config, config), runtime, [], 24, 0, 1, prompt, nothing, compact=False)
    assert found.differing == ["b"] and found.as_dict()["outputs_equal"] is False


def test_requests() -> None:
    (job,) = jobs_of([Schema("a", NUMBER)], 8, 5, compact=True)
    structure = job.params.structure
    assert structure is not None and structure.disable_any_whitespace
    assert json.loads(structure.text) == NUMBER
    assert (job.params.seed, job.params.max_tokens, job.params.temperature) == (5, 8, 1.0)
