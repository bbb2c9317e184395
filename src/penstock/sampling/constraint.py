"""What limits the next token of a sequence by those before it: a grammar, a prefix to complete.

A constraint is a state that moves with its sequence's tokens. Its masks are computed while the
forward pass runs, in another thread, so nothing else may use it meanwhile.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]
"""One bit per token, the lowest first: 1 where the token may come, [⌈V / 32⌉]."""


class Constraint(Protocol):
    """The state of one sequence."""

    def fill(self, bits: Bits) -> None:
        """Write which tokens may come next, every word of it."""

    def accept(self, token_id: int) -> None:
        """The sequence goes on with this token.

        Raises RequestError for one that mustn't come, and where a limit is reached.
        """

    def forced(self) -> list[int]:
        """Tokens of which each is the only one that may come, in order; none is accepted yet."""

    @property
    def is_complete(self) -> bool:
        """Whether the text ends here: nothing may come but an end token."""

    @property
    def is_over(self) -> bool:
        """Whether it limits nothing any more, so that the sequence can go on without it."""

    @property
    def may_end(self) -> bool:
        """Whether the text may end here, so that an end token is among those that may come."""

    def fork(self) -> Constraint:
        """The same state for another sequence with the same tokens."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""


def num_words(vocab_size: int) -> int:
    """The words of a mask."""
    return -(-vocab_size // 32)
