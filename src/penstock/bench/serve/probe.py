"""What the server has and takes, found out before anything is measured."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.bench.serve.api import Answer, Api
from penstock.bench.serve.http_client import HttpClient
from penstock.bench.serve.options import PromptForm
from penstock.bench.serve.record import RequestRecord
from penstock.bench.serve.vocabulary import (
    FALLBACK_SIZE,
    Vocabulary,
    of_ids,
    of_size,
    of_words,
)
from penstock.errors import ConfigError, nearest
from penstock.http1 import ExchangeError

if TYPE_CHECKING:
    from penstock.tokenizer import Tokenizer

PROBE_TOKENS = 8
REFUSED = (400, 404, 415, 422)  # what servers answer to fields that they don't take
LOADING = 503  # a server that listens, but whose model isn't there yet
WAIT_S = 0.5  # between two attempts to reach a server that is starting


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of the server's list of models."""

    name: str
    max_model_len: int | None = None  # tokens, where the server says so
    vocab_size: int | None = None
    owned_by: str | None = None  # `vllm`, `llamacpp`, …
    image_token_id: int | None = None  # Penstock's, of a model that sees


async def served_model(
    client: HttpClient, wanted: str | None, *, timeout_s: float, wait_s: float = 0.0
) -> ServedModel:
    """The model to ask for: `wanted`, or the first that the server lists.

    wait_s: how long to go on trying while no connection can be made.
    Raises `ConfigError` where the server can't be reached, or lists only others.
    """
    status, body = await _models(client, timeout_s, wait_s)
    if status in (401, 403):
        raise ConfigError(
            f"{client.server.authority} refuses the API key (HTTP {status}). Give another with "
            "--api-key or OPENAI_API_KEY."
        )
    listed = body.get("data") if isinstance(body, dict) and status == 200 else None
    entries = [e for e in listed or [] if isinstance(e, dict) and isinstance(e.get("id"), str)]
    if not entries:
        if wanted is None:
            raise ConfigError(
                f"{client.server.authority} lists no models at {client.server.prefix}/v1/models "
                f"(HTTP {status}): name one with --model, or correct --base-url."
            )
        return ServedModel(wanted)
    names = [e["id"] for e in entries]
    if wanted is not None and wanted not in names:
        raise ConfigError(
            f"The server has no model {wanted!r}, but {', '.join(names)}.{nearest(wanted, names)}"
        )
    entry = entries[0 if wanted is None else names.index(wanted)]
    meta: dict[str, Any] = entry["meta"] if isinstance(entry.get("meta"), dict) else {}
    return ServedModel(
        entry["id"],
        max_model_len=_positive(entry.get("max_model_len")),
        vocab_size=_positive(entry.get("vocab_size")) or _positive(meta.get("n_vocab")),
        owned_by=entry.get("owned_by") if isinstance(entry.get("owned_by"), str) else None,
        image_token_id=_positive(meta.get("image_token_id")),
    )


async def _models(client: HttpClient, timeout_s: float, wait_s: float) -> tuple[int, Any]:
    until = time.monotonic() + wait_s
    while True:
        try:
            status, body = await client.get_json("/v1/models", timeout_s=min(timeout_s, 30.0))
            if status != LOADING or time.monotonic() >= until:
                return status, body
        except ExchangeError as failure:
            if time.monotonic() >= until:
                raise ConfigError(
                    f"--base-url: {failure} Is the server running there? "
                    "--ready-timeout SECONDS waits for one that is starting."
                ) from failure
        await asyncio.sleep(WAIT_S)


def find_tokenizer(given: str | None, model: str) -> tuple[Tokenizer, str] | None:
    """The tokenizer that was named, or that of a model whose name is a folder here.

    Nothing is downloaded that wasn't named.
    """
    from penstock.models.hub import EMBEDDED, resolve
    from penstock.tokenizer import Tokenizer

    name = given or (model if model in EMBEDDED or Path(model).is_dir() else None)
    return None if name is None else (Tokenizer.from_folder(resolve(name)), name)


def choose_vocabulary(
    as_text: bool, tokenizer: tuple[Tokenizer, str] | None, given: int | None, served: ServedModel
) -> Vocabulary:
    """What prompts are drawn from. Raises `ConfigError` for text without a tokenizer, or with a
    number of ids.
    """
    if as_text:
        if given is not None:
            raise ConfigError(
                f"The server takes prompts of text only, and --vocab-size {given} is of token ids. "
                "Leave it out."
            )
        if tokenizer is None:
            raise ConfigError(
                "Prompts of text need the model's tokenizer, so that their length is known: give "
                "--tokenizer FOLDER or a hub id."
            )
        return of_words(*tokenizer)
    if given is not None:
        return of_size(given, "--vocab-size")
    if tokenizer is not None:
        return of_ids(*tokenizer)
    if served.vocab_size is not None:
        return of_size(served.vocab_size, "the server", served.image_token_id)
    return of_size(FALLBACK_SIZE, "neither tokenizer nor server says how many ids there are")


async def agree(
    client: HttpClient, api: Api, form: PromptForm, can_write_text: bool, *, timeout_s: float
) -> Api:
    """Send a short request; where it is refused, again without what not every server takes.

    First without `stream_options`, then with text for a prompt (`auto` only). Raises
    `ConfigError` with the server's own words for the first refusal.
    """
    forms = [form == "text"] if form != "auto" else [False, True] if can_write_text else [False]
    if api.backend == "openai-chat":
        forms = [True]
    refused: ExchangeError | None = None
    for as_text in forms:
        for include_usage in (True, False):
            attempt = replace(api, as_text=as_text, include_usage=include_usage)
            try:
                await _ask(client, attempt, timeout_s)
            except ExchangeError as failure:
                refused = refused or failure
                if failure.kind not in [f"HTTP {status}" for status in REFUSED]:
                    break
            else:
                return attempt
        if refused is not None and not refused.kind.startswith("HTTP 4"):
            break
    assert refused is not None
    raise ConfigError(f"A first, short request to {api.endpoint} failed: {refused}") from refused


async def _ask(client: HttpClient, api: Api, timeout_s: float) -> None:
    words = Vocabulary(np.arange(1, PROBE_TOKENS + 1, dtype=np.int32), [" a"] * PROBE_TOKENS, "")
    record = RequestRecord(0, 0, PROBE_TOKENS, 2, 0.0)
    answer = Answer(api, record, time.perf_counter, lambda tokens: None)
    prompt = api.opening(words, np.arange(PROBE_TOKENS, dtype=np.int32))
    response = await client.post(
        api.endpoint,
        api.body(prompt, 2),
        on_body=answer.feed,
        on_sent=lambda: None,
        timeout_s=timeout_s,
    )
    answer.finish(response.headers.get("content-type", ""))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
