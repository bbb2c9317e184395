"""Requests that run with an adapter."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.engine.request import Request
from penstock.errors import RequestError
from penstock.runtime import Runtime


def take_adapter(runtime: Runtime, requests: Seq[Request]) -> None:
    """Give requests that belong together the adapter that their options name.

    Raises RequestError where it isn't there.
    """
    asked = requests[0].options.adapter
    if asked is None:
        return
    name = asked if isinstance(asked, str) else asked.name
    if runtime.adapters is None:
        raise RequestError(
            f"A request names the adapter {name!r:.80}, but the model was loaded without "
            "enable_lora=True."
        )
    adapters = runtime.adapters
    adapter = adapters.use(asked) if isinstance(asked, str) else adapters.use_held(asked)
    for request in requests:
        request.adapter = adapter


def give_back_adapter(runtime: Runtime, request: Request) -> None:
    """A request has ended."""
    if request.adapter is not None:
        assert runtime.adapters is not None  # which it came from
        runtime.adapters.release(request.adapter)
