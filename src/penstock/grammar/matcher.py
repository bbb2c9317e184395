"""The library's own call, whose failures of any kind become an error of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.grammar.refusal import Refusal
from penstock.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance

LEXER_STATES: Final = 50_000
"""Of one lexer, which a compiled form's copies share."""


def build_matcher(vocabulary: Vocabulary, grammar: str, fuel: int) -> llguidance.LLMatcher:
    """The matcher of a grammar in the library's form; its error is in `get_error`.

    fuel: what building its lexer may take; a million is half a second to two.
    """
    import llguidance

    tokens = vocabulary.tokens
    # What a mask may take is the library's default; with these and the checks before, the slowest
    # input that was found is refused in a second or two (tests/grammar/test_grammar_compiler.py).
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=fuel,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=60_000,
        max_items_in_row=20_000,
        verbose_errors=False,
    )
    return new_matcher(tokens, grammar, limits)


def new_matcher(
    tokens: llguidance.LLTokenizer, grammar: str, limits: llguidance.LLParserLimits
) -> llguidance.LLMatcher:
    """The same with other limits. Raises Refusal for what the library can't take."""
    import llguidance

    try:
        return llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
    except (ValueError, TypeError, RuntimeError) as error:
        raise Refusal("it can't be read", detail=first_line(str(error))) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's own, which no class here names
            raise
        raise Refusal("it is more than the library can take", detail=first_line(str(error))) from (
            error
        )


def first_line(detail: str) -> str:
    """The library's message without a trace and without the source."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    if said.startswith(("regex parse error", "panic")) or said.endswith("regex parse error:"):
        more = [line for line in lines if line.startswith("error:")]
        said = (said if not more else more[-1].removeprefix("error: ")).removeprefix("panic: ")
    return said if len(said) <= 200 else said[:200] + "…"
