"""Counts of drafts: what a part of a run has added."""

from __future__ import annotations

from penstock.speculate import DraftCounts


def test_since_a_copy() -> None:
    counts = DraftCounts()
    counts.count(2, 1, 2)
    before = counts.copy()
    counts.count(4, 3, 4)
    counts.count(1, 0, 1)
    assert counts.since(before) == DraftCounts(2, 5, 3, [1, 1, 1, 0])
    assert before == DraftCounts(1, 2, 1, [1, 0])
    assert counts.since(before).mean_acceptance_length == 2.5
    assert counts.since(counts.copy()).acceptance_rate is None
