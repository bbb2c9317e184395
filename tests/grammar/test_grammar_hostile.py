"""Strangers' input: whatever it is, it is taken or refused in time, and nothing crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.grammar.hostile import CASES

from penstock import LLM, SamplingParams
from penstock.errors import BusyError, InvalidSamplingError
from penstock.grammar import Grammars
from penstock.grammar.worker import Worker
from penstock.sampling.structured import StructuredOutputs
from penstock.tokenizer import Tokenizer

ACCEPTED = {
    "short chain of properties",
    "short chain of patterns",
    "properties nested",
    "deep text",
    "kinds",
    "constants",
    "long choices",
}


def test_no_input_ends_the_process() -> None:
    """Compiled and walked a little, each in turn, in a process that would end with a crash."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.grammar.hostile"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    done = {name: (said, seconds) for name, said, seconds in lines if said != "begins"}
    assert run.returncode == 0, f"it ended in {lines[-1][0]!r}: {run.stderr[-500:]}"
    assert list(done) == list(CASES)
    slow = {name: seconds for name, (_, seconds) in done.items() if seconds > 15}
    assert not slow  # a second, and what a busy machine adds
    late = "takes longer than 1 s"
    refused = {name: said for name, (said, _) in done.items() if said and late not in said}
    wrong = {name: refused[name] for name in ACCEPTED & set(refused)}
    assert not wrong
    assert "a chain of" in refused["chain of ref"]
    assert "patterns and formats hold for the same text" in refused["patterns for one text"]
    assert "at line 1: more than 100 repetitions" in refused["GBNF's stars"]


def test_what_takes_too_long_is_refused_and_found_once_it_is_done(
    tokenizer_of: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer_of("stories260K"), 512, [2], deadline_s=0.2, at_once=1)
    grammars.vocabulary.tokens  # noqa: B018 — made before the clock runs
    go_on, build = threading.Event(), grammars._build

    def slow(spec: StructuredOutputs) -> object:
        assert go_on.wait(60)
        return build(spec)

    monkeypatch.setattr(grammars, "_build", slow)
    spec = StructuredOutputs(regex="a+")
    with pytest.raises(InvalidSamplingError, match=r"longer than 0\.2 s to compile"):
        grammars.start(spec)
    start = time.monotonic()
    with pytest.raises(InvalidSamplingError, match=r"longer than 0\.2 s to compile"):
        grammars.start(spec)
    assert time.monotonic() - start < 0.2  # it has had its time
    assert grammars.stats().entries == 1  # the one that goes on
    go_on.set()
    until = time.monotonic() + 60
    while not grammars.stats().compile_s and time.monotonic() < until:
        time.sleep(0.01)
    grammars.start(spec)
    assert grammars.stats().misses == 1
    monkeypatch.undo()


def test_compilations_without_end_leave_room_until_too_many_are(
    tokenizer_of: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's can't be stopped; nothing is known that it takes for ever, so these wait."""
    grammars = Grammars(tokenizer_of("stories260K"), 512, [2], deadline_s=0.5)
    grammars.vocabulary.tokens  # noqa: B018 — made before the clock runs
    end, build, ids = threading.Event(), grammars._build, list[int]()

    def endless(spec: StructuredOutputs) -> object:
        if str(spec.regex).startswith("e"):
            ids.append(threading.get_native_id())
            assert end.wait(60)
        return build(spec)

    monkeypatch.setattr(grammars, "_build", endless)
    for i in range(4):
        with pytest.raises(InvalidSamplingError, match=r"longer than 0\.5 s to compile"):
            grammars.start(StructuredOutputs(regex=f"e{i}"))
        if i < 3:
            grammars.start(StructuredOutputs(regex=f"good{i}"))
    with pytest.raises(BusyError, match="the compiler is busy: 4 others have taken"):
        grammars.start(StructuredOutputs(regex="one more"))
    if sys.platform == "linux":
        assert [os.getpriority(os.PRIO_PROCESS, one) for one in ids] == [19] * 4
        assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    grammars.start(StructuredOutputs(regex="good0"))  # what was compiled is there
    end.set()
    until = time.monotonic() + 60
    while grammars.stats().misses > len(grammars.stats().compile_s) + 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    grammars.start(StructuredOutputs(regex="one more"))
    monkeypatch.undo()


def test_a_worker_has_a_large_stack_and_leaves_other_threads_theirs() -> None:
    before = threading.stack_size()
    sizes: list[int] = []
    worker, done = Worker(1, 60.0), threading.Event()

    def look() -> None:
        maps = Path("/proc/self/smaps").read_text() if sys.platform == "linux" else ""
        lines = [line for line in maps.splitlines() if line.startswith("Size:")]
        sizes.extend(int(line.split()[1]) << 10 for line in lines)
        done.set()

    assert worker.run(look, 1.0)
    assert done.wait(60)
    assert threading.stack_size() == before
    if sys.platform == "linux":
        assert max(sizes) >= 1 << 30


def test_a_text_that_can_be_read_in_ever_more_ways_ends_its_own_request() -> None:
    """Each token takes longer than the one before; those beside it must not wait for long."""
    llm = LLM()
    ambiguous = {"grammar": 'root ::= "a" root | root "a" | root root | "a"'}
    slow = SamplingParams(max_tokens=400, min_tokens=390, seed=1, structured_outputs=ambiguous)
    plain = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    start = time.thread_time()
    cut, whole = llm.generate(["x", "Once"], [slow, plain])
    assert time.thread_time() - start < 8
    assert "too many ways to read them" in str(cut.error)
    assert 100 < len(cut.outputs[0].token_ids) < 400
    assert len(whole.outputs[0].token_ids) == 400


def test_a_text_that_is_too_long_to_follow_is_refused() -> None:
    for form, place in (
        ({"choice": ["a", "x" * 50_000]}, r"choice\[1\] has 50,000"),
        ({"json": {"const": "x" * 50_000}}, "50,000 characters"),
        ({"json": {"properties": {"a": {"enum": ["x" * 50_000]}}}}, "/properties/a/enum"),
    ):
        with pytest.raises(InvalidSamplingError, match=place):
            LLM().engine.intake.compile(StructuredOutputs.of(form))
