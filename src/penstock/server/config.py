"""What whoever runs the server may choose."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, field, fields
from typing import Literal

from penstock.errors import ChatTemplateError, ConfigError, nearest
from penstock.server.keys import Key, Limits
from penstock.server.tools.families import REASONING_PARSERS, TOOL_PARSERS

EVERYBODY = "everybody"
LEAST_THRESHOLD = 128
"""Tokens of a conversation that is compacted; an eighth of them is what a summary may have."""
MAX_UDS_BYTES = 107
"""Of a Unix socket's path (`sockaddr_un` in unix(7), less its end)."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_NAME = r"(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])"
_HOST = re.compile(_NAME)
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_NAME}(?::[0-9]{{1,5}})?")  # as browsers write it


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens, whom it lets in, and how much it takes on at once."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket's path, instead of both
    served_model_names: tuple[str, ...] = ()  # none: what the model was loaded as
    keys: tuple[Key, ...] = ()  # none: everybody is let in
    limits: Limits = field(default_factory=Limits)  # of everybody together, where there are no keys
    allow_unauthenticated: bool = False  # without a key, beyond this machine
    allowed_hosts: tuple[str, ...] = ()  # of the Host header; none: see `host_names`
    allowed_origins: tuple[str, ...] = ()  # of browsers' scripts (CORS); none: no other site
    max_queue_size: int = 2048  # requests that wait; beyond, 429
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 30.0  # for a request's headers to arrive, and then for its body
    request_timeout_s: float | None = None  # from arrival to the end; 408
    write_timeout_s: float = 60.0  # for a client to take some of what was sent, or it is cut off
    shutdown_timeout_s: float = 60.0  # for running requests after SIGTERM
    stall_timeout_s: float = 120.0  # without a step while there are requests: not ready
    max_stop_strings: int = 64
    truncation: Literal["disabled", "auto"] = "disabled"  # of conversations that are too long
    truncation_retention: float = 1.0  # of what fits, the share that is left then
    compaction_threshold: int | None = None  # tokens; beyond, old turns become a summary
    trust_request_chat_template: bool = False
    log_requests: bool = True  # one line each, without its text
    log_prompts: bool = False
    log_format: Literal["text", "json"] = "text"
    chat_template: str | None = None  # instead of the model's own
    tool_call_parser: str = "auto"  # how calls are written; auto: as the chat template says
    reasoning_parser: str = "auto"  # how reasoning is marked; none: it stays in the answer
    enable_auto_tool_choice: bool = True  # without it a call must be asked for
    otlp_endpoint: str | None = None  # where traces go
    page: bool = True  # the page at /
    response_store_mib: float = 64.0  # of responses that requests may go on from; 0: none are kept
    response_store_hours: float = 24.0  # since one was used last
    enable_tokenizer_info_endpoint: bool = False  # which tells the chat template
    allow_runtime_lora_updating: bool = False  # requests may load and unload adapters

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be in [0, 65535] (0: any free one).")
        if self.uds is not None and not 0 < len(os.fsencode(self.uds)) <= MAX_UDS_BYTES:
            raise ConfigError(
                f"uds has {len(os.fsencode(self.uds))} bytes; the path of a socket has 1 to "
                f"{MAX_UDS_BYTES}. Choose a folder nearer to the root."
            )
        for name in ("max_queue_size", "max_body_bytes", "max_stop_strings"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for one in fields(self):
            value = getattr(self, one.name)
            if not one.name.endswith("_s") or value is None:
                continue
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{one.name} is {value}; it must be a time above 0.")
        if not 0 < self.truncation_retention <= 1:
            raise ConfigError(
                f"truncation_retention is {self.truncation_retention}; it must be a share above 0, "
                "1 at most."
            )
        if self.truncation == "disabled" and self.truncation_retention != 1:
            raise ConfigError(
                f"truncation_retention={self.truncation_retention} has no effect where too long "
                "conversations are refused: set truncation='auto'."
            )
        if self.compaction_threshold is not None and self.compaction_threshold < LEAST_THRESHOLD:
            raise ConfigError(
                f"compaction_threshold is {self.compaction_threshold}; it must be at least "
                f"{LEAST_THRESHOLD} tokens, of which a summary may have an eighth."
            )
        if not 0 <= self.response_store_mib < math.inf:
            raise ConfigError(
                f"response_store_mib is {self.response_store_mib}; it must be a size in MiB, or 0 "
                "to keep no responses."
            )
        if not 0 < self.response_store_hours < math.inf:
            raise ConfigError(
                f"response_store_hours is {self.response_store_hours}; it must be above 0."
            )
        self._check_template()
        self._check_parsers()
        self._check_names()
        self._check_keys()

    def _check_template(self) -> None:
        if self.chat_template is None:
            return
        from penstock.tokenizer.chat import check_template  # jinja2 takes a while

        try:
            check_template(self.chat_template)
        except ChatTemplateError as error:
            raise ConfigError(f"This server's chat_template is broken. {error}") from error

    def _check_parsers(self) -> None:
        for name, known in (
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            value = getattr(self, name)
            if value != "auto" and value not in known:
                raise ConfigError(
                    f"{name} is {value!r}.{nearest(value, known)} There are: auto, "
                    f"{', '.join(known)}."
                )

    def _check_names(self) -> None:
        """Of models, hosts and sites: one that no request could have would let nobody in."""
        if "" in self.served_model_names:
            raise ConfigError("served_model_names has an empty name. Leave it out or give one.")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts has {host!r}; give names or addresses in lower case and "
                    "without a port, such as llm.example.org or [fd00::1]."
                )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}; give * or scheme://host[:port] in lower "
                    "case and without a path, such as https://chat.example.org."
                )

    def _check_keys(self) -> None:
        names = [key.name for key in self.keys]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"Two API keys are named {twice!r}. Names tell them apart in limits.")
        same = {key.digest: key.name for key in self.keys}
        for key in self.keys:
            if same[key.digest] != key.name:
                raise ConfigError(
                    f"The API keys {key.name!r} and {same[key.digest]!r} have the same secret, so "
                    "only one's limits could hold. Give each its own."
                )
        if not (self.keys or self.allow_unauthenticated or self._is_local):
            raise ConfigError(
                f"host={self.host} can be reached from other machines, and there is no API key: "
                "anybody could use this server. Give --api-key or --api-key-file, or say "
                "--allow-unauthenticated."
            )

    @property
    def accounts(self) -> tuple[Key, ...]:
        """The keys; where there are none, one that stands for everybody."""
        return self.keys or (Key(EVERYBODY, b"", self.limits),)

    @property
    def _is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.uds is not None or is_loopback(self.host)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Values of the Host header that are answered; none: all.

        Without a key, a web page that gets a name to mean this machine (DNS rebinding) could talk
        to a server on it as its own; so only the machine's own names are answered then.
        """
        if self.allowed_hosts:
            return self.allowed_hosts
        local = not self.keys and not self.allow_unauthenticated
        return LOOPBACK_NAMES if local else ()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
