"""Faults of servers are planted, and found; a server that is well shows none."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import Running, serving
from typer.testing import CliRunner

from penstock.bench.finding import Finding
from penstock.bench.served import ServedCheckup, check_up_served
from penstock.bench.served.checks import Seen, leaks, slow_steps, uneven_tokens
from penstock.bench.served.limits import Limits
from penstock.bench.served.quality import TEXT, Losses, probe_model, quality_findings, shuffled
from penstock.bench.served.scrape import Distribution, Span, models_in, parse
from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.server import ServerConfig

QUICK = 0.05
"""Seconds between two looks."""


@contextmanager
def server(**engine: Any) -> Iterator[Running]:
    with serving(ServerConfig(port=0), **engine) as running:
        yield running


def ask(running: Running, **body: Any) -> Any:
    with running.client() as client:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        return client.post(path, json={"model": "stories", **body}).json()


def together(running: Running, bodies: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(len(bodies)) as threads:
        list(threads.map(lambda body: ask(running, **body), bodies))
    running.rest()


def found(
    running: Running, look: Callable[..., ServedCheckup] = check_up_served, **how: Any
) -> dict[str, Finding]:
    """By what was checked; two of one check would hide each other."""
    checked = look(running.url, seconds=None, **how)
    names = [one.check for one in checked.findings]
    assert len(set(names)) == len(names), checked.findings
    return {one.check: one for one in checked.findings}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks follow one another."""
    monkeypatch.setattr("penstock.bench.served.checkup.REST_S", 0.0)


def test_a_server_that_is_well() -> None:
    with server() as running:
        together(running, [{"prompt": f"Once {i}", "max_tokens": 30} for i in range(8)])
        checked = check_up_served(running.url, probe=True, limits=Limits(10_000, 10_000))
    # a story goes on, and what else this machine does may take its time
    usual = ("answers", "steps", "floor")
    assert [one for one in checked.findings if one.check not in usual] == [] and checked.runs
    assert checked.requests == 8 and checked.since_start and checked.model == "stories"
    assert checked.checks == [
        "health", "first token", "between tokens", "cache", "leak", "structure", "answers",
        "refusals", "steps", "prefixes", "quality", "repeats",
    ]  # fmt: skip


def test_first_tokens_that_wait_in_the_queue() -> None:
    with server(max_num_seqs=1) as running:
        bodies = [{"prompt": f"Once {i}", "max_tokens": 200} for i in range(8)]
        together(running, bodies)
        one = found(running, limits=Limits(20.0, 10_000))["first token"]
        assert one.level == "hint" and "in the queue" in one.text
        blocker = threading.Thread(target=together, args=(running, bodies))
        blocker.start()
        while running.llm.stats()["requests_waiting"] < 2:
            pass
        busy = found(running, limits=Limits(20.0, 10_000))["first token"]
        blocker.join()
    assert (
        "They waited for others to end, of which 1 ran at once: raise --max-num-seqs" in busy.text
    )


def test_first_tokens_that_wait_for_long_prompts() -> None:
    with server(enable_prefix_caching=True) as running:
        bodies = [{"prompt": [3 + (i * j) % 999 for i in range(900)], "max_tokens": 2}
                  for j in range(7, 19)]  # fmt: skip
        for body in bodies:
            ask(running, **body)
        running.rest()
        findings = found(running, limits=Limits(2.0, 10_000))
    assert "Prompts had 900 tokens on average" in findings["first token"].text
    assert "should stand first, word by word" in findings["first token"].text
    assert "prompts have 900 on average" in findings["prefixes"].text


def test_tokens_that_wait_for_prompts() -> None:
    """All of them, where all are slow; of some that are, see below."""
    with server(max_num_batched_tokens=2048, enable_prefix_caching=False) as running:
        long = {"prompt": [5] * 900, "max_tokens": 1}
        together(running, [{"prompt": "Once", "max_tokens": 300}] * 3 + [long] * 6)
        between = running.llm.engine.ledger
        assert between.prefill.forward_s > 0
        all_slow = found(running, limits=Limits(10_000, 0.01))["between tokens"]
    assert "All are slow: lower --max-num-seqs" in all_slow.text  # nothing runs now


