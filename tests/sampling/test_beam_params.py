import dataclasses
import math
import pickle

import numpy as np
import pytest

from penstock.errors import InvalidSamplingError
from penstock.sampling import BeamSearchParams


def test_defaults_are_vllms_and_transformers():
    p = BeamSearchParams(beam_width=4, max_tokens=10)
    assert (p.ignore_eos, p.temperature, p.length_penalty) == (False, 0.0, 1.0)
    assert (p.include_stop_str_in_output, p.early_stopping) == (False, False)
    assert (p.num_beam_groups, p.diversity_penalty) == (1, 0.0)
    assert (p.num_returned, p.group_width, p.divisor) == (4, 4, 1.0)
    assert (p.stop_strings, p.stop_ids, p.logprobs) == ((), (), None)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"beam_width": 0}, "beam_width is 0; it must be at least 1"),
        ({"beam_width": True}, "beam_width is True, a bool"),
        ({"beam_width": 2.0}, "beam_width is 2.0, a float"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens is None, a NoneType"),
        ({"ignore_eos": 1}, "ignore_eos is 1. Use True or False"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output is None"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1e-6}, "temperature is 1e-06: logits divided by less than 1e-05"),
        ({"length_penalty": math.inf}, "length_penalty is inf"),
        ({"length_penalty": 11}, r"length_penalty is 11; it must be in \[-10, 10\]"),
        ({"length_penalty": "1"}, "length_penalty is '1', a str"),
        ({"early_stopping": "always"}, "early_stopping is 'always'. Use True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping is 1"),
        ({"early_stopping": None}, "early_stopping is None"),
        ({"num_beam_groups": 0}, "num_beam_groups is 0"),
        ({"num_beam_groups": 5}, r"num_beam_groups is 5; it must be in \[1, 4\]"),
        (
            {"num_beam_groups": 3, "diversity_penalty": 1.0},
            r"is 3, which doesn't divide beam_width \(4\). Use a beam_width of 3 or 6",
        ),
        ({"num_beam_groups": 2}, "diversity_penalty of 0.0, so all groups would find the same"),
        ({"diversity_penalty": 0.5}, "diversity_penalty is 0.5, but there is one group"),
        ({"diversity_penalty": -1}, "diversity_penalty is -1"),
        ({"n": 5}, r"n is 5; it must be in \[1, 4\]. At most beam_width \(4\)"),
        ({"n": 0}, "n is 0"),
        ({"stop": ""}, r"stop\[0\] is an empty string"),
        ({"stop": 3}, "stop is 3, an int"),
        (
            {"stop": ["a", "b\udc00"]},
            r"stop\[1\] has the lone surrogate U\+DC00 at character 1 of 2",
        ),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\] is -1"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12', a str"),
        ({"logprobs": 21}, r"logprobs is 21; it must be in \[-1, 20\]"),
        ({"logprobs": True}, "logprobs is True, a bool"),
    ],
)
def test_a_bad_value_is_refused_with_its_number(kwargs, says):
    with pytest.raises(InvalidSamplingError, match=says):
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 10, **kwargs})


def test_values_are_stored_in_one_form():
    stop = ["a"]
    p = BeamSearchParams(
        np.int64(6), 9, length_penalty=2, num_beam_groups=3, diversity_penalty=1, n=np.int32(2),
        stop=stop, stop_token_ids=[np.int64(7)], temperature=2,
    )  # fmt: skip
    stop.append("b")
    assert (p.beam_width, p.group_width, p.num_returned, p.divisor) == (6, 2, 2, 2.0)
    assert (p.stop_strings, p.stop_ids) == (("a",), (7,))
    kinds = [type(v) for v in (p.beam_width, p.length_penalty, p.diversity_penalty, p.stop_ids[0])]
    assert kinds == [int, float, float, int]


def test_it_copies_pickles_and_hashes():
    p = BeamSearchParams(4, 10, stop="x", early_stopping="never")
    assert pickle.loads(pickle.dumps(p)) == p
    assert hash(dataclasses.replace(p)) == hash(p)
    assert dataclasses.replace(p, beam_width=8).num_returned == 8
    with pytest.raises(InvalidSamplingError):
        dataclasses.replace(p, beam_width=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.beam_width = 2  # type: ignore[misc]
