"""Reading a request's body: JSON as RFC 8259 has it, within what a request may need.

Python's own reader takes more (NaN, keys twice, UTF-16, halves of surrogate pairs) and ends in a
RecursionError where it takes less. What arrives here is UTF-8 text, and so is what goes back.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from penstock.server.errors import ApiError

MAX_DEPTH = 256  # of lists and objects in each other: a schema of 100 levels has 200
# What is read holds everybody up meanwhile, a second for some millions of values. These are far
# beyond what a request can use, and read in a fraction of one.
MAX_CONTAINERS = 1 << 16  # lists and objects
MAX_MEMBERS = 1 << 17  # of objects, together
MAX_VALUES = 1 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_MARKS = bytes(set(range(256)) - set(b'"[{:,'))


def read_json(body: bytes) -> Any:
    """The value that `body` writes. Raises ApiError 400 saying where it isn't one."""
    _check_counts(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _refused(f"byte {error.start:,} of {len(body):,} isn't UTF-8") from error
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant,
                           parse_float=_finite)  # fmt: skip
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise _refused(f"{error.msg.lower().removesuffix(' at')} at {at}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # an integer of thousands of digits
        raise _refused(str(error).partition(";")[0]) from error
    _check_depth(value)
    if _SURROGATE.search(body):
        _check_surrogates(value)
    return value


class JsonRoute(APIRoute):
    """An endpoint whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given requests that read so."""
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises ApiError for a key that is there twice: readers disagree which counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _refused(f"the key {twice[:80]!r} is in one object twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _refused(f"{name} isn't a number in JSON")


def _finite(text: str) -> float:
    found = float(text)
    if math.isinf(found):
        raise _refused(f"{text[:40]} is more than a number can be")
    return found


def _check_counts(body: bytes) -> None:
    """Count what is to be read before it is: with what texts hold, and only if need be without."""
    limits = (
        (b"[{", MAX_CONTAINERS, "lists and objects"),
        (b":", MAX_MEMBERS, "members of objects"),
        (b",", MAX_VALUES, "values"),
    )
    if all(_count(body, marks) <= most for marks, most, _ in limits):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    # One may stand after each bracket, colon and comma, and where there is nothing else.
    texts = MAX_CONTAINERS + MAX_MEMBERS + MAX_VALUES + 1
    _check(plain.count(b'"') // 2, texts, "texts")
    outside = b"".join(plain.split(b'"')[::2])
    for marks, most, what in limits:
        _check(_count(outside, marks), most, what)


def _check(found: int, most: int, what: str) -> None:
    if found > most:
        raise ApiError(
            413,
            f"The body has {found:,} {what}, and at most {most:,} are read. Send several requests.",
            code="request_too_large",
        )


def _count(body: bytes, marks: bytes) -> int:
    return sum(body.count(mark) for mark in marks)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [one for one in level if isinstance(one, list | dict)]
        if not level:
            return
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]
    raise _too_deep()


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise _refused(
            f"it has the lone surrogate U+{code:04X}, which isn't a character; replace it with "
            "U+FFFD"
        ) from error


def _too_deep() -> ApiError:
    return _refused(f"lists and objects are nested deeper than {MAX_DEPTH}")


def _refused(reason: str) -> ApiError:
    return ApiError(400, f"The body can't be read as JSON: {reason}.", code="invalid_json")
