"""Keys and values that go to several slots, and rows that outlive a step."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

from penstock import ops
from penstock.cache import PagedLayout, block_rows, copy_blocks, kv_dtype
from penstock.kernels import native
from penstock.nn import KeptStates
from penstock.runtime import Program
from penstock.step import KV, ForkedStep, LayerCache, Step
from tests.exactness.bits import Machine, build, prompt

BLOCK = 32
STORED = ["float32", "bfloat16", "int8", "fp8", "int4"]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def empty(stored: str) -> LayerCache:
    dtype = torch.float32 if stored == "float32" else torch.bfloat16
    name = "auto" if stored in ("float32", "bfloat16") else stored
    kv = PagedLayout(((2, 40),), kv_dtype(name, dtype), BLOCK).allocate(4)
    for part in kv[0]:
        part.view(torch.uint8).fill_(0)
    return kv[0]


@pytest.mark.parametrize("way", ["reference", "call"])
@pytest.mark.parametrize("stored", STORED)
def test_a_copy_is_what_another_token_there_would_be(stored: str, way: str) -> None:
    """Token 1 in slot 33 too: as if a third token of the same row and position were there."""
    dtype = torch.float32 if stored == "float32" else torch.bfloat16
    qkv = torch.randn(2, 8 * 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    angles = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
    call = getattr(ops.op("rotary_cache"), way)
    got, want = empty(stored), empty(stored)
    some = (4, None, None, 1e-6, angles, False)
    q = call(qkv, *some, ints(5, 7), ints(3, 70), *got, copies=ints(1, 33, 0, 101).view(2, 2))
    more = call(qkv[[0, 1, 1, 0]], *some, ints(5, 7, 7, 5), ints(3, 70, 33, 101), *want)
    assert torch.equal(q, more[:2])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert any(part.view(torch.uint8).any() for part in got)


needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")


@needs_native
@pytest.mark.parametrize(
    ("copies", "said"),
    [
        (ints(2, 0).view(1, 2), "a copy of token 2 of 2"),
        (ints(-1, 0).view(1, 2), "a copy of token -1"),
        (ints(0, 128).view(1, 2), "to slot 128 of 128"),
        (ints(0, -1).view(1, 2), "to slot -1"),
        (ints(0, 1, 2), "must be \\[copied, 2\\]"),
        (torch.zeros(1, 2), "contiguous int32"),
    ],
    ids=str,
)
def test_wrong_copies(copies: Tensor, said: str) -> None:
    qkv = torch.zeros(2, 8 * 40)
    with pytest.raises(RuntimeError, match=said):
        ops.rotary_cache(
            qkv, 4, None, None, 0.0, None, False, ints(0, 1), ints(0, 1), *empty("float32"),
            copies=copies,
        )  # fmt: skip


class Widened(nn.Module):
    """A decoder's logits beside what was put into a store: for `kept_rows`."""

    def __init__(self, store: Tensor) -> None:
        super().__init__()
        self.model = build(torch.float32)
        self.store = store

    def forward(self, step: Step, kv: KV) -> Tensor:
        residual = self.model.hidden_states(step, kv)
        ops.add_(residual, ops.kept_rows(step.tokens, self.store))
        return self.model.logits(step, residual)


def steps() -> list[Step]:
    """Two of them: a prompt, and three ways of two tokens each behind it."""
    text, at = ints(*prompt(40, 3)), torch.arange(40, dtype=torch.int32)
    table = torch.arange(2, dtype=torch.int32)[None]
    whole = Step(text, at, at, ints(0, 40), ints(40), table, ints(39))
    ways = torch.tensor([[0, 1], [0, 4], [0, 5]], dtype=torch.int32)
    slots = ints(40, 41, 4 * BLOCK + 9, 5 * BLOCK + 9)
    copies = ints(0, 4 * BLOCK + 8, 0, 5 * BLOCK + 8).view(2, 2)
    some = ints(11, 12, 13, 14), ints(40, 41, 41, 41), slots, ints(0, 2, 3, 4), ints(42, 42, 42)
    return [whole, ForkedStep(*some, ways, ints(0, 1, 2, 3), copies)]


def as_sequences() -> list[Step]:
    """The second step as three, of a sequence each, over copies of the block they part in."""
    found = []
    for block, token in ((1, 12), (4, 13), (5, 14)):
        slots = ints(block * BLOCK + 8, block * BLOCK + 9)
        some = ints(11, token), ints(40, 41), slots, ints(0, 2), ints(42)
        found.append(Step(*some, ints(0, block).view(1, 2), ints(0, 1)))
    return found


@needs_native
@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forked_step_is_several_sequences(program: bool, dtype: torch.dtype) -> None:
    model = build(dtype)
    forked, alone = Machine(model, 8, program=program), Machine(model, 8)
    with torch.inference_mode():
        for machine in (forked, alone):
            machine.forward(steps()[0], machine.kv)
            copy_blocks(block_rows(machine.kv), [(1, 4), (1, 5)])
        got = forked.forward(steps()[1], forked.kv).clone()
        rows = [alone.forward(step, alone.kv).clone() for step in as_sequences()]
    assert torch.equal(got, torch.cat([rows[0], rows[1][1:], rows[2][1:]]))
    for layer, other in zip(forked.kv, alone.kv, strict=True):
        for a, b in zip(layer, other, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@needs_native
def test_rows_are_kept_and_taken() -> None:
    """By a program as by the operators one by one, and other programs are as they were."""
    model = build(torch.float32)
    plain = Machine(model, 8).forward(steps()[0], Machine(model, 8).kv)
    layers, hidden = len(model.layers), model.spec.hidden
    stores = []
    for program in (False, True):
        store = torch.zeros(64, 3 * hidden)
        model.kept = KeptStates((0, 1, layers), store)
        machine = Machine(model, 8, program=program)
        with torch.inference_mode():
            logits = machine.forward(steps()[0], machine.kv)
        assert torch.equal(logits, plain)
        stores.append(store)
    model.kept = None
    assert torch.equal(stores[0], stores[1]) and not stores[0][40:].any()
    embedded = model.embed(steps()[0].tokens)
    assert torch.equal(stores[0][:40, :hidden], embedded)
    normed = model.norm(stores[0][39:40, 2 * hidden :])
    widened = model.last_hidden_state()
    machine = Machine(model, 8)
    assert torch.equal(widened(steps()[0], machine.kv), normed)


@needs_native
def test_a_program_takes_rows_that_lie_in_a_store() -> None:
    store = torch.randn(50, build(torch.float32).spec.hidden)
    module = Widened(store)
    kv = Machine(module.model, 8).kv
    with torch.inference_mode():
        want = module(steps()[0], kv).clone()
        program = Program(module, kv)
        assert torch.equal(program(steps()[0], kv), want)
        store.zero_()  # it reads what is there now
        got = program(steps()[0], kv).clone()
        assert torch.equal(got, module.model(steps()[0], kv)) and not torch.equal(got, want)
        short = Widened(torch.zeros(39, store.shape[1]))
        with pytest.raises(RuntimeError, match=r"A step of 40 tokens .* has room for 39"):
            Program(short, kv)(steps()[0], kv)


def test_a_forked_step_is_a_step() -> None:
    plain, forked = steps()
    assert plain.copies is None and forked.copies is not None
    assert [f.name for f in fields(forked)] == [*(f.name for f in fields(plain)), "copies"]
