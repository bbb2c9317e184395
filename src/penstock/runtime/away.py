"""Stages on other machines: how the first rank and they find and trust one another.

A stage waits at an address (`penstock rank`). The first rank comes for its orders, the stage before
for rows: TCP connections, at whose beginning both sides prove that they know the same key (HMAC, as
Python's `multiprocessing.connection` has it). What is said after that is neither secret nor signed,
and orders are pickled: the key lets its holder run code. It is for machines of one owner, in a
network of theirs.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal

from penstock.errors import ConfigError, RankError

KEY = "PENSTOCK_RANK_KEY"
"""The variable that has the key."""

Role = Literal["orders", "rows"]

_HANDSHAKE_S = 30  # a session that has just begun imports torch first
_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence before a machine is asked whether it is there, and how often: 25 s at most."""


def key() -> bytes:
    """The key that all ranks know. Raises ConfigError where there is none."""
    found = os.environ.get(KEY, "")
    if len(found) < 16:
        raise ConfigError(
            f"Ranks on several machines need a key of 16 characters at least in {KEY}, the same on "
            f"all; it has {len(found)}. For example: openssl rand -hex 16."
        )
    return found.encode()


def version() -> str:
    """Of Penstock: ranks of several don't understand one another."""
    return str(sys.modules["penstock"].__version__)  # which imports what is above


def parse_address(address: str) -> tuple[str, int]:
    """`host:port`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r} isn't an address: write it like 10.0.0.2:7433.")
    return host.strip("[]"), int(port)


def connect(address: str, role: Role) -> Connection:
    """A connection to the stage that waits there. Raises RankError where none does, ConfigError
    without a key.
    """
    secret = key()
    try:
        there = socket.create_connection(parse_address(address), _HANDSHAKE_S)
    except OSError as error:
        raise RankError(
            f"No stage can be reached at {address}: {error}. Start one there: penstock rank MODEL "
            f"--listen {address}."
        ) from error
    there.settimeout(None)
    link = _prepared(there)
    try:
        answer_challenge(link, secret)
        deliver_challenge(link, secret)
        _wait(link, 0)
        link.send(role)
    except Exception as error:  # AuthenticationError is no other's kin
        link.close()
        raise RankError(
            f"The stage at {address} didn't answer as one that knows the key in {KEY}: {error!r}. "
            "Is it another key, or is that stage in use?"
        ) from error
    return link


def accept(listening: socket.socket) -> tuple[Connection, Role] | None:
    """Whoever comes next and knows the key, and what for; None for somebody who doesn't."""
    there, _ = listening.accept()
    link = _prepared(there)
    try:
        deliver_challenge(link, key())
        answer_challenge(link, key())
        role: Role = link.recv()
        _wait(link, 0)
    except Exception:
        link.close()
        return None
    return link, role


def wait_for_end(file: int, within_ms: int | None = None) -> bool:
    """Whether the other end of a connection has hung up within that time; None: until it does."""
    poll = select.poll()
    poll.register(file, select.POLLRDHUP)
    return bool(poll.poll(within_ms))


class There:
    """A rank on another machine, as the first one sees it."""

    def __init__(self, address: str, link: Connection) -> None:
        self._address = address
        self._link = link
        self._process = os.getpid()

    def ended(self) -> str | None:
        """How it has ended; None: it hasn't."""
        gone = self._link.closed or wait_for_end(self._link.fileno(), 0)
        return f"at {self._address} has hung up" if gone else None

    def wait(self) -> None:
        """Until it has ended."""
        wait_for_end(self._link.fileno())

    def hang_up(self) -> None:
        """Also where somebody waits for its end, and would keep the connection open."""
        if os.getpid() != self._process:  # a fork, whose end isn't that of the connection
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._link.fileno())) as there:
            there.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """It ends its session by itself, having been hung up on."""


def listen(address: str) -> socket.socket:
    """A socket that others come to. Raises ConfigError where the address can't be had."""
    host, port = parse_address(address)
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(f"{address} can't be listened at: {error}.") from error


def _prepared(there: socket.socket) -> Connection:
    """Small messages at once, an end that is noticed, and patience for a handshake only."""
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        there.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    link = Connection(there.detach())
    _wait(link, _HANDSHAKE_S)
    return link


def _wait(link: Connection, seconds: int) -> None:
    """How long reading waits for something; 0: for ever."""
    with socket.socket(fileno=os.dup(link.fileno())) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
