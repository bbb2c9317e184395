"""What following a text takes, and when that is too much."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from penstock.errors import RequestError

FIRST_S: Final = 1.0
EACH_S: Final = 0.004
"""Seconds of a core that a text may take: at first, and more for each token of it. Usual is less
than a tenth of that. Where a text can be read in more and more ways, each token takes longer than
the one before, and the requests beside it would wait."""


@dataclass(slots=True)
class Work:
    """Of a state of a grammar and all that it was forked into."""

    seconds: float = 0.0
    tokens: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of this thread."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - start

    def check(self) -> None:
        """Raises RequestError where it is too much."""
        if self.seconds > FIRST_S + EACH_S * self.tokens:
            raise RequestError(
                f"Following {self.tokens:,} tokens as the grammar says has taken "
                f"{self.seconds:.1f} seconds of a core: there are too many ways to read them. "
                "Make the grammar less ambiguous: one way to write each thing."
            )
