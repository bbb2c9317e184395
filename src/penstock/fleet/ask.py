"""A request to a model, as far as the fleet reads it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.server.body import read_json
from penstock.server.errors import ApiError
from penstock.server.keys import Limits
from penstock.server.protocol.items import REFERENCE
from penstock.server.sse import dumps

SAMPLED = ("/v1/chat/completions", "/v1/completions")
"""Endpoints whose answers can be gone on with elsewhere."""
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Endpoints that answer prompts, and what the length of an answer is called there."""
_OF_ANSWERS = frozenset(
    ("best_of", "early_stopping", "echo", "guided_choice", "guided_grammar", "guided_json",
     "guided_regex", "length_penalty", "logprobs", "max_completion_tokens", "min_tokens", "n",
     "prediction", "prompt_logprobs", "response_format", "stop", "stream", "stream_options",
     "structured_outputs", "top_logprobs", "use_beam_search")
)  # fmt: skip
"""Fields that a prompt doesn't depend on."""
_WISHES = {"priority": "priority", "ttft_slo_ms": "edf", "tpot_slo_ms": "edf"}
"""What keys wish for, by the policy that heeds it."""
_WISHED = (*SAMPLED, "/v1/responses", "/v1/responses/compact", "/v1/messages",
           "/v1/embeddings")  # fmt: skip
_FIRST = ("prompt_cache_key", "cache_salt", "tools", "system", "instructions")
_PROMPTS = ("messages", "prompt", "input")
CHUNK_BYTES = 128
_CHARACTERS = 1 << 16
"""Of a prompt, by which an instance is chosen."""
_MOST_SAMPLES = 4096  # that are counted: more than any instance takes
_PICTURE = "data:"  # begins its address
_PIECE = 256  # of that


