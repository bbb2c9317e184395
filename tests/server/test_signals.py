"""`penstock serve` as a process: how it begins, refuses to begin, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import MissingExtraError

SERVE = [sys.executable, "-c", "from penstock.cli.main import run; run()", "serve"]
LONG = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": True}
SMALL = ("--num-gpu-blocks-override", "64", "--port", "0")


class Process:
    """A server and what it says."""

    def __init__(self, *arguments: str, here: bool = False, **environment: str) -> None:
        """here: it says itself where it listens."""
        small = SMALL[:2] if here else SMALL
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_API")}
        self.popen = subprocess.Popen(
            [*SERVE, *small, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**variables, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def ready(self) -> str:
        """Its address, when the model is loaded."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.popen.poll() is None:
            found = re.search(r'url(?:=|": )"?(http://[^\s"]+)', self.said)
            if found:
                return found[1]
            time.sleep(0.02)
        raise AssertionError(f"It didn't start: {self.said}")

    def until(self, said: str) -> None:
        end = time.monotonic() + 60
        while said not in self.said:
            assert time.monotonic() < end, self.said
            assert self.popen.poll() is None, self.said
            time.sleep(0.02)

    def end(self, seconds: float = 30) -> int:
        """Its exit code."""
        code = self.popen.wait(seconds)
        self._reader.join()
        return code


@contextmanager
def serve(*arguments: str, here: bool = False, **environment: str) -> Iterator[Process]:
    process = Process(*arguments, here=here, **environment)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.end()
        assert process.popen.stdout is not None
        process.popen.stdout.close()
        assert process.popen.stderr is not None
        process.popen.stderr.close()


class Stream(threading.Thread):
    """A client that reads a whole stream."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.begun = threading.Event()
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=LONG, timeout=60
            ) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line)
                        self.begun.set()
        except httpx.HTTPError as error:
            self.events.append(repr(error))


def test_sigterm_lets_streams_end() -> None:
    with serve() as process:
        url = process.ready()
        streams = [Stream(url) for _ in range(4)]
        for stream in streams:
            assert stream.begun.wait(30)
        with httpx.stream("GET", f"{url}/page/events", timeout=30) as page:  # which has no end
            lines = page.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            said = set()
            while any(stream.is_alive() for stream in streams) and len(said) < 3:
                with suppress(httpx.TransportError):  # all streams have ended just now
                    for path in ("/v1/models", "/ready", "/health"):
                        said.add((path, httpx.get(f"{url}{path}", timeout=10).status_code))
            assert said == {("/v1/models", 503), ("/ready", 503), ("/health", 200)}
            for stream in streams:
                stream.join()
            list(lines)
        start = time.monotonic()
        assert process.end() == 0
        assert time.monotonic() - start < 10
        for stream in streams:
            assert stream.events[-1] == "data: [DONE]"
            assert json.loads(stream.events[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in process.said
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_ended_while_the_model_is_loaded(sent: signal.Signals, code: int) -> None:
    """Native threads of a model that is being loaded don't take the process down with them."""
    with serve("--max-num-seqs", "100000") as process:
        while "startup complete" not in process.said:
            assert process.popen.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
        process.popen.send_signal(sent)
        assert process.end() == code
    assert "terminate called" not in process.said and "Traceback" not in process.said


@pytest.mark.parametrize(
    ("first", "code"),
    [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)],
)
def test_an_idle_server_ends(first: signal.Signals, code: int) -> None:
    with serve() as process:
        url = process.ready()
        with httpx.Client(base_url=url) as client:  # a connection that is kept alive
            assert client.get("/health").status_code == 200
            process.popen.send_signal(first)
            assert process.end() == code
    assert "Traceback" not in process.said


def test_a_second_sigterm_doesnt_wait() -> None:
    with serve("--shutdown-timeout", "60") as process:
        host, _, port = process.ready().removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as held:  # its body never comes
            held.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
            )
            time.sleep(0.3)
            process.popen.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert process.popen.poll() is None
            process.popen.send_signal(signal.SIGTERM)
            assert process.end(10) == 0
    assert "not waiting any longer" in process.said


@pytest.mark.slow
def test_sigterm_while_loading() -> None:
    with serve() as process:
        end = time.monotonic() + 30
        while "Started server process" not in process.said and time.monotonic() < end:
            time.sleep(0.005)
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == 0
    assert "Traceback" not in process.said


# ── what it refuses ──────────────────────────────────────────────────────────────────────────


def invoke(*arguments: str, variable: str | None = None) -> tuple[int, str]:
    """(exit code, what it said) of a command that ends by itself."""
    result = CliRunner().invoke(app, ["serve", *arguments], env={"PENSTOCK_API_KEY": variable})
    return result.exit_code, result.output


def test_a_key_that_wasnt_set_lets_nobody_in() -> None:
    code, said = invoke(variable="")
    assert code == 1 and "PENSTOCK_API_KEY is empty" in said


def test_a_host_that_isnt_here() -> None:
    code, said = invoke("--host", "192.0.2.1", "--api-key", "k")
    assert code == 1 and "must be an address of this machine" in " ".join(said.split())


