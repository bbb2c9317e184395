"""The sampler's way for a GPU: what it gives, on a CPU, and that it waits for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_cases import normal_logits, sequence
from test_samplers import SAMPLERS
from test_sampling_pipeline import KINDS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.sampling import NO_TOKEN, Sampler
from penstock.sampling.pending import Launched
from penstock.sampling.samplers.mirostat import _count, _counts, _slope, _slopes
from penstock.sampling.samplers.rows import _folded, totals
from penstock.sampling.transfer import Gathered, upload

ALL = [
    *KINDS,
    *SAMPLERS,
    {"logprobs": -1},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"dry_multiplier": 1.5, "dry_allowed_length": 1, "frequency_penalty": 0.3, "logprobs": 1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"presence_penalty": 0.7, "repetition_penalty": 1.2, "top_p": 0.999, "temperature": 3.0},
    {"mirostat": 1, "mirostat_tau": 4.0, "temperature": 1.3},
    {"min_tokens": 2, "stop_token_ids": [3], "top_n_sigma": 1.0, "dynatemp_range": 0.4},
]


class Odd:
    """A constraint that allows tokens of odd numbers."""

    is_over = False

    def fill(self, bits: np.ndarray) -> None:
        bits[:] = np.int32(-1431655766)

    def accept(self, token: int) -> None:
        assert token % 2


def rows_of(vocab_size: int, kinds: list[dict[str, Any]]) -> list[Any]:
    return [
        sequence(vocab_size, prompt=[i % 7, 3, 5, 3], output=[3, 5], seed=i, **kind)
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("vocab_size", [78, 1031])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_one_copy_brings_what_many_bring(vocab_size: int, spread: float) -> None:
    ordinary, gathering = Sampler(vocab_size), Sampler(vocab_size, gather=True)
    ours, theirs = rows_of(vocab_size, ALL), rows_of(vocab_size, ALL)
    for step in range(4):
        logits = normal_logits(len(ALL), vocab_size, step, spread)
        if step == 2:  # ties
            logits = logits.round()
        if step == 3:
            logits[1::4, 9] = torch.nan
        want = ordinary(logits.clone(), ours)
        pending = gathering.begin(logits.clone(), theirs)
        assert isinstance(pending, Launched)
        found = pending.result()
        assert found == want
        assert pending.result() is found
        if step == 3:
            assert sorted(found.errors) == list(range(1, len(ALL), 4))
        assert pending.device_tokens.dtype is torch.int32
        known = [(i, t) for i, t in enumerate(found.token_ids) if t != NO_TOKEN]
        assert [(i, int(pending.device_tokens[i])) for i, _ in known] == known
        assert int(pending.device_tokens.min()) >= 0
        for state, other, token in zip(ours, theirs, found.token_ids, strict=True):
            if token != NO_TOKEN:
                state.append(token)
                other.append(token)
            assert state.mu == other.mu


PENALTIES = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.7, "temperature": 0.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "logprobs": 3},
    {"min_tokens": 4, "stop_token_ids": [3]},
    {"min_tokens": 3, "stop_token_ids": [3], "frequency_penalty": 2.0},
    {},
    {"temperature": 0.0},
    {"repetition_penalty": 1.2, "logit_bias": {5: 3.0}},
]


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("kinds", [PENALTIES, PENALTIES[:1], PENALTIES[3:4] * 3, PENALTIES[5:6]])
def test_a_token_that_only_the_device_knows(kinds: list[dict[str, Any]], gather: bool) -> None:
    """What a row is given beside its state counts as if the state had been given it."""
    told, untold = rows_of(40, kinds), rows_of(40, kinds)
    for row in (*told, *untold):
        row.num_generated = 2  # not what penalties look at: the outputs are as they were
    rng = np.random.default_rng(0)
    for step in range(40):
        logits = normal_logits(len(kinds), 40, step, 2.0)
        # of the prompt, of the output, of neither
        given = [int(rng.choice([3, 5, 7, step, row.seed % 7])) for row in told]
        for row, token in zip(told, given, strict=True):
            row.append(token)
        want = Sampler(40)(logits.clone(), told)
        tokens = torch.tensor(given, dtype=torch.int32)
        found = Sampler(40, gather=gather).begin(logits.clone(), untold, given=tokens).result()
        assert found == want
        for row, token in zip(untold, given, strict=True):
            row.append(token)


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_a_row_alone(kind: dict[str, Any]) -> None:
    logits = normal_logits(1, 300, seed=3)
    rows = rows_of(300, [kind])
    assert Sampler(300, gather=True)(logits.clone(), rows) == Sampler(300)(logits, rows)


def test_constraints_and_processors() -> None:
    def ban_seven(rows: Any, logits: Tensor) -> None:
        logits[:, 7] = -torch.inf

    def broken(rows: Any, logits: Tensor) -> Tensor:
        return logits[:, :3]

    def rows() -> list[Any]:
        kinds = [{}, {"temperature": 0.0}, {"logits_processors": [ban_seven], "top_p": 0.9}]
        found = rows_of(64, [*kinds, {"logits_processors": [broken]}, {"logprobs": 2}])
        for row in found:
            row.text = [3, 5]
        found[0].constraint = found[4].constraint = Odd()  # type: ignore[assignment]
        return found

    logits = normal_logits(5, 64)
    found = Sampler(64, gather=True)(logits.clone(), rows())
    assert found == Sampler(64)(logits, rows())
    assert list(found.errors) == [3] and found.token_ids[0] % 2 and found.token_ids[4] % 2


def test_what_is_known_at_once_has_device_tokens_too() -> None:
    logits = normal_logits(2, 50)
    logits[1] = torch.nan
    pending = Sampler(50).begin(logits, rows_of(50, [{}, {}]))
    assert pending.device_tokens.tolist() == [pending.result().token_ids[0], 0]
    assert pending.device_tokens.dtype is torch.int32
    nothing = Sampler(50, gather=True).begin(torch.empty(0, 50), [])
    assert nothing.device_tokens.shape == (0,) and nothing.result().token_ids == []


def test_parts_come_back_as_they_were() -> None:
    parts = [
        torch.tensor([[1.5, -torch.inf], [torch.nan, 0.0]]),
        torch.tensor([3, -7, 2**31 - 1], dtype=torch.int32),
        torch.empty(0, 4),
        torch.arange(12, dtype=torch.int32).view(3, 4).T,
    ]
    for part, found in zip(parts, Gathered(parts).wait(), strict=True):
        np.testing.assert_array_equal(found, part.numpy())
        assert found.dtype == part.numpy().dtype


def test_a_gpus_sums_of_rows_are_folded() -> None:
    for size in (1, 2, 3, 127, 500):
        values = normal_logits(9, size).double()
        found = _folded(values)
        assert torch.equal(found, torch.cat([_folded(row[None]) for row in values]))
        torch.testing.assert_close(found, totals(values), rtol=1e-12, atol=1e-12)


def test_mirostats_count_of_many_rows() -> None:
    leading = normal_logits(20, 100).sort(-1, descending=True).values.double()
    leading[3, 5:] = leading[4, 1:] = -torch.inf
    leading[5] = 1.0
    leading[6] = -(torch.arange(100) + 1).double().log()  # an exponent of 1
    slopes = _slopes(leading)
    torch.testing.assert_close(
        slopes[:, 0], torch.tensor([_slope(row.numpy()) for row in leading], dtype=torch.float64)
    )
    for mu in (-3.0, 0.5, 4.0, 12.0, 400.0):
        found = _counts(slopes, torch.full_like(slopes, mu), 5000)[:, 0]
        assert found.tolist() == [_count(float(slope), mu, 5000) for slope in slopes[:, 0]]


class NoSums(TorchDispatchMode):
    """Fails for a sum whose order a GPU would choose by the number of rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "sum" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_mirostats_sums_are_folded_on_a_gpu() -> None:
    with NoSums():
        leading = torch.empty(20, 100, dtype=torch.float64, device="meta")
        assert _slopes(leading).shape == (20, 1)
    with NoSums(), pytest.raises(AssertionError, match="sum"):
        leading.sum(-1)


