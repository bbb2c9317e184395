"""Penstock: an LLM inference engine that knows its floor."""

__version__ = "0.1.0"
