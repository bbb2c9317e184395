"""Speculation: guessing several tokens, and computing them in one step."""

from penstock.speculate.control import Controller, Record
from penstock.speculate.counts import DraftCounts
from penstock.speculate.proposer import Draft, Proposer, Wish

__all__ = ["Controller", "Draft", "DraftCounts", "Proposer", "Record", "Wish"]
