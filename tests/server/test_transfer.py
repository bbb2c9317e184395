"""`kv_transfer_params`: a prompt computed by one server, and gone on with by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.server import ServerConfig
from tests.server.conftest import Running, serving

TEXT = "Once upon a time there was a little dog named Max. He liked to run in the park. " * 8
CHAT = [{"role": "user", "content": TEXT}]
COMPUTE, GO_ON = {"do_remote_decode": True}, {"do_remote_prefill": True}
VLLMS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""As vLLM's own proxies send it."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 9},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 9},
    "/v1/messages": {"model": "stories", "messages": CHAT, "max_tokens": 9},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 9},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    folder = tmp_path_factory.mktemp("kept")
    given: dict[str, Any] = {"num_gpu_blocks_override": 64, "prefix_cache_dir": folder}
    with (
        serving(ServerConfig(), **given) as first,
        serving(ServerConfig(), **given) as second,
    ):
        yield first, second


def post(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    with server.client() as client:
        answer = client.post(path, json=body)
        return answer.status_code, answer.json()


def said(answer: Any) -> Any:
    for name in ("choices", "content", "output"):
        if name in answer:
            found = str(answer[name])
    return found.split("msg_", maxsplit=1)[0]


def cached(answer: Any) -> int:
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


@pytest.mark.parametrize("path", BODIES)
def test_one_computes_and_the_other_goes_on(
    both: tuple[Running, Running], server: Running, path: str
) -> None:
    first, second = both
    body = {**BODIES[path], "temperature": 0, "cache_salt": path}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    status, answer = post(first, path, {**body, limit: 1, "kv_transfer_params": VLLMS})
    assert status == 200, answer
    if "choices" in answer:
        assert answer["kv_transfer_params"] == {
            "do_remote_decode": False, "do_remote_prefill": True,
        }  # fmt: skip
        body |= {"kv_transfer_params": answer["kv_transfer_params"]}
    status, answer = post(second, path, body)
    assert status == 200, answer
    assert cached(answer) >= 128
    body.pop("kv_transfer_params", None)
    assert said(answer) == said(post(server, path, body)[1])


@pytest.mark.parametrize("asked", [COMPUTE, GO_ON, {}])
def test_nothing_is_kept(server: Running, asked: dict[str, bool]) -> None:
    for path, body in BODIES.items():
        status, answer = post(server, path, {**body, "kv_transfer_params": asked})
        assert status == 400
        told = str(answer)
        assert "kv_transfer_params can't take effect" in told
        assert "--prefix-cache-dir" in told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"remote_host": "10.0.0.1"}, "remote_host"),
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({"do_remote": True}, "do_remote"),
        ("yes", "kv_transfer_params"),
    ],
)
def test_what_it_cannot_be(both: tuple[Running, Running], asked: Any, told: str) -> None:
    status, answer = post(both[0], "/v1/completions", {"prompt": "a", "kv_transfer_params": asked})
    assert status == 400
    assert told in answer["error"]["param"]


def test_embeddings_go_nowhere(both: tuple[Running, Running]) -> None:
    body = {"input": "a", "kv_transfer_params": COMPUTE}
    status, answer = post(both[0], "/v1/embeddings", body)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")


def test_files_are_there(both: tuple[Running, Running], tmp_path: Path) -> None:
    """As many as the prompt has whole blocks."""
    first, _ = both
    before = first.llm.stats()["disk_blocks_written"]
    body = {"prompt": TEXT, "max_tokens": 1, "cache_salt": "x", "kv_transfer_params": COMPUTE}
    _, answer = post(first, "/v1/completions", body)
    blocks = answer["usage"]["prompt_tokens"] // 32
    assert first.llm.stats()["disk_blocks_written"] - before == blocks