@dataclass
class Ask:
    """One request: where to, what, and with which headers."""

    path: str
    data: dict[str, Any]
    body: bytes
    headers: Sequence[tuple[str, str]] = ()

    @cached_property
    def prefix(self) -> bytes:
        """How its prompt begins."""
        return _prefix(self.data)

    @cached_property
    def chunks(self) -> list[int]:
        """Of the prefix, each known by a hash of all up to its end."""
        found, before = [], 0
        for start in range(0, len(self.prefix), CHUNK_BYTES):
            before = hash((before, self.prefix[start : start + CHUNK_BYTES]))
            found.append(before)
        return found

    @cached_property
    def size(self) -> int:
        """Characters of its prompt, pictures apart."""
        return sum(_size(self.data.get(name)) for name in (*_FIRST, *_PROMPTS))

    @classmethod
    def of(cls, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> Ask:
        """Raises ApiError 400 for a body that isn't a JSON object."""
        data = read_json(body)
        if not isinstance(data, dict):
            raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
        return cls(path, data, body, headers)

    @property
    def model(self) -> str | None:
        """What it names. Raises ApiError 400 for what is no name."""
        found = self.data.get("model")
        if found is not None and not isinstance(found, str):
            raise ApiError(400, "model must be a text.", param="model")
        return found

    @property
    def previous(self) -> str | None:
        """The id of the response that it goes on from. Others are for instances to refuse."""
        found = self.data.get("previous_response_id")
        return found if isinstance(found, str) and found else None

    @property
    def references(self) -> list[tuple[int, str]]:
        """(where it stands in the input, the id) of each item that stands for one of before."""
        items = self.data.get("input")
        if not isinstance(items, list):
            return []
        found = ((i, x) for i, x in enumerate(items) if isinstance(x, dict))
        ids = ((i, x.get("id")) for i, x in found if x.get("type") == REFERENCE)
        return [(i, name) for i, name in ids if isinstance(name, str)]

    @property
    def streams(self) -> bool:
        """Whether its answer comes in events."""
        return self.data.get("stream") is True

    @property
    def prompts(self) -> int:
        """How many prompts it brings."""
        for name in ("prompt", "input"):
            found = self.data.get(name)
            if isinstance(found, list) and found and isinstance(found[0], str | list):
                return len(found)
        return 1

    @property
    def sequences(self) -> int:
        """How many run at once for it."""
        return self.prompts * self.samples

    @property
    def samples(self) -> int:
        """Of each prompt; what can't be is for the instance to refuse."""
        asked = [self.data.get(name) for name in ("n", "best_of")]
        whole = [x for x in asked if isinstance(x, int) and not isinstance(x, bool)]
        return min(max([1, *whole]), _MOST_SAMPLES)

    def wish(self, limits: Limits, policy: str | None) -> None:
        """Put in what its key wishes for and it doesn't say itself.

        policy: the model's, which heeds some of it; None: it isn't known.
        """
        heeded = [name for name, by in _WISHES.items() if policy in (None, by)]
        wishes = {name: getattr(limits, name) for name in heeded}
        wishes = {k: v for k, v in wishes.items() if v and self.data.get(k) is None}
        if wishes and self.path in _WISHED:
            self._change(wishes)

    def settle_seed(self) -> None:
        """Give it a seed where it has none, so that another instance would say the same."""
        if self.path in SAMPLED and self.streams and self.data.get("seed") is None:
            if self.data.get("temperature") != 0:
                self._change({"seed": secrets.randbits(62)})

    @property
    def may_be_handed_over(self) -> bool:
        """Whether one instance can compute its prompt for another.

        Not where every place of the prompt is read, or where what is left out of it, or summed up,
        depends on how long the answer may be.
        """
        data = self.data
        read = data.get("prompt_logprobs") is not None or (
            data.get("echo") and data.get("logprobs")
        )
        cut = data.get("truncation") not in (None, "disabled") or data.get("context_management")
        kept = self.previous is not None or self.references  # by one instance alone
        takes = self.path in LIMITS and data.get("kv_transfer_params") is None
        return takes and not (read or cut or kept)

    def prefill(self) -> Ask:
        """The same for the one that computes the prompt: a token, and no more."""
        data = {k: v for k, v in self.data.items() if k not in _OF_ANSWERS}
        data |= {LIMITS[self.path]: 1, "kv_transfer_params": {"do_remote_decode": True}}
        if self.path == "/v1/responses":
            data["store"] = False
        made = Ask(self.path, data, dumps(data).encode(), self.headers)
        made.chunks = self.chunks
        return made

    def _change(self, fields: dict[str, Any]) -> None:
        before, self.data = self.data, self.data | fields
        if before.keys() & fields.keys() or not before:
            self.body = dumps(self.data).encode()
        else:  # a body may hold many megabytes of pictures: they aren't written anew
            head, brace, rest = self.body.partition(b"{")
            self.body = head + brace + dumps(fields)[1:-1].encode() + b"," + rest


def _prefix(data: dict[str, Any]) -> bytes:
    """How a prompt begins: a longer conversation begins as a shorter one does."""
    parts = [data.get(name) for name in _FIRST]
    text = dumps([_shortened(x) for x in parts if x is not None])
    for name in _PROMPTS:
        found = data.get(name)
        if isinstance(found, list):
            size = len(text)
            for one in found:
                text += dumps(_shortened(one))
                if len(text) - size > _CHARACTERS:
                    break
        elif isinstance(found, str):
            text += found[:_CHARACTERS]
    return text[:_CHARACTERS].encode(errors="replace")


def _shortened(value: Any) -> Any:
    """With a hash for each picture, and of a text that is long its beginning."""
    if isinstance(value, str):
        if value.startswith(_PICTURE):
            return [value[:_PIECE], hash(value)]
        return value[:_CHARACTERS]
    if isinstance(value, list):
        return [_shortened(x) for x in value]
    if isinstance(value, dict):
        return {k: _shortened(v) for k, v in value.items()}
    return value


def _size(value: Any) -> int:
    """Characters of all texts; a token's id counts as one of four."""
    if isinstance(value, str):
        return 0 if value.startswith(_PICTURE) else len(value)
    if isinstance(value, list):
        return sum(map(_size, value))
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return 4 if isinstance(value, int) else 0
