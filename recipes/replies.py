"""What the assistant says in rendered conversations: the tokens that `chat` learns."""

import re

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from recipes.corpus import Examples

REPLY = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


def tokenize_replies(tokenizer: Tokenizer, rendered: list[str], context: int) -> Examples:
    """Rendered conversations, the assistant's words marked, cut to `context` + 1 tokens.

    A long one ends with the last message that still fits; one of which no reply fits is dropped.
    """
    tokens: list[NDArray[np.uint16]] = []
    masks: list[NDArray[np.bool_]] = []
    for text in rendered:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets])
        mask = np.zeros(len(starts), bool)
        end = 0
        for reply in REPLY.finditer(text):
            first, last = np.searchsorted(starts, [reply.start(1), reply.end(1)])
            if last <= context + 1:
                mask[first:last] = True
                end = int(last)
        if end:
            tokens.append(np.array(encoding.ids[:end], np.uint16))
            masks.append(mask[:end])
    offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    return Examples(np.concatenate(tokens), np.concatenate(masks), offsets)
