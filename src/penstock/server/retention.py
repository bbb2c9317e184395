"""Which turns of a conversation go where it is too long: some more than need be, so that the next
requests find what is left of it in the cache.

A server keeps nothing of a conversation, and where the oldest turn goes with each request, none
begins as the one before did. So it is played through: where a request must have been too long,
turns went until a share of the room was left, and the next ones left out the same until they were
too long again. Every request of a conversation comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def first_kept(
    sizes: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    fixed: int,
    room: int,
    retention: float,
) -> int:
    """Which of `starts` the last request of a conversation begins with.

    sizes: tokens of each message. starts: messages that a prompt may begin with, the first behind
    what always stays, which has `fixed` tokens. ends: behind the last message of each request,
    ascending. room: tokens of a prompt. retention: the share of it that is kept where it was too
    long.
    """
    before, at = [0, *accumulate(sizes)], 0
    for end in ends:
        if fixed + before[end] - before[starts[at]] <= room:
            continue
        while (
            at + 1 < len(starts)
            and starts[at + 1] < end
            and fixed + before[end] - before[starts[at]] > retention * room
        ):
            at += 1
    return at
