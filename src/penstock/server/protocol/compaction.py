"""The item that stands for what was said in a conversation, in OpenAI's words a compaction.

`encrypted_content` is opaque to clients, as the API has it. Here it isn't encrypted: whoever holds
it has sent, or been told, all that is in it. It is JSON, compressed, behind a digest by which one
that is broken or another server's is told. Nothing is kept for it, so an item is good after a
restart and with every instance of a fleet; and it can say nothing that messages couldn't.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from typing import Any

from pydantic import Field, ValidationError

from penstock.server.compaction import IMPOSSIBLE, Conversation
from penstock.server.errors import ApiError
from penstock.server.protocol.chat import Message
from penstock.server.protocol.common import MOST_MESSAGES, Body, Some

_PREFIX = "penstock1."
_DIGEST_BYTES = 16
_MOST_BYTES = 32 << 20  # of an item, unpacked
_ALWAYS_BYTES = 1 << 20  # it may have so many
_RATIO = 64  # … or so many times those that it was packed into


class _Content(Body):
    """What an item holds. kept: the turns that were left as they are."""

    system: Some[Message] = Field(max_length=MOST_MESSAGES)
    summary: str
    kept: Some[Message] = Field(max_length=MOST_MESSAGES)


def sealed(conversation: Conversation) -> str:
    """`encrypted_content` of an item that stands for all of a conversation.

    Raises ApiError for one that would be larger than an item may be.
    """
    content = {
        "system": [_unmarked(message) for message in conversation.system],
        "summary": conversation.summary,
        "kept": [_unmarked(message) for message in conversation.others],
    }
    plain = json.dumps(content, ensure_ascii=False).encode()
    if len(plain) > _MOST_BYTES:
        raise ApiError(
            400,
            f"The turns that stay as they are, and the summary, have {len(plain):,} bytes; a "
            f"compaction item holds {_MOST_BYTES:,}. Send shorter messages or smaller pictures.",
            code=IMPOSSIBLE,
        )
    packed = zlib.compress(plain)
    if len(plain) > _most_unpacked(packed):  # what stands behind its end isn't read
        packed = packed.ljust(-(-len(plain) // _RATIO), b"\0")
    digest = hashlib.sha256(packed).digest()[:_DIGEST_BYTES]
    return _PREFIX + base64.urlsafe_b64encode(digest + packed).decode()


def _unmarked(message: Message) -> dict[str, Any]:
    """Without `cache_control`: who sends the item can't see such marks, and has others by then."""
    found = message.model_dump(exclude_none=True, exclude={"cache_control"})
    if isinstance(found.get("content"), list):
        for part in found["content"]:
            part.pop("cache_control", None)
    return found


def unsealed(text: str, place: str) -> Conversation:
    """What the item stands for. Raises ApiError for one that is broken, or another server's."""
    content = _read(text)
    if content is None:
        raise ApiError(
            400,
            f"{place} ({len(text):,} characters) isn't that of a compaction item of this server: "
            "it was changed, cut, or made elsewhere. Send the item as it came, or leave it out and "
            "send the messages that it stands for.",
            param=place,
            code="invalid_compaction_item",
        )
    return Conversation([*content.system, *content.kept], content.summary)


def _read(text: str) -> _Content | None:
    if not text.startswith(_PREFIX):
        return None
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        digest, packed = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if hashlib.sha256(packed).digest()[:_DIGEST_BYTES] != digest:
            return None
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(packed, _most_unpacked(packed))
        if not unpacking.eof:
            return None
        return _Content.model_validate_json(plain)
    except (binascii.Error, ValueError, zlib.error, ValidationError):
        return None


def output_items(conversation: Conversation, name: str) -> list[dict[str, Any]]:
    """What `/v1/responses/compact` answers: the user's messages that were kept, then the item."""
    said = [m for m in conversation.others if m.role == "user"]
    return [
        *(
            {
                "type": "message",
                "id": f"msg_{name}_{i}",
                "status": "completed",
                "role": "user",
                "content": [{"type": "input_text", "text": _text_of(message)}],
            }
            for i, message in enumerate(said)
        ),
        compaction_item(conversation, name),
    ]


def _most_unpacked(packed: bytes) -> int:
    """Bytes that are unpacked at most: a few that stand for many would hold everybody up."""
    return min(_MOST_BYTES, max(_ALWAYS_BYTES, _RATIO * len(packed)))


def compaction_item(conversation: Conversation, name: str) -> dict[str, Any]:
    """The item."""
    return {"type": "compaction", "id": f"cmp_{name}", "encrypted_content": sealed(conversation)}


def compaction_block(conversation: Conversation) -> dict[str, Any]:
    """The same as a block of Anthropic's messages, which shows the summary."""
    sealed_content = sealed(conversation)
    return {
        "type": "compaction",
        "content": conversation.summary,
        "encrypted_content": sealed_content,
    }


def _text_of(message: Message) -> str:
    return "\n".join(text for text, _ in message.passages() if text)
