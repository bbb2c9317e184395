"""What a prefix cache that never forgets could have had ready: a bound for the server's own."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.bench.serve.vocabulary import Indices


def reusable_tokens(prompts: Iterable[Indices], block_size: int) -> list[int]:
    """Of each prompt, the tokens in its leading full blocks that an earlier prompt began with.

    prompts: in the order of their arrival. A block counts only behind the same blocks: it is known
    by what precedes it and its tokens, compared exactly.
    """
    known: dict[tuple[int, bytes], int] = {}  # (the block before, tokens) → this block
    found = []
    for prompt in prompts:
        parent, hits, still = 0, 0, True
        for start in range(0, len(prompt) - block_size + 1, block_size):
            key = (parent, prompt[start : start + block_size].tobytes())
            block = known.get(key)
            if block is None:
                still = False
                block = known[key] = len(known) + 1
            hits += still
            parent = block
        found.append(hits * block_size)
    return found