class OneDevice(TorchDispatchMode):
    """Fails for an operator, other than a copy, that is given tensors of several devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
        devices = {x.device.type for x in given}
        assert len(devices) < 2 or func is torch.ops.aten.copy_.default, f"{func} on {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", [None, *ALL], ids=str)
def test_nothing_waits_and_nothing_mixes_devices(kind: dict[str, Any] | None, ahead: bool) -> None:
    """On tensors that hold nothing: asking one for a value, or for a shape by values, raises."""
    rows = rows_of(1031, ALL if kind is None else [kind, kind])
    rows[0].constraint = Odd()
    tokens = torch.empty(len(rows), dtype=torch.int32, device="meta") if ahead else None
    with OneDevice():
        logits = torch.empty(len(rows), 1031, device="meta")
        pending = Sampler(1031).begin(logits, rows, given=tokens)
    assert isinstance(pending, Launched)
    assert pending.device_tokens.device.type == "meta"
    assert pending.device_tokens.shape == (len(rows),)
    with pytest.raises(TypeError, match="meta"):
        pending.result()


@pytest.mark.parametrize(
    "asks",
    [lambda x: x.tolist(), lambda x: bool(x.any()), lambda x: x.nonzero(), lambda x: x[x > 0]],
)
def test_what_would_wait_is_seen(asks: Any) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        asks(torch.empty(3, device="meta"))


def test_what_would_mix_is_seen() -> None:
    with OneDevice(), pytest.raises(AssertionError, match="meta"):
        torch.empty(3, device="meta")[torch.tensor([0, 2])]


def test_values_go_to_a_cpu_as_they_are() -> None:
    values = torch.arange(3)
    assert upload(values, torch.device("cpu")) is values
