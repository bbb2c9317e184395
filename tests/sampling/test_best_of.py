import math
from dataclasses import dataclass

import pytest

from penstock.errors import ConfigError
from penstock.sampling import best_of


@dataclass
class Sample:
    token_ids: list[int]
    cumulative_logprob: float | None


def test_samples_are_ranked_by_the_mean_of_their_tokens():
    long, short, middle = Sample([1] * 8, -4.0), Sample([1, 2], -3.0), Sample([5], -0.75)
    assert best_of([short, long, middle], 3) == [long, middle, short]
    assert best_of([short, long, middle], 1) == [long]


def test_the_earlier_of_equals_comes_first_and_what_has_no_mean_last():
    first, second = Sample([1, 2], -2.0), Sample([3], -1.0)
    empty, broken = Sample([], 0.0), Sample([1], math.nan)
    found = best_of([empty, first, broken, second], 4)
    assert [id(one) for one in found] == [id(one) for one in (first, second, empty, broken)]


def test_a_wrong_call_is_refused():
    with pytest.raises(ConfigError, match="n is 3, but there are 1 samples"):
        best_of([Sample([1], -1.0)], 3)
    with pytest.raises(ConfigError, match="n is 0"):
        best_of([Sample([1], -1.0)], 0)
    with pytest.raises(ConfigError, match="no cumulative_logprob"):
        best_of([Sample([1], None)], 1)
