"""Load on a fake server whose delays and faults are known."""

from __future__ import annotations

import math
import ssl
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer

from penstock.bench.serve.benchmark import Options, run
from penstock.bench.serve.http_client import Server
from penstock.bench.serve.load import Progress
from penstock.bench.serve.result import ServeResult
from penstock.errors import ConfigError

Fake = Callable[..., FakeServer]
SLACK_S = 0.06  # that a machine with other work on it may add

pytestmark = pytest.mark.alone


def measure(server: FakeServer, **options: Any) -> ServeResult:
    own = {"random": ("input_len", "output_len"), "multi-turn": ("input_len", "output_len"),
           "shared-prefix": ("output_len",)}  # fmt: skip
    lengths = {"input_len": 20, "output_len": 5}
    shaped = own.get(options.get("dataset_name", "random"), ())
    given: dict[str, Any] = {"num_prompts": 10, **{n: lengths[n] for n in shaped}, **options}
    return run(Options(base_url=server.url, **given), lambda progress: None, 1.0)


def median(found: ServeResult, name: str) -> float:
    distribution = found.figures.latencies[name]
    assert distribution is not None
    return distribution.percentiles["p50"]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_known_delays_are_found(fake: Fake, backend: str) -> None:
    server = fake(ttft_s=0.2, itl_s=0.03)
    found = measure(server, backend=backend, max_concurrency=5, tokenizer="stories")
    f = found.figures
    assert (f.completed, f.failed, f.output_tokens, f.peak_concurrency) == (10, 0, 50, 5)
    assert 0.2 <= median(found, "ttft") < 0.2 + SLACK_S
    assert 0.025 < median(found, "itl") < 0.04 and 0.025 < median(found, "tpot") < 0.045
    assert 0.32 <= median(found, "e2el") < 0.32 + SLACK_S
    assert 0.64 <= f.duration_s < 0.64 + 4 * SLACK_S
    assert f.counted_by_server and f.tokens_per_chunk == 1
    assert f.input_tokens == 200 and server.connections <= 6


def test_requests_are_what_was_asked_for(fake: Fake) -> None:
    server = fake(models=("one", "two"))
    measure(server, model="two", ignore_eos=True, extra_body={"min_p": 0.1}, vocab_size=50)
    assert len(server.measured) == 10
    for received in server.measured:
        body = received.body
        assert received.path == "/v1/completions" and body["model"] == "two"
        assert len(body["prompt"]) == 20 and set(body["prompt"]) <= set(range(50))
        assert body["max_tokens"] == 5 and body["ignore_eos"] is True and body["stream"] is True
        assert body["temperature"] == 0 and body["min_p"] == 0.1
        assert body["stream_options"] == {"include_usage": True}
    prompts = [r.body["prompt"] for r in server.measured]
    again = fake()
    measure(again, vocab_size=50)
    assert sorted(prompts) == sorted(r.body["prompt"] for r in again.measured)
    assert "ignore_eos" not in again.measured[0].body


def test_arrivals_do_not_wait_for_answers(fake: Fake) -> None:
    """A server that takes one request at a time, half as fast as they come.

    Latencies grow with the queue, as they do for its users; sent when answered, each would take
    0.1 s.
    """
    server = fake(ttft_s=0.1, at_once=1)
    found = measure(server, num_prompts=14, output_len=1, request_rate=20.0, burstiness=100.0)
    at = np.array([r.at for r in server.measured])
    assert 0.5 < at[-1] - at[0] < 1.0  # 13 gaps of 50 ms
    assert median(found, "ttft") > 0.3
    last = max(found.records, key=lambda r: r.index)
    assert last.ttft_s is not None and last.ttft_s > 0.5


def test_a_cap_on_an_open_loop_counts_as_waiting(fake: Fake) -> None:
    server = fake(ttft_s=0.1)
    found = measure(server, num_prompts=6, output_len=1, request_rate=1000.0, max_concurrency=2)
    assert found.figures.peak_concurrency == 2
    times = sorted(r.ttft_s for r in found.records if r.ttft_s is not None)
    assert times[0] < 0.1 + SLACK_S and times[-1] > 0.29
    assert found.figures.lag is not None and found.figures.lag.percentiles["p50"] < 0.05
    everything = measure(fake(ttft_s=0.1), output_len=1, request_rate=math.inf)
    assert everything.figures.peak_concurrency == 10


