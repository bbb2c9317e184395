"""A form is tried out before it is taken: what breaks after a few tokens is refused at once.

A regex such as (a{1000}){1000} can be begun, but what remains of it after one character is more
than the library's fuel of one step can write; the request would end in the middle of its text. How
long a form can be followed isn't known before; one that can for a while mostly can.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.errors import RequestError
from penstock.grammar.refusal import Refusal, pointer
from penstock.grammar.state import GrammarState
from penstock.grammar.subschemas import Schema, reachable
from penstock.grammar.vocabulary import Vocabulary

Tokens = npt.NDArray[np.intp]

STEPS_OF_A_REGEX: Final = 128
"""What grows with each step needs some: (a{1,1000}){1,1000} breaks after about 100."""

STEPS: Final = 8
"""Of any other form, whose masks may take a millisecond each."""

MOST_S: Final = 0.3
"""Of a core, for all steps together: a real schema's take a tenth of it at most."""

_CHOICES: Final = 6  # at each step, until one of them doesn't end the text

MOST_TRIED: Final = 16  # of a schema's patterns, a few milliseconds each
_SUSPICIOUS: Final = re.compile(r"(?<!\\u)\{\d{2,}|\)[*+{]|(?:\?[^)]?){20}|.{400}", re.DOTALL)


def suspicious(document: Schema) -> Iterator[tuple[str, str]]:
    """Patterns of a prepared schema that may break, with their places: counts, groups repeated."""
    if isinstance(document, dict):
        patterns = {
            schema["pattern"]: path
            for path, schema in reachable(document)
            if _SUSPICIOUS.search(schema.get("pattern", ""))
        }
        for pattern, path in itertools.islice(patterns.items(), MOST_TRIED):
            yield pointer((*path, "pattern")), pattern


def check_steps(state: GrammarState, vocabulary: Vocabulary, steps: int) -> None:
    """Raises Refusal where it breaks within some tokens, of a text that is long if it can be."""
    until = time.thread_time() + MOST_S
    may = _going_on(state, vocabulary, 1)
    for step in range(1, steps):
        if not len(may):
            return
        if time.thread_time() > until:
            raise Refusal(
                f"{step} tokens of a text that follows it take longer than {MOST_S:g} s to allow, "
                "which would hold up the requests beside it. Repetitions of repetitions make that"
            )
        before = state
        for token in np.roll(may[np.linspace(0, len(may) - 1, _CHOICES, dtype=int)], step):
            state = before.fork()
            try:
                state.accept(int(token))
            except RequestError as error:
                raise _breaks(state, step) from error
            more = _going_on(state, vocabulary, step + 1)
            if len(more):
                break
        may = more


def _going_on(state: GrammarState, vocabulary: Vocabulary, step: int) -> Tokens:
    """The tokens that may come next and don't end it."""
    bits = np.zeros(vocabulary.words, dtype=np.int32)
    try:
        state.fill(bits)
    except RequestError as error:
        raise _breaks(state, step) from error
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little", count=vocabulary.size)
    flags[list(vocabulary.eos_token_ids)] = 0
    return np.flatnonzero(flags)


def _breaks(state: GrammarState, step: int) -> Refusal:
    return Refusal(
        f"a text that follows it breaks off at token {step}, for more would remain of it than can "
        "be kept. Repetitions within each other make that, and many optional parts in a row",
        detail=state.failure,
    )
