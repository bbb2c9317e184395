"""What the tests of all endpoints' tools share: a client, and a server that is told its family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from penstock.server.tools.plan import Tooling
from tests.server.conftest import Running

# The embedded model's context is short: this template has room for what is asked of it here.
TERSE = "{{ bos_token }}{% if tools %}{{ tools | length }} {% endif %}{{ messages[-1]['content'] }}"
Use = Callable[..., None]


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def as_family(server: Running, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Serve as if the model were of this family, with a terse template."""

    def use(family: str, **more: Any) -> None:
        more = {"chat_template": TERSE, **more}
        config = replace(server.service.config, tool_call_parser=family, **more)
        made = Tooling(server.service.prompts.tokenizer, config)
        monkeypatch.setattr(server.service, "config", config)
        monkeypatch.setattr(server.service, "tooling", made)

    return use
