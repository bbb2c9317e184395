"""Held to a form: schemas, regular expressions and grammars as constraints on tokens."""
