"""Held to a form: schemas, regular expressions and grammars as constraints on tokens."""

from __future__ import annotations

from penstock.grammar.compiler import Grammars, GrammarStats
from penstock.grammar.state import GrammarState

__all__ = ["GrammarState", "GrammarStats", "Grammars"]
