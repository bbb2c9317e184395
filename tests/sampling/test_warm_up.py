from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.sampling import Sampled, Sampler
from penstock.sampling.warm_up import COUNTS, USUAL, warm_up


def test_all_usual_requests_are_drawn_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Sampled] = []
    call = Sampler.__call__

    def noting(self: Sampler, *arguments: Any) -> Sampled:
        drawn.append(call(self, *arguments))
        return drawn[-1]

    monkeypatch.setattr(Sampler, "__call__", noting)
    warm_up(1000, torch.device("cpu"))
    assert [len(found.token_ids) for found in drawn] == [*COUNTS] * len(USUAL) * 2
    assert not any(found.errors for found in drawn)
    assert all(0 <= token < 1000 for found in drawn for token in found.token_ids)
