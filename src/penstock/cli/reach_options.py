"""Options that say how far a token sees."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.options import given

_PANEL = "Cache"

MaxAttentionWindow = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="A token sees the latest so many, and no more is kept: texts may then be longer than "
        "what the model was made for. Default: it sees all.",
        rich_help_panel=_PANEL,
    ),
]
SinkTokenLength = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Of those, so many are the first of the sequence (StreamingLLM). Default: 4.",
        rich_help_panel=_PANEL,
    ),
]


def reaching(window: int | None, sink_tokens: int | None) -> dict[str, Any]:
    """As arguments of an engine."""
    return given(max_attention_window=window, sink_token_length=sink_tokens)
