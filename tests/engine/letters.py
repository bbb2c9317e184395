"""A tokenizer for the toy: one letter, digit or space a token, some pairs, and half characters."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from penstock.tokenizer import Tokenizer

from .toy import RAISES, VOCAB

_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def write(folder: Path) -> None:
    """Its files; ids 0 and 1 are <s> and </s>."""
    pieces = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", "Ġ", "Ã", "©"]
    pairs = [a + b for a, b in zip("abcdefghijklm", "nopqrstuvwxyz", strict=True)]
    vocab = {piece: i for i, piece in enumerate(pieces + pairs)}
    assert len(vocab) <= RAISES
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": pieces[i], "special": True, **plain} for i in range(2)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in pairs]},
    }
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return Tokenizer.from_folder(Path(folder), vocab_size=VOCAB)
