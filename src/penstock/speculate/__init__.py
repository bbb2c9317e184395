"""Speculation: guessing several tokens, and computing them in one step."""

from penstock.speculate.proposer import Draft, Proposer, Wish

__all__ = ["Draft", "Proposer", "Wish"]
