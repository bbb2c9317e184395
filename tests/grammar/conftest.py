"""Tokenizers of both kinds, and structures compiled for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.tokenizer.conftest import folder_of, shared_data, tokenizer_of

from penstock.grammar import Grammars
from penstock.tokenizer import Tokenizer

__all__ = ["folder_of", "shared_data", "tokenizer_of"]


@pytest.fixture(scope="session")
def grammars_of(tokenizer_of: Callable[[str], Tokenizer]) -> Callable[[str], Grammars]:
    made: dict[str, Grammars] = {}

    def make(name: str) -> Grammars:
        if name not in made:
            tokenizer = tokenizer_of(name)
            eos = tokenizer.eos_token_id
            ends = [] if eos is None else [eos]
            # A busy machine must not turn what compiles into what is refused.
            made[name] = Grammars(tokenizer, tokenizer.vocab_size, ends, deadline_s=120.0)
        return made[name]

    return make
