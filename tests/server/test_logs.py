"""Lines of the log: what they say, and that nothing a client sends can forge one."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.server import ServerConfig
from penstock.server.logs import (
    MAX_TEXT,
    JsonFormatter,
    LineFormatter,
    Sparse,
    configure,
    shortened,
)
from tests.server.conftest import Running, serving

HOSTILE = [
    "two words",
    'quote" other=1',
    "line\n12:00:00 error forged",
    "return\rforged",
    "\x1b[2J\x1b]0;title\x07",
    "\u2028\u2029\x85\x9b31m\u202e",
    "back\\slash\ttab",
    "",
    "=",
    "\ud800",
    "päivää",
]


def _record(fields: dict[str, Any] | None = None, message: str = "request") -> logging.LogRecord:
    record = logging.LogRecord("penstock.server", logging.INFO, "f", 1, message, (), None)
    if fields is not None:
        record.fields = fields
    return record


@pytest.fixture
def restored() -> Iterator[None]:
    names = ("penstock", "uvicorn.error", "opentelemetry")
    before = [
        (logging.getLogger(n), logging.getLogger(n).handlers, logging.getLogger(n).propagate)
        for n in names
    ]
    levels = [logging.getLogger(n).level for n in names]
    yield
    for (one, handlers, propagate), level in zip(before, levels, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def choose(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield choose
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("name", "stamp"),
    [("UTC", "2026-11-21T22:03:33.123+00:00"), ("UTC-5:30", "2026-11-22T03:33:33.123+05:30"),
     ("EST5", "2026-11-21T17:03:33.123-05:00")],
)  # fmt: skip
def test_a_line_of_text(zone: Callable[[str], None], name: str, stamp: str) -> None:
    """ISO 8601 with the date and the offset: logs of several days and machines can be sorted."""
    zone(name)
    record = _record({"request_id": "cmpl-1", "tokens": 3, "who": None})
    record.created = 1795298613.1234
    line = LineFormatter().format(record)
    assert line == f"{stamp} info request request_id=cmpl-1 tokens=3 who=null"
    assert LineFormatter.__doc__ is not None
    shown = LineFormatter.__doc__.split("`")[1].removesuffix(" key=value …")
    assert re.fullmatch(re.sub(r"\d", r"\\d", re.escape(shown)), _at_utc(zone, record))


def _at_utc(zone: Callable[[str], None], record: logging.LogRecord) -> str:
    zone("UTC")
    return LineFormatter().format(record).removesuffix(" request_id=cmpl-1 tokens=3 who=null")


def test_a_line_of_json() -> None:
    line = json.loads(JsonFormatter().format(_record({"tokens": 3, "text": "grün"})))
    stamp = line.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)
    assert line == {
        "level": "info",
        "logger": "penstock.server",
        "message": "request",
        "tokens": 3,
        "text": "grün",
    }


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_one_field_of_one_line(value: str) -> None:
    line = LineFormatter().format(_record({"user": value, "outcome": "stop"}))
    assert line.isascii() or value == "päivää"
    assert line.isprintable()
    assert line.endswith(" outcome=stop")
    said = line.split(" info request user=", 1)[1].removesuffix(" outcome=stop")
    assert (json.loads(said) if said.startswith('"') else said) == value
    if "\\" not in value:
        assert len(shlex.split(line)) == 5 or value == ""


@pytest.mark.parametrize("value", HOSTILE)
def test_json_is_one_line_of_printable_ascii(value: str) -> None:
    line = JsonFormatter().format(_record({"user": value}))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["user"] == value


def test_a_text_is_shortened() -> None:
    assert shortened("x" * 256) == "x" * 256
    assert shortened("x" * 257) == "x" * 255 + "…"
    assert len(shortened("x" * 5_000_000)) == MAX_TEXT == 256


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_a_message_and_an_exception_have_an_end(formatter: logging.Formatter) -> None:
    """Both may quote what a client has sent."""
    assert len(formatter.format(_record(message="x" * 5_000_000))) < 4_000
    try:
        raise ValueError("x" * 5_000_000 + " too long")
    except ValueError:
        record = _record()
        record.exc_info = sys.exc_info()
    text = formatter.format(record)
    assert len(text) < 20_000
    assert "Traceback" in text
    assert "too long" in text


def test_a_message_of_several_lines_stays_one() -> None:
    line = LineFormatter().format(_record(message="bad\n12:00:00 error forged\x1b[2J"))
    assert line.isprintable()
    assert json.loads(JsonFormatter().format(_record(message="a\nb")))["message"] == "a\nb"


def test_an_exception_keeps_its_lines() -> None:
    try:
        raise ValueError("too bad")
    except ValueError:
        record = _record()
        record.exc_info = sys.exc_info()
    assert "ValueError: too bad" in LineFormatter().format(record).splitlines()[-1]
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert "ValueError: too bad" in json.loads(line)["exception"]


def test_alike_lines_are_one_a_minute_and_say_how_many_were_held_back() -> None:
    now = 0.0
    sparse = Sparse(60.0, lambda: now)
    passed = []
    for second in range(125):
        now = float(second)
        record = _record()
        passed += [record] * sparse.filter(record)
        other = logging.LogRecord("another", logging.ERROR, "f", 1, "once", (), None)
        assert sparse.filter(other) is (second % 60 == 0)
    assert [getattr(x, "fields", {}) for x in passed] == [{}, {"held_back": 59}, {"held_back": 59}]


@pytest.mark.usefixtures("restored")
def test_what_opentelemetry_warns_of_is_in_our_form(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure("json")
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    for _ in range(1000):
        exporter.error("Failed to export %s", "spans")
    exporter.info("nothing")
    logging.getLogger("penstock.server").info("one")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["Failed to export spans", "one"]
    assert lines[0]["logger"] == exporter.name


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("kind", ["text", "json"])
def test_one_stream_for_penstock_and_the_web_server(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure(kind)
    configure(kind)  # again doesn't double the lines
    logging.getLogger("penstock.server").info("one", extra={"fields": {"a": 1}})
    logging.getLogger("uvicorn.error").warning("two")
    logging.getLogger("penstock.engine").debug("nothing")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    if kind == "json":
        assert [json.loads(line)["message"] for line in lines] == ["one", "two"]
    else:
        assert lines[0].endswith("info one a=1")
        assert lines[1].endswith("warning two")


def _requests(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.getMessage() == "request"]


def test_a_request_is_one_line_without_its_text(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.server")
    secret = "A secret garden"
    with server.client() as client:
        answer = client.post(
            "/v1/completions",
            json={"prompt": secret, "max_tokens": 3, "user": "u 1\n2", "ignore_eos": True},
            headers={"x-request-id": "mine-7"},
        ).json()
    server.rest()
    (line,) = _requests(caplog)
    assert line["request_id"] == answer["id"]
    assert line["request_id"].startswith("cmpl-mine-7-")
    assert line["endpoint"] == "/v1/completions"
    assert line["key"] == "everybody"
    assert line["outcome"] == "length"
    assert line["user"] == "u 1\n2"
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert line["output_tokens"] == 3
    assert 0 < line["ttft_s"] <= line["seconds"]
    for formatter in (LineFormatter(), JsonFormatter()):
        text = formatter.format(caplog.records[-1])
        assert text.isprintable()
        assert "secret" not in text


def test_a_clients_text_cant_fill_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.server")
    with server.client() as client:
        for user in ("u" * 4096, "\N{PILE OF POO}" * 4096):
            body = {"prompt": "Once", "max_tokens": 1, "user": user}
            assert client.post("/v1/completions", json=body).status_code == 200
        wrong = {"prompt": "Once", "bad_words": ["w" * 9_000], "allowed_token_ids": [10**6]}
        assert client.post("/v1/completions", json=wrong).status_code == 400
    server.rest()
    one, two, three = _requests(caplog)
    assert one["user"] == "u" * 255 + "…"
    assert len(two["user"]) == 256
    assert len(three["error"]) <= 256
    for formatter in (LineFormatter(), JsonFormatter()):
        assert all(len(formatter.format(record)) < 6_000 for record in caplog.records)


def test_prompts_are_logged_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.server")
    ask = {"prompt": "Once", "max_tokens": 2}
    with serving(ServerConfig(log_prompts=True)) as running:
        with running.client() as client:
            text = client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        running.rest()
    (line,) = _requests(caplog)
    assert line["prompt"] == "Once"
    assert line["text"] == [text]
    caplog.clear()
    with serving(ServerConfig(log_requests=False)) as running:
        with running.client() as client:
            assert client.post("/v1/completions", json=ask).status_code == 200
        running.rest()
    assert _requests(caplog) == []
