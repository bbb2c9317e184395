"""Speculation: guessing several tokens, and computing them in one step."""

from penstock.speculate.control import Controller, Record
from penstock.speculate.counts import DraftCounts
from penstock.speculate.proposer import ROOT, Computed, Draft, Proposer, StateReader, Wish, followed

__all__ = [
    "ROOT",
    "Computed",
    "Controller",
    "Draft",
    "DraftCounts",
    "Proposer",
    "Record",
    "StateReader",
    "Wish",
    "followed",
]
