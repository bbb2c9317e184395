"""A decoding engine's batches lie in the same memory from step to step."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine, batch
from penstock.sampling import SamplingParams
from penstock.step import KV, Step

from .toy import GREEDY, Toy, toy_engine, toy_runtime


class Recorder(Toy):
    """A toy that notes where each step's tensors lie, and which object the step is."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[dict[str, int]] = []
        self.objects: list[Step] = []

    def __call__(self, step: Step, kv: KV) -> Tensor:
        self.places.append({f.name: getattr(step, f.name).data_ptr() for f in fields(step)})
        self.objects.append(step)
        return super().__call__(step, kv)


def decoding(forward: Toy, params: SamplingParams, block_size: int = 4) -> Engine:
    """Eight sequences in steady decode, with room for 40 more tokens each."""
    config = EngineConfig.of(max_num_seqs=8, max_num_batched_tokens=64)
    engine = Engine(config, toy_runtime(256, 64, forward=forward, block_size=block_size))
    for i in range(8):
        engine.add_request(str(i), [1 + i, 2, 3], params)
    for _ in range(4):
        engine.step()
    return engine


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=60),
]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "top_p"])
def test_the_arrays_of_a_step_stay_where_they_are(params: SamplingParams) -> None:
    toy = Recorder()
    engine = decoding(toy, params)
    del toy.places[:], toy.objects[:]
    for _ in range(40):
        engine.step()
    assert len(toy.places) == 40
    assert all(places == toy.places[0] for places in toy.places)
    # the block table gets wider every four tokens; in between the step is one object
    assert len({id(step) for step in toy.objects}) == 11


def test_building_batches_keeps_no_memory() -> None:
    engine = decoding(Toy(), PARAMS[0], block_size=64)
    here = [tracemalloc.Filter(True, batch.__file__)]
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(30):
            engine.step()
            traces = tracemalloc.take_snapshot().filter_traces(here).statistics("filename")
            sizes.append(sum(one.size for one in traces))
    finally:
        tracemalloc.stop()
    assert max(sizes[5:]) <= max(sizes[:5]) + 64


def test_a_step_that_is_kept_is_overwritten_and_a_copy_is_not() -> None:
    toy = Recorder()
    engine = decoding(toy, PARAMS[0])
    first, copied = toy.objects[-1], toy.steps[-1]
    assert torch.equal(first.positions, copied.positions)
    engine.step()
    assert torch.equal(first.positions, copied.positions + 1)


def test_the_last_requests_are_let_go() -> None:
    engine = toy_engine()
    engine.add_request("a", [1, 2, 3], GREEDY)
    while engine.has_unfinished:
        engine.step()
    assert engine.batcher._batch is None
