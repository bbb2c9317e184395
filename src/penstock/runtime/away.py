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
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal

from penstock.config.parallel import parse_address
from penstock.errors import ConfigError, RankError

KEY = "PENSTOCK_RANK_KEY"
"""The variable that has the key."""

Role = Literal["orders", "rows"]

_HANDSHAKE_S = 30  # a session that has just begun imports torch first
_STRANGER_S = 10  # that somebody may take to prove that he knows the key
_SILENT_MS = 25_000  # after something was sent; keepalive asks only where nothing is under way
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


def connect(address: str, role: Role) -> Connection:
    """A connection to the stage that waits there. Raises RankError where none does, ConfigError
    without a key.
    """
    secret = key()
    try:
        there = socket.create_connection(parse_address(address), _HANDSHAKE_S)
    except (OSError, UnicodeError) as error:
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
    except AuthenticationError as error:
        link.close()
        raise RankError(f"The stage at {address} has another key in {KEY}.") from error
    except Exception as error:
        link.close()
        why = f"in {_HANDSHAKE_S} s" if isinstance(error, BlockingIOError) else f"({error})"
        raise RankError(
            f"The stage at {address} didn't answer {why}: it is in use by another model, or isn't "
            "one. A stage takes one first rank at a time."
        ) from error
    return link


def accept(listening: socket.socket) -> tuple[Connection, Role] | None:
    """Whoever comes next and knows the key, and what for; None for somebody who doesn't."""
    there, _ = listening.accept()
    link = _prepared(there)
    patience = threading.Timer(_STRANGER_S, _shut, (link.fileno(),))
    patience.start()
    try:
        deliver_challenge(link, key())
        answer_challenge(link, key())
        role: Role = link.recv()
        _wait(link, 0)
    except Exception:
        patience.cancel()
        link.close()
        return None
    patience.cancel()
    return link, role


def _shut(file: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(file)) as there:
        there.shutdown(socket.SHUT_RDWR)


def wait_for_end(file: int, within_ms: int | None = None, process: int | None = None) -> bool:
    """Whether the other end of a connection has hung up, or that process has ended, within that
    time; None: when it does.
    """
    poll = select.poll()
    poll.register(file, select.POLLRDHUP)
    if process is None:
        return bool(poll.poll(within_ms))
    try:
        of_process = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        poll.register(of_process, select.POLLIN)
        return bool(poll.poll(within_ms))
    finally:
        os.close(of_process)


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

    @property
    def gave_up(self) -> bool:
        """Whether it ended by raising something, which it has told: that isn't known from here."""
        return False

    def wait(self) -> None:
        """Until it has ended."""
        wait_for_end(self._link.fileno())

    def hang_up(self) -> None:
        """Also where somebody waits for its end, and would keep the connection open."""
        if os.getpid() == self._process and not self._link.closed:  # not a fork of it
            _shut(self._link.fileno())

    def kill(self) -> None:
        """Nobody waits for it any more."""
        self.hang_up()

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
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
    for name, value in _ALIVE.items():
        there.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    link = Connection(there.detach())
    _wait(link, _HANDSHAKE_S)
    return link


def _wait(link: Connection, seconds: int) -> None:
    """How long reading waits for something; 0: for ever."""
    with socket.socket(fileno=os.dup(link.fileno())) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