def test_a_broken_template_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text("{% if")
    code, said = invoke("--chat-template", str(file))
    assert code == 1 and "chat_template is broken. The chat template failed at line 1" in " ".join(
        said.split()
    )


def test_the_share_of_memory_is_named_as_it_was_given() -> None:
    code, said = invoke("--gpu-memory-utilization", "1.5")
    assert code == 1 and "--gpu-memory-utilization" in said and "not 1.5" in said


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = invoke("--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "Can't listen on 127.0.0.1" in said
    assert "Traceback" not in said


def test_a_model_that_isnt_there() -> None:
    with serve("no/such/folder/anywhere") as process:
        assert process.end() == 1
    errors = [line for line in process.lines if "no/such/folder/anywhere" in line]
    assert len(errors) == 1
    assert "Traceback" not in process.said


def test_an_open_address_needs_a_key() -> None:
    code, said = invoke("--host", "0.0.0.0")
    assert code == 1
    assert "--allow-unauthenticated" in said


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, said = invoke()
    assert code == 1
    assert "uvicorn; in Penstock's clone: pip install" in said
    assert issubclass(MissingExtraError, ImportError)


KEY_FILES = {
    "no TOML": ("[[key]", "can't be read"),
    "no key": ("", "it has none"),
    "another table": ("[limits]\na = 1", "'limits'"),
    "no name": ("[[key]]\nkey = 'a'", "needs a name"),
    "no secret": ("[[key]]\nname = 'a'", "either key or sha256"),
    "two secrets": (f"[[key]]\nname = 'a'\nkey = 'b'\nsha256 = '{'0' * 64}'", "either"),
    "a short digest": ("[[key]]\nname = 'a'\nsha256 = 'abc'", "64 hexadecimal"),
    "a limit of 0": ("[[key]]\nname = 'a'\nkey = 'b'\nmax_concurrency = 0", "at least 1"),
    "a wrong name": ("[[key]]\nname = 'a'\nkey = 'b'\nmax_concurency = 1", "max_concurrency"),
    "a key with a space": ("[[key]]\nname = 'a'\nkey = 'b c'", "without spaces"),
    "one name twice": ("[[key]]\nname = 'a'\nkey = 'b'\n" * 2, "named 'a'"),
}


@pytest.mark.parametrize("what", KEY_FILES)
def test_key_files(tmp_path: Path, what: str) -> None:
    text, said = KEY_FILES[what]
    path = tmp_path / "keys.toml"
    path.write_text(text)
    code, found = invoke("--api-key-file", str(path))
    assert code == 1
    assert said in " ".join(found.split())


def test_a_key_file_that_isnt_there(tmp_path: Path) -> None:
    code, said = invoke("--api-key-file", str(tmp_path / "none.toml"))
    assert code == 1
    assert "none.toml" in said


def test_keys_and_what_the_log_holds() -> None:
    secret, prompt = "a-very-secret-key", "Once upon a purple walrus"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "user": 'x" outcome=forged\nz'}
    with serve("--api-key", secret, "--log-format", "json") as process:
        url = process.ready()
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        for wrong in (secret[:-1], secret + "x", secret.upper()):
            headers = {"authorization": f"Bearer {wrong}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
        headers = {"authorization": f"Bearer {secret}", "x-request-id": "mine-1"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == 0
    assert secret not in process.said
    assert "walrus" not in process.said
    assert "secret-key" not in process.said
    lines = [json.loads(line) for line in process.lines]
    (request,) = [line for line in lines if line["message"] == "request"]
    assert request["outcome"] == "length"
    assert request["user"] == body["user"]
    assert "mine-1" in request["request_id"]


class TestUnixSockets:
    def test_it_listens_there(self, tmp_path: Path) -> None:
        path = tmp_path / "server.sock"
        with serve("--uds", str(path), here=True) as process:
            process.until(f"ready url=unix:{path}")
            assert path.stat().st_mode & 0o777 == 0o600
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
                assert answer.status_code == 200
                assert client.get("/load", headers={"host": "evil"}).status_code == 403
            process.popen.send_signal(signal.SIGTERM)
            assert process.end() == 0
        assert not path.exists()

    def test_one_that_is_left_over(self, tmp_path: Path) -> None:
        path = tmp_path / "server.sock"
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))
        with serve("--uds", str(path), here=True) as process:
            process.until("ready url=unix:")

    def test_what_cannot_be(self, tmp_path: Path) -> None:
        path = tmp_path / "server.sock"
        (tmp_path / "file").write_text("kept")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            for arguments, said in (
                (("--uds", str(path)), "end the program that has it"),
                (("--uds", str(tmp_path / "file")), "Address already in use"),
                (("--uds", str(tmp_path / "no" / "x")), "No such file"),
                (("--uds", "x" * 108), "--uds has 108 bytes"),
                (("--uds", ""), "--uds has 0 bytes"),
                (("--uds", str(path), "--port", "1"), "Leave one out"),
            ):
                found = CliRunner().invoke(app, ["serve", "stories", *arguments])
                assert found.exit_code == 1
                assert said in found.output
        assert (tmp_path / "file").read_text() == "kept"