def test_a_cache_that_is_too_small() -> None:
    with server(num_blocks=33, max_num_seqs=12, preemption_mode="recompute") as running:
        ask(running, prompt="Once", n=12, max_tokens=250, ignore_eos=True)  # there at once
        one = found(running, limits=Limits(10_000, 10_000))["cache"]
    assert "The cache of 33 blocks is too small" in one.text
    assert "(0 of them swapped" in one.text and "gave way 0 times" not in one.text


def test_blocks_that_leak() -> None:
    with server() as running:
        ask(running, prompt="Once", max_tokens=3)
        running.rest()
        assert "leak" not in found(running)
        held = running.llm.engine.pool.allocate(7)
        assert held is not None
        one = found(running)["leak"]
        running.llm.engine.pool.release(held)
    assert one.level == "bug" and "but 7 blocks of" in one.text


def test_pinned_blocks_are_no_leak() -> None:
    with server(model="stories-chat") as running:
        part = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}
        body = {
            "model": "stories", "max_tokens": 3, "messages": [{"role": "user", "content": [part]}]
        }  # fmt: skip
        with running.client() as client:
            assert client.post("/v1/messages", json=body).status_code == 200
        assert running.rest()["pinned_blocks"] > 0
        assert "leak" not in found(running)
        held = running.llm.engine.pool.allocate(2)
        assert held is not None
        assert "but 2 blocks of" in found(running)["leak"].text
        running.llm.engine.pool.release(held)


def test_a_short_context() -> None:
    with server(max_model_len=96) as running:
        checked = check_up_served(running.url, probe=True)
    assert checked.runs and {"quality", "repeats"} <= set(checked.checks)


def test_drafts_that_are_wrong() -> None:
    asked = {
        "method": "self", "draft_layers": 1, "num_speculative_tokens": 4, "adaptive": False
    }  # fmt: skip
    with server(speculative_config=asked) as running:
        bodies = [
            {"prompt": "Once upon", "max_tokens": 100, "temperature": 1.5, "seed": i}
            for i in range(6)
        ]
        together(running, bodies)
        one = found(running, limits=Limits(10_000, 10_000))["drafts"]
    assert "guessed tokens were right" in one.text and "penstock doctor MODEL" in one.text


def test_forms_without_an_end() -> None:
    with server() as running:
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 50}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        bodies = [{"prompt": "Once", "max_tokens": 8, "response_format": form}] * 6
        together(running, bodies)
        assert "6 of 6 outputs that were held to a form" in found(running)["structure"].text


def test_forms_that_are_new_each_time() -> None:
    with server() as running:
        for i in range(12):
            schema = {"type": "object", "properties": {f"x{i}": {"type": "boolean"}},
                      "required": [f"x{i}"], "additionalProperties": False}  # fmt: skip
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            ask(running, prompt="Once", max_tokens=60, response_format=form)
        assert "12 forms were compiled for 12 outputs" in found(running)["forms"].text


def test_answers_that_are_cut_off_and_refused() -> None:
    with server() as running:
        for _ in range(6):
            ask(running, prompt="Once", max_tokens=2)
            ask(running, prompt=[5] * 2000, max_tokens=2)
        findings = found(running)
    assert "6 of 6 answers were cut off" in findings["answers"].text
    assert "(context_length): prompts were longer than the context" in findings["refusals"].text


def test_an_engine_that_died() -> None:
    with server() as running:
        ask(running, prompt="Once", max_tokens=2)
        running.rest()

        def fails() -> None:
            raise RuntimeError("planted")

        running.llm.engine.step = fails  # type: ignore[method-assign,assignment]
        ask(running, prompt="Once", max_tokens=2)
        checked = check_up_served(running.url)
    faults = [one.text for one in checked.findings if one.level == "fault"]
    assert not checked.runs
    assert any("/health says HTTP 503" in text for text in faults)


def test_what_happens_in_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters before don't count."""
    with server() as running:
        for _ in range(6):
            ask(running, prompt="Once", max_tokens=2)
        checked = check_up_served(running.url, seconds=QUICK)
    assert checked.requests == 0 and not checked.since_start and checked.findings == []


