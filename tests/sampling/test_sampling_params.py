import contextlib
import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidSamplingError, RequestError
from penstock.sampling import SamplingParams


def test_defaults_are_vllms():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (p.max_tokens, p.min_tokens, p.seed, p.logprobs) == (16, 0, None, None)
    assert (p.stop, p.stop_token_ids) == ((), ())
    assert p.skip_special_tokens
    assert p.detokenize
    assert not p.ignore_eos
    assert not p.is_greedy


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"n": True}, "n is True, a bool"),
        ({"n": 1.0}, "n is 1.0, a float"),
        ({"n": 3, "temperature": 0}, "n is 3 with temperature 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot', a str"),
        ({"temperature": True}, "temperature is True, a bool"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": None}, "temperature is None"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": -0.5}, r"top_p is -0.5; it must be in \(0, 1\]"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 2.5}, "top_k is 2.5, a float"),
        ({"top_k": False}, "top_k is False, a bool"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": -0.01}, "min_p is -0.01"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\], a list"),
        ({"logit_bias": {"5": 1.0}}, "a key of logit_bias is '5', a str"),
        ({"logit_bias": {-5: 1.0}}, "a key of logit_bias is -5"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\] is 101"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\] is nan"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [3, -1]}, r"allowed_token_ids\[1\] is -1"),
        ({"allowed_token_ids": [3, True]}, r"allowed_token_ids\[1\] is True"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids is '12', a str"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7, an int"),
        ({"stop_token_ids": [1.5]}, r"stop_token_ids\[0\] is 1.5"),
        ({"stop_token_ids": [10**20]}, r"stop_token_ids\[0\] is 1000.*in \[0, 2147483647\]"),
        ({"allowed_token_ids": [2**31]}, r"allowed_token_ids\[0\] is 2147483648"),
        ({"logit_bias": {10**20: 1.0}}, "a key of logit_bias is 1000"),
        ({"negative_prompt": [10**20], "guidance_scale": 2}, r"negative_prompt\[0\] is 1000"),
        ({"stop": ""}, r"stop\[0\] is an empty string"),
        ({"stop": ["a", ""]}, r"stop\[1\] is an empty string"),
        ({"stop": "a\ud800"}, r"stop\[0\] has the lone surrogate U\+D800 at character 1 of 2"),
        ({"stop": ["a", 3]}, r"stop\[1\] is 3, an int"),
        ({"stop": 3}, "stop is 3, an int"),
        ({"stop": b"x"}, "stop is b'x', a bytes"),
        ({"stop": "x", "detokenize": False}, "stop holds 1 strings but detokenize is False"),
        ({"seed": -(2**63) - 1}, "seed is -9223372036854775809"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.0}, "seed is 1.0, a float"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True, a bool"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 17}, "min_tokens is 17 but max_tokens is 16"),
        ({"logprobs": 21}, r"logprobs is 21; it must be in \[-1, 20\]"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"logprobs": True}, "logprobs is True, a bool"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"ignore_eos": 1}, "ignore_eos is 1. Use True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output is 'no'"),
        ({"detokenize": 0}, "detokenize is 0"),
    ],
)
def test_a_bad_value_is_refused_with_its_number(kwargs, says):
    with pytest.raises(InvalidSamplingError, match=says) as caught:
        SamplingParams(**kwargs)
    assert isinstance(caught.value, RequestError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "Did you mean 'temperature'"),
        ("max_new_tokens", "Did you mean 'max_tokens'"),
        ("topp", "Did you mean 'top_p'"),
        ("cls", "The 4"),
        ("self", "The 4"),
        ("zzzz", f"The {len(dataclasses.fields(SamplingParams))} known ones are: n, temperature"),
    ],
)
def test_an_unknown_argument_names_the_nearest(name, hint):
    with pytest.raises(InvalidSamplingError, match=f"Unknown sampling argument '{name}'") as caught:
        SamplingParams.from_kwargs(**{name: 1})
    assert hint in str(caught.value)


