"""Speculation: guessing several tokens, and computing them in one step."""

from penstock.speculate.control import Controller, Record
from penstock.speculate.counts import DraftCounts
from penstock.speculate.prediction import Expected, Prediction
from penstock.speculate.proposer import (
    ROOT,
    Computed,
    Draft,
    Learner,
    Proposer,
    StateReader,
    Wish,
    followed,
)

__all__ = [
    "ROOT",
    "Computed",
    "Controller",
    "Draft",
    "DraftCounts",
    "Expected",
    "Learner",
    "Prediction",
    "Proposer",
    "Record",
    "StateReader",
    "Wish",
    "followed",
]
