"""API keys: read, refused, found."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.server import Key, Limits, ServerConfig, keys_of, read_keys
from penstock.server.keys import find_key
from tests.server.conftest import serving

DEFAULTS = Limits(requests_per_minute=7, priority=2)
DIGEST = hashlib.sha256(b"sk-alice").hexdigest()


def _read(folder: Path, text: str) -> list[Key]:
    file = folder / "keys.toml"
    file.write_text(text)
    return read_keys(file, DEFAULTS)


def test_a_files_keys_and_their_limits(tmp_path: Path) -> None:
    alice, bob = _read(
        tmp_path,
        f'[[key]]\nname = "alice"\nsha256 = "{DIGEST.upper()}"\nmax_concurrency = 3\n'
        'ttft_slo_ms = 250\n[[key]]\nname = "bob"\nkey = "sk-bob"\nrequests_per_minute = 60\n',
    )
    assert alice.name == "alice"
    assert alice.digest == bytes.fromhex(DIGEST)
    assert alice.limits == Limits(7, None, 3, 2, 250, None)
    assert bob.limits == Limits(requests_per_minute=60, priority=2)
    assert find_key([alice, bob], "sk-alice") is alice
    assert find_key([alice, bob], "sk-bob") is bob
    for text in ("", "sk-alic", "sk-alice ", DIGEST, "SK-ALICE", "sk-alicé"):
        assert find_key([alice, bob], text) is None


def test_a_key_isnt_kept() -> None:
    (key,) = keys_of(["sk-very-secret"], Limits())
    assert key.name == "key-1"
    assert "very-secret" not in repr(key)
    assert not any("very-secret" in str(getattr(key, field.name)) for field in fields(key))


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        "penstock.server.keys.hmac.compare_digest",
        lambda one, other: compared.append(one) or one == other,
    )
    keys = keys_of(["a", "b", "c"], Limits())
    assert find_key(keys, "a") is keys[0]
    assert compared == [key.digest for key in keys]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "none"),
        ("[[key]\n", "can't be read"),
        ("key = 3\n", r"\[\[key\]\]"),
        ("key = [3]\n", "key 1: must be a table"),
        ('[[key]]\nkey = "x"\n', "key 1: needs a name"),
        ('[[key]]\nname = ""\nkey = "x"\n', "needs a name"),
        ('[[key]]\nname = "a"\n', r"key 1 \(a\): give either key or sha256"),
        (f'[[key]]\nname = "a"\nkey = "x"\nsha256 = "{DIGEST}"\n', "either key or sha256"),
        ('[[key]]\nname = "a"\nsha256 = "abc"\n', "64 hexadecimal"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST[:-1]}_"\n', "64 hexadecimal"),
        (f'[[key]]\nname = "a"\nsha256 = "{hashlib.sha256(b"").hexdigest()}"\n', "empty text"),
        ('[[key]]\nname = "a"\nkey = "two words"\n', "printable ASCII"),
        ('[[key]]\nname = "a"\nkey = "schlüssel"\n', "printable ASCII"),
        ('[[key]]\nname = "a"\nkey = "x"\nrequest_per_minute = 3\n', "requests_per_minute"),
        ('[[key]]\nname = "a"\nkey = "x"\nrequests_per_minute = 0\n', r"\(a\).*at least 1, not 0"),
        ('[[key]]\nname = "a"\nkey = "x"\nmax_concurrency = true\n', "integer"),
        ('[[key]]\nname = "a"\nkey = "x"\npriority = 1.5\n', "priority"),
        ('[[key]]\nname = "a"\nkey = "x"\nttft_slo_ms = nan\n', "ttft_slo_ms"),
        ('title = "x"\n[[key]]\nname = "a"\nkey = "x"\n', "'title'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        _read(tmp_path, text)
    assert "keys.toml" in str(error.value)


def test_a_file_that_isnt_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_keys(tmp_path / "none.toml", DEFAULTS)


def test_two_keys_of_one_name() -> None:
    one, other = Key.of("a", "x"), Key.of("b", "x")
    with pytest.raises(ConfigError, match="'x'"):
        ServerConfig(keys=(one, other))


def test_each_key_has_its_own_account() -> None:
    keys = (
        Key.of("sk-one", "one", Limits(requests_per_minute=1)),
        Key.of("sk-two", "two", Limits(max_concurrency=1)),
    )
    ask = {"prompt": "Once", "max_tokens": 1}

    def sent(text: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {text}"}

    with (
        serving(ServerConfig(keys=keys)) as running,
        running.client() as client,
    ):
        for headers in (
            {},
            sent("sk-none"),
            {"Authorization": "Bearer"},
            {"Authorization": "Basic sk-one"},
        ):
            refused = client.post("/v1/completions", json=ask, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in ("/metrics", "/v1/models", "/page/events", "/openapi.json", "/load"):
            assert client.get(path).status_code == 401
        for path in ("/", "/health", "/ready", "/page/main.js"):
            assert client.get(path).status_code == 200
        first = client.post("/v1/completions", json=ask, headers=sent("sk-one"))
        assert first.status_code == 200
        again = client.post("/v1/completions", json=ask, headers=sent("sk-one"))
        assert again.status_code == 429
        assert 1 <= int(again.headers["Retry-After"]) <= 61
        assert again.json()["error"]["code"] == "rate_limit_exceeded"
        other = client.post("/v1/completions", json=ask, headers={"x-api-key": "sk-two"})
        assert other.status_code == 200
        many = client.post(
            "/v1/completions",
            json=ask | {"prompt": ["Once", "Twice"]},
            headers={"x-api-key": "sk-two"},
        )
        assert many.status_code == 400  # waiting wouldn't help
        assert many.json()["error"]["code"] == "concurrency_limit_exceeded"
        running.rest()
        assert running.service.inflight == {}


def test_keys_of_the_command_line_are_told_apart() -> None:
    with pytest.raises(ConfigError, match=r"--api-key, number 2 of 2: .*key-2.* is empty"):
        keys_of(["good", ""], Limits())
