"""Scripts of other web sites: CORS, and requests that a browser sends without asking first."""

from __future__ import annotations

import pytest

from penstock.server import Key, ServerConfig, create_app
from penstock.server.middleware import Front
from tests.server.conftest import Running

BODY = {"prompt": "Once", "max_tokens": 1}


def test_another_sites_script_cant_make_the_engine_work(server: Running) -> None:
    with server.client() as client:
        sent = client.post("/v1/completions", json=BODY, headers={"Origin": "https://evil.example"})
        assert sent.status_code == 403
        assert sent.json()["error"]["code"] == "origin_not_allowed"
        null = client.post("/v1/completions", json=BODY, headers={"Origin": "null"})
        assert null.status_code == 403


def test_the_servers_own_page_may(server: Running) -> None:
    with server.client() as client:
        sent = client.post("/v1/completions", json=BODY, headers={"Origin": server.url})
        assert sent.status_code == 200
        assert "access-control-allow-origin" not in sent.headers


@pytest.mark.parametrize("keys", [(), (Key.of("secret", "me"),)])
def test_who_is_allowed(keys: tuple[Key, ...]) -> None:
    config = ServerConfig(keys=keys, allowed_origins=("https://chat.example",))
    front = Front(create_app(config), config)
    assert front._allows("https://chat.example")
    assert not front._allows("https://evil.example")