METRICS = """\
process_resident_memory_bytes 1e9
process_start_time_seconds 5.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
penstock:steps_total{engine="0",model_name="m"} 4.0
penstock:kv_cache_blocks{engine="0",model_name="m"} 9.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.1",model_name="m"} 6.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="m"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.5",model_name="m"} 8.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf",model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.0
vllm:time_to_first_token_seconds_sum{engine="1",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="other"} 3.0
"""


def test_reading() -> None:
    assert models_in(METRICS) == ["m", "other"]
    sample = parse(METRICS, 1.0, "m")
    first = Span(None, sample, sample).distribution("vllm:time_to_first_token_seconds")
    assert (first.edges, first.counts, first.total) == ((0.1, 0.5, math.inf), (8, 12, 14), 3.0)
    assert first.quantile(0.5) == pytest.approx(0.1 * 7 / 8)
    assert first.quantile(10 / 14) == pytest.approx(0.1 + 0.4 * 0.5)
    assert first.quantile(0.99) == 0.5  # beyond the last edge nothing is known
    assert (first.told(0.99, str), first.told(0.5, str)[:6]) == ("more than 0.5", "0.0875")
    assert first.mean == pytest.approx(3 / 14)
    assert Distribution().quantile(0.5) == 0.0 == Distribution().mean
    assert sample.sum("process_resident_memory_bytes") == 1e9
    assert not sample.has("vllm:request_success_total")
    later = parse(METRICS.replace("} 4.0", "} 5.0"), 2.0, "m")
    span = Span(sample, later, sample)
    assert span.count("penstock:steps") == 1.0
    assert span.distribution("vllm:time_to_first_token_seconds").counts == (0, 1, 1)
    again = parse(METRICS.replace("} 4.0", "} 3.0"), 2.0, "m")  # it was begun anew
    assert Span(sample, again, sample).count("penstock:steps") == 3.0
    bare = 'x_bucket{a="b"} 4.0\nx_sum NaN\nvllm:kv_cache_usage_perc NaN\npenstock:steps_total 1\n'
    odd = Span(None, parse(bare, 0.0, None), parse(bare, 0.0, None))
    assert odd.distribution("x").count == 0 and list(leaks(Seen(odd, Limits()))) == []
    with pytest.raises(ConfigError, match="isn't in Prometheus' text format"):
        parse("this is no { metric", 0.0, None)


def told(check: Callable[[Seen], Iterator[Finding]], metrics: str, **limits: float) -> str:
    """What a check says of these metrics, taken since a server's start."""
    sample = parse(metrics, 0.0, None)
    return " ".join(one.text for one in check(Seen(Span(None, sample, sample), Limits(**limits))))


BETWEEN = """vllm:inter_token_latency_seconds_bucket{le="0.01"} 900.0
vllm:inter_token_latency_seconds_bucket{le="0.5"} 1000.0
vllm:inter_token_latency_seconds_bucket{le="+Inf"} 1000.0
vllm:inter_token_latency_seconds_sum 30.0
"""


def test_some_tokens_that_are_late() -> None:
    said = told(uneven_tokens, BETWEEN)
    assert "1% of tokens came more than 451 ms after" in said and "within 5.56 ms" in said
    assert "Those waited for others' prompts" in said
    assert told(uneven_tokens, BETWEEN, itl_ms=600) == ""


STEPS = """penstock:steps_total 100.0
penstock:step_seconds_total{phase="decode",cause="forward"} 0.6
penstock:step_seconds_total{phase="decode",cause="sample"} 0.3
penstock:step_seconds_total{phase="decode",cause="wait"} 0.1
penstock:step_seconds_total{phase="prefill",cause="forward"} 9.0
penstock:floor_ratio{phase="decode"} 0.31
"""


def test_steps_that_take_longer_than_their_forward_pass() -> None:
    said = told(slow_steps, STEPS)
    assert "40% of decoding steps' time was spent outside the forward pass" in said
    assert "most of it on sample (30%). Samplers that go over" in said
    assert "Decoding reached 31% of what this machine allows" in said
    assert (
        told(slow_steps, STEPS.replace("steps_total 100.0", "steps_total 10000.0")) == ""
    )  # short


