"""`penstock serve`: what it is told reaches the server, and errors name the options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from penstock.cli import serve as command
from penstock.cli import server_options
from penstock.cli.chat import chat
from penstock.cli.generate import generate
from penstock.config import EngineConfig
from penstock.config.lora import LoraConfig
from penstock.models.hub import adapter_folder
from penstock.server import ServerConfig, lifecycle

Run = Callable[..., Result]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server is started with, instead of starting it."""
    found: dict[str, Any] = {}

    def loader(config: EngineConfig, modules: dict[str, Path]) -> None:
        found.update(engine=config, modules=modules)

    def run(config: ServerConfig, load: object) -> None:
        found["server"] = config

    monkeypatch.setattr(command, "_loader", loader)
    monkeypatch.setattr(lifecycle, "serve", run)
    monkeypatch.delenv(server_options.KEY_VARIABLE, raising=False)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_device_that_is_not_there(penstock: Run, started: dict[str, Any]) -> None:
    found = penstock("serve", "--device", "cuda")
    assert found.exit_code == 1
    assert "device='cuda' can't be used" in found.output
    assert not started  # nothing listens


def test_adapters(penstock: Run, started: dict[str, Any]) -> None:
    result = penstock(
        "serve", "stories", "--lora-modules", "a=stories-verse",
        "--lora-modules", "b=stories-verse", "--max-loras", 3, "--max-lora-rank", 32,
        "--allow-runtime-lora-updating",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert started["modules"] == {
        "a": adapter_folder("stories-verse"),
        "b": adapter_folder("stories-verse"),
    }
    assert started["engine"].lora == LoraConfig(True, 3, 32)
    assert started["server"].allow_runtime_lora_updating


def test_defaults(penstock: Run, started: dict[str, Any]) -> None:
    """What converses is the chat model, what goes on with a text is the story model."""
    assert penstock("serve").exit_code == 0
    assert started["engine"].model.model == "stories-chat"
    assert inspect.signature(chat).parameters["model"].default == "stories-chat"
    assert inspect.signature(generate).parameters["model"].default == "stories"


def test_options_reach_the_server(penstock: Run, started: dict[str, Any]) -> None:
    words = (
        "--body-timeout 3 --stall-timeout 4 --max-stop-strings 5 --request-timeout 6 "
        "--allowed-host LLM.example.org --allowed-host [fd00::1] "
        "--allowed-origin https://a.example --allowed-origin http://b.example:8080 "
        "--served-model-name one --served-model-name two --scheduling-policy edf "
        "--starvation-time 7 --ttft-slo-ms 250 --tool-call-parser llama3_json "
        "--reasoning-parser none --no-enable-auto-tool-choice --enable-tokenizer-info-endpoint "
        "--response-store-mib 0.5 --response-store-hours 2"
    )
    result = penstock("serve", *words.split())
    assert result.exit_code == 0, result.output
    server, scheduler = started["server"], started["engine"].scheduler
    assert (server.body_timeout_s, server.stall_timeout_s, server.max_stop_strings) == (3, 4, 5)
    assert server.request_timeout_s == 6
    assert (server.tool_call_parser, server.reasoning_parser) == ("llama3_json", "none")
    assert not server.enable_auto_tool_choice
    assert server.enable_tokenizer_info_endpoint
    assert (server.response_store_mib, server.response_store_hours) == (0.5, 2)
    assert server.allowed_hosts == ("llm.example.org", "[fd00::1]")
    assert server.allowed_origins == ("https://a.example", "http://b.example:8080")
    assert server.served_model_names == ("one", "two")
    assert (scheduler.starvation_s, scheduler.ttft_slo_s) == (7, 0.25)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--allowed-origin foo", "--allowed-origin has 'foo'"),
        ("--allowed-origin https://a.example/", "--allowed-origin has 'https://a.example/'"),
        ("--allowed-origin https://a.example:x", "scheme://host[:port]"),
        ("--allowed-host a.example:80", "--allowed-host has 'a.example:80'"),
        ("--allowed-host ::1", "[fd00::1]"),
        ("--served-model-name=", "--served-model-name has an empty name"),
        ("--compaction-threshold 5", "--compaction-threshold is 5; it must be at least 128"),
        ("--api-key one --api-key two --api-key one", "have the same secret"),
        ("--request-timeout -1", "--request-timeout is -1"),
        ("--write-timeout 0", "--write-timeout is 0"),
        ("--body-timeout nan", "--body-timeout is nan"),
        ("--stall-timeout -1", "--stall-timeout is -1"),
        ("--shutdown-timeout inf", "--shutdown-timeout is inf"),
        ("--max-body-size 0", "--max-body-size is 0"),
        ("--max-stop-strings 0", "--max-stop-strings is 0"),
        ("--tool-call-parser hermse", "--tool-call-parser is 'hermse'. Did you mean 'hermes'?"),
        ("--reasoning-parser r1", "--reasoning-parser is 'r1'"),
        ("--max-queue-size 0", "--max-queue-size is 0"),
        ("--response-store-mib -1", "--response-store-mib is -1.0; it must be a size in MiB"),
        ("--response-store-mib nan", "--response-store-mib is nan"),
        ("--response-store-hours 0", "--response-store-hours is 0.0; it must be above 0"),
        ("--max-concurrency 0", "--max-concurrency must be"),
        ("--port 99999", "--port is 99999"),
        ("--scheduling-policy x", "--scheduling-policy='x' isn't one of fcfs"),
        ("--starvation-time 3", "leaves --starvation-time=3"),
        ("--ttft-slo-ms 5", "--ttft-slo-ms is for --scheduling-policy edf"),
        ("--scheduling-policy edf --tpot-slo-ms 0", "--tpot-slo-ms is 0"),
        ("--num-gpu-blocks-override 0", "--num-gpu-blocks-override must be"),
        ("--dtype x", "--dtype='x'"),
        ("--kv-cache-dtype x", "--kv-cache-dtype='x'"),
        ("--seed -1", "--seed must be"),
    ],
)
def test_errors_name_the_options(
    penstock: Run, started: dict[str, Any], options: str, said: str
) -> None:
    result = penstock("serve", *options.split())
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "server" not in started


def test_help_shows_the_table_of_keys(penstock: Run) -> None:
    """Rich would read it as a style."""
    assert "[[key]]" in penstock("serve", "--help").stdout
