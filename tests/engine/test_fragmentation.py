"""How much of the blocks in use holds nothing, step by step, against what must be so."""

from __future__ import annotations

import pytest

from penstock.sampling import SamplingParams

from .toy import BLOCK, toy_engine


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2])
def test_one_sequence(length: int) -> None:
    engine = toy_engine()
    assert engine.stats()["kv_fragmentation"] == 0.0
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    engine.add_request("a", list(range(1, length + 1)), params)
    for number in range(8):
        engine.step()
        held = length + number
        slots = -(-held // BLOCK) * BLOCK
        assert engine.stats()["kv_fragmentation"] == (slots - held) / slots
    engine.step()
    assert engine.stats()["kv_fragmentation"] == 0.0


def test_samples_that_share() -> None:
    """The prompt's full blocks count once; each sample's last is its own once it has written."""
    engine = toy_engine()
    prompt = list(range(1, 2 * BLOCK + 2))  # two full blocks and a token
    params = SamplingParams(n=3, max_tokens=3, temperature=1.0, seed=5, ignore_eos=True)
    engine.add_request("a", prompt, params)
    engine.step()
    assert engine.stats()["used_blocks"] == 3
    assert engine.stats()["kv_fragmentation"] == (BLOCK - 1) / (3 * BLOCK)
    engine.step()
    assert engine.stats()["used_blocks"] == 5
    assert engine.stats()["kv_fragmentation"] == 3 * (BLOCK - 2) / (5 * BLOCK)


def test_sequences_of_several_lengths() -> None:
    engine = toy_engine(enable_prefix_caching=False)
    lengths = [2, 5, 8, 11]
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        engine.add_request(str(number), [number + 1] * length, params)
    engine.step()
    slots = sum(-(-length // BLOCK) * BLOCK for length in lengths)
    assert engine.stats()["kv_fragmentation"] == (slots - sum(lengths)) / slots