def test_a_trace_is_played_at_its_times(fake: Fake, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{s:09.6f},{n},2\n" for s, n in [(1, 3), (1.5, 4), (3.0, 5)]]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    server = fake()
    measure(server, dataset_name="azure", dataset_path=trace, num_prompts=None, time_scale=0.2)
    first, second, third = server.measured
    assert [len(r.body["prompt"]) for r in server.measured] == [3, 4, 5]
    assert abs(second.at - first.at - 0.1) < SLACK_S
    assert abs(third.at - first.at - 0.4) < SLACK_S


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_conversations_grow(fake: Fake, backend: str) -> None:
    server = fake(itl_s=0.001)
    found = measure(
        server, backend=backend, dataset_name="multi-turn", num_prompts=2, num_turns=3,
        think_time_s=0.1, max_concurrency=1, tokenizer="stories", range_ratio=0.3,
    )  # fmt: skip
    assert found.figures.completed == 6 and found.figures.prefix.oracle is None
    for talk in (server.measured[:3], server.measured[3:]):
        for before, after in pairwise(talk):
            answer = "a" * before.body["max_tokens"]
            assert 0.1 <= after.at - before.at < 0.15 + SLACK_S
            if backend == "openai":
                assert after.body["prompt"].startswith(before.body["prompt"] + answer + " ")
            else:
                *said, reply, new = after.body["messages"]
                assert said == before.body["messages"] and new["role"] == "user"
                assert reply == {"role": "assistant", "content": answer}
    turn = found.records[1]
    assert turn.turn == 1 and turn.ttft_s is not None and turn.ttft_s < 0.1  # thinking isn't in it


def test_prefix_hits_are_the_servers(fake: Fake) -> None:
    """The fake's cache: an independent oracle over whole prefixes."""
    seen: set[tuple[int, ...]] = set()

    def cached(prompt: list[int]) -> int:
        ends = range(16, len(prompt) + 1, 16)
        hits = max((e for e in ends if tuple(prompt[:e]) in seen), default=0)
        seen.update(tuple(prompt[:e]) for e in ends)
        return hits

    server = fake(cached=cached)
    found = measure(
        server, dataset_name="shared-prefix", num_groups=2, prefix_len=40, suffix_len=10,
        num_prompts=12, max_concurrency=1, output_len=1,
    )  # fmt: skip
    assert found.figures.prefix.server == found.figures.prefix.oracle == 10 * 32 / (12 * 50)


FAULTS = {
    0: ("503", "HTTP 503"),
    1: ("429", "HTTP 429"),
    2: ("disconnect", "disconnected"),
    3: ("half-close", "disconnected"),
    4: ("stall", "timeout"),
    5: ("error event", "error in stream"),
    6: ("bad json", "malformed answer"),
    7: ("not a stream", "malformed answer"),
    8: ("empty", "no tokens"),
    9: ("cut off", "cut off"),
    10: ("garbage", "malformed answer"),
    11: ("reset", "disconnected"),
}


@pytest.mark.parametrize("max_concurrency", [1, 6])
def test_faults_are_counted_and_the_run_goes_on(fake: Fake, max_concurrency: int) -> None:
    # one after the other on kept connections; several at once on a new one each
    faults = {n: fault for n, (fault, _) in FAULTS.items()}
    server = fake(faults=faults, keep_alive=max_concurrency == 1)
    found = measure(server, num_prompts=18, max_concurrency=max_concurrency, timeout_s=1.0)
    f = found.figures
    assert (f.completed, f.failed, f.rejections) == (6, 12, 1)
    kinds = [kind for _, kind in FAULTS.values()]
    assert {k: n for k, (n, _) in f.errors.items()} == {k: kinds.count(k) for k in kinds}
    assert f.errors["HTTP 503"][1] == "HTTP 503: overloaded"
    assert "out of cache" in f.errors["error in stream"][1]
    assert f.output_tokens == 30  # of those that were answered in full
    assert any("failed" in line for line in found.warnings())


def test_too_many_requests_are_asked_again(fake: Fake) -> None:
    server = fake(faults={0: "429", 1: "429"}, retry_after="0.1")
    found = measure(server, num_prompts=1, max_retries=2)
    (record,) = found.records
    assert record.done and record.rejections == 2 and len(server.measured) == 3
    gaps = np.diff([r.at for r in server.measured])
    assert (gaps >= 0.1).all()
    assert record.ttft_s is not None and record.ttft_s >= 0.2  # the waiting counts
    silent = fake(faults={0: "429"}, retry_after=None)
    assert measure(silent, num_prompts=1, max_retries=1).figures.completed == 1
    assert 1.0 <= silent.measured[1].at - silent.measured[0].at < 1.0 + 4 * SLACK_S


def test_a_server_that_closes_each_connection(fake: Fake) -> None:
    server = fake(keep_alive=False)
    assert measure(server, max_concurrency=2).figures.completed == 10
    assert server.connections == 12


def test_what_a_server_takes_is_found_out(fake: Fake) -> None:
    text = fake(takes_ids=False, probes=3)
    found = measure(text, tokenizer="stories")
    assert found.setup["api"]["as_text"] and found.figures.input_tokens == 200
    assert isinstance(text.measured[0].body["prompt"], str)
    plain = fake(takes_stream_options=False, probes=2)
    found = measure(plain)
    assert not found.figures.counted_by_server and found.figures.output_tokens == 50
    assert any("each chunk" in note for note in found.notes())
    several = measure(fake(tokens_per_chunk=2), output_len=6)
    assert several.figures.tokens_per_chunk == 2 and any("2.00" in n for n in several.notes())


def test_warm_ups_are_not_measured(fake: Fake) -> None:
    server = fake()
    found = measure(server, num_warmups=3)
    assert found.figures.completed == 10 and len(server.measured) == 13
    assert len({str(r.body["prompt"]) for r in server.measured}) == 13


def test_progress_is_told(fake: Fake) -> None:
    told: list[tuple[int, int, int]] = []

    def note(p: Progress) -> None:
        told.append((p.done, p.running, p.tokens))

    server = fake(ttft_s=0.2, itl_s=0.02)
    options = Options(base_url=server.url, num_prompts=4, output_len=5, max_concurrency=2)
    run(options, note, 0.05)
    assert told[-1] == (4, 0, 20) and (0, 2, 0) in told and told == sorted(told, key=lambda t: t[2])


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"models": ("stories-8m",)}, {"model": "stories-8"}, "no model 'stories-8'.*'stories-8m'"),
        ({"models": ()}, {}, "lists no models"),
        ({"key": "right"}, {"api_key": "wrong"}, "refuses the API key"),
        ({"max_model_len": 24}, {}, "20 tokens and asks for 5.*24 positions"),
        ({"takes_ids": False}, {}, "must be a string"),
        ({"faults": {-1: "503"}}, {}, "first, short request.*overloaded"),
        ({}, {"backend": "openai-chat"}, "--tokenizer"),
    ],
)
def test_refusals_before_the_load(
    fake: Fake, settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(fake(**settings), **options)


def test_a_key_is_sent(fake: Fake) -> None:
    assert measure(fake(key="right"), api_key="right").figures.completed == 10


def test_https(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
             "-keyout", key, "-out", certificate],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificate, isn't here")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = fake(tls=tls)
    with pytest.raises(ConfigError, match="certificate"):  # nobody vouches for it
        measure(server)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert measure(server).figures.completed == 10


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", ""),
        ("http://h:80/v1/", "h", ""),
        ("https://h/api/v1", "h", "/api"),
        ("https://[::1]:8443", "[::1]:8443", ""),
    ],
)
def test_addresses(url: str, authority: str, prefix: str) -> None:
    server = Server.parse(url)
    assert (server.authority, server.prefix) == (authority, prefix)