def test_leaks_of_one_instance() -> None:
    """Of three with 100 blocks each."""
    lines = [f'penstock:kv_cache_blocks{{engine="{i}"}} 100.0' for i in range(3)]
    lines += [f'vllm:kv_cache_usage_perc{{engine="{i}"}} {0.07 * (i == 1)}' for i in range(3)]
    assert "but 7 blocks of 300 are in use" in told(leaks, "\n".join([*lines, ""]))


def test_an_idle_process_that_grows() -> None:
    begin = parse(METRICS, 0.0, "m")
    last = parse(METRICS.replace("bytes 1e9", "bytes 1.2e9"), 30.0, "m")
    (one,) = leaks(Seen(Span(None, last, begin), Limits()))
    assert one.level == "bug" and "grew by 191 MiB in 30 s" in one.text
    worked = parse(METRICS.replace("1e9", "1.2e9").replace("} 4.0", "} 9.0"), 30.0, "m")
    assert list(leaks(Seen(Span(None, worked, begin), Limits()))) == []


# ── what a model knows ───────────────────────────────────────────────────────────────────────


def test_words_in_no_order() -> None:
    assert sorted(shuffled(TEXT).split()) == sorted(TEXT.split()) and shuffled(TEXT) != TEXT
    good = quality_findings(Losses(300.0, 150), Losses(1200.0, 160), 126, 9.0)
    assert good == []
    for ordered, mixed in ((1300.0, 1310.0), (math.nan, 1200.0), (1200.0, 1600.0)):
        (one,) = quality_findings(Losses(ordered, 150), Losses(mixed, 160), 126, 9.0)
        assert one.level == "mismatch"


def test_models_that_know_nothing(tmp_path: Path) -> None:
    known = probe_model("stories")
    assert known.findings == [] and known.ordered + 4 < known.mixed
    (one,) = probe_model("stories", load_format="dummy").findings
    assert "hardly knows English words from their order" in one.text


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    import shutil

    from tests.models.stories import STORIES

    folder = tmp_path / "mixed"
    shutil.copytree(STORIES, folder)
    file = folder / "tokenizer.json"
    held = json.loads(file.read_text())
    vocab = held["model"]["vocab"]
    names = sorted(vocab, key=lambda name: int(vocab[name]))[300:]
    ids = [vocab[name] for name in names]
    vocab |= dict(zip(names, ids[1:] + ids[:1], strict=True))
    file.write_text(json.dumps(held))
    result = CliRunner().invoke(app, ["doctor", str(folder), "--probe"])
    assert result.exit_code == 1
    assert "aren't of one model" in " ".join(result.output.split())


# ── the command ──────────────────────────────────────────────────────────────────────────────


def test_the_command() -> None:
    with server() as running:
        for _ in range(6):
            ask(running, prompt="Once", max_tokens=2)
        running.rest()
        look = ["doctor", "--base-url", running.v1]
        shown = CliRunner().invoke(app, look)
        data = CliRunner().invoke(app, [*look, "--json", "--probe"])
        other = CliRunner().invoke(app, [*look, "--served-model", "storys"])
    said = " ".join(shown.output.split())
    assert shown.exit_code == 0 and "hint, answers: 6 of 6 answers were cut off" in said
    assert "Requests that ended 6, since it started" in said
    served = json.loads(data.output)["served"]
    assert served["runs"] and {"quality", "repeats"} <= set(served["checks"])
    assert other.exit_code == 1 and "no model 'storys'" in " ".join(other.output.split())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--seconds", "3"], "--seconds is of a server: give its --base-url too"),
        (["--base-url", "http://127.0.0.1:9", "stories"], "looks at a server, PATH"),
        (["--base-url", "http://127.0.0.1:9", "--seconds", "0"], "--seconds must be above 0"),
        (["--base-url", "http://127.0.0.1:9", "--calibrate"], "--calibrate measures this machine"),
        (["--base-url", "ftp://x"], "isn't an address like"),
        (["--base-url", "http://127.0.0.1:9"], "No connection to 127.0.0.1:9"),
    ],
)
def test_refusals(options: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 1
    assert why in " ".join(result.output.split())