SWITCHED = {
    "xtc_threshold": ("xtc_probability", 0.3, 0.5),
    "dynatemp_exponent": ("dynatemp_range", 2.0, 0.5),
    "mirostat_tau": ("mirostat", 3.0, 2),
    "mirostat_eta": ("mirostat", 0.3, 1),
    "dry_base": ("dry_multiplier", 2.0, 0.8),
    "dry_allowed_length": ("dry_multiplier", 3, 0.8),
    "dry_penalty_last_n": ("dry_multiplier", 64, 0.8),
    "dry_sequence_breakers": ("dry_multiplier", ["."], 0.8),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_what_only_a_sampler_looks_at_that_is_off(name):
    switch, value, on = SWITCHED[name]
    with pytest.raises(
        InvalidSamplingError, match=f"^{name} is .* but {switch} is 0.*Set {switch}"
    ):
        SamplingParams(**{name: value})
    usual = getattr(SamplingParams(), name)
    SamplingParams(**{name: usual})  # clients that send everything
    both = SamplingParams(**{name: value, switch: on})
    assert getattr(both.over(**{switch: 0}), name) == usual
    assert getattr(both.over(temperature=0.5), name) != usual


def test_from_kwargs_is_the_constructor():
    assert SamplingParams.from_kwargs(n=2, top_k=5) == SamplingParams(n=2, top_k=5)


def test_values_are_stored_in_one_form():
    p = SamplingParams(
        temperature=1,
        top_k=-1,
        n=np.int64(2),
        top_p=np.float32(0.5),
        stop="end",
        stop_token_ids=[1, np.int32(2)],
        allowed_token_ids=range(3),
        logit_bias={np.int64(3): 1},
    )
    assert (p.top_k, p.stop, p.stop_token_ids, p.allowed_token_ids) == (
        0,
        ("end",),
        (1, 2),
        (0, 1, 2),
    )
    assert p.logit_bias == {3: 1.0}
    assert [type(v) for v in (p.temperature, p.n, p.top_p, p.stop_ids[1])] == [
        float,
        int,
        float,
        int,
    ]
    assert p.stop_strings == ("end",)


@pytest.mark.parametrize(
    ("seed", "stored"),
    [
        (None, None),
        (-1, None),  # as in vLLM
        (np.int64(-1), None),
        (0, 0),
        (-2, 2**64 - 2),
        (-(2**63), 2**63),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_seeds(seed, stored):
    assert SamplingParams(seed=seed).seed == stored


def test_a_caller_cannot_change_it_afterwards():
    stop, bias = ["a"], {1: 2.0}
    p = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[9] = 9.0
    assert p.stop == ("a",)
    assert p.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 2  # type: ignore[misc]


def test_it_copies_pickles_and_hashes():
    p = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=2**64 - 1)
    assert pickle.loads(pickle.dumps(p)) == p
    assert dataclasses.replace(p, n=3).n == 3
    assert dataclasses.replace(p) == p
    assert hash(p) == hash(dataclasses.replace(p))
    with pytest.raises(InvalidSamplingError):
        dataclasses.replace(p, n=0)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (1, False)]
)
def test_greedy_is_a_temperature_of_zero_or_next_to_it(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@given(
    name=st.sampled_from(
        ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
    ),
    value=st.one_of(
        st.floats(), st.integers(), st.booleans(), st.text(max_size=2), st.none(), st.fractions()
    ),
)
def test_any_value_is_stored_finite_or_refused(name, value):
    stored = None
    with contextlib.suppress(InvalidSamplingError):
        stored = getattr(SamplingParams(**{name: value}), name)
    if stored is not None:
        assert type(stored) is float
        assert math.isfinite(stored)
        assert stored == float(value)
        assert not isinstance(value, bool)
    else:
        with pytest.raises(InvalidSamplingError, match=name):
            SamplingParams(**{name: value})
