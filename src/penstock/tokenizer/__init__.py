"""Text to token ids and back: tokenizers, chat templates, streaming detokenization."""

from __future__ import annotations

from penstock.tokenizer.detokenizer import IncrementalDetokenizer
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.tokenizer.vocab_map import VocabMap

__all__ = ["IncrementalDetokenizer", "Tokenizer", "VocabMap"]
