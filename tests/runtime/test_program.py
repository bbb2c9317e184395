"""A decoder as one native call: the same bits as operator by operator, and errors that say what."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import block_rows, copy_blocks
from penstock.errors import KernelError
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.runtime import Program
from penstock.runtime.program import KEPT_ROWS
from penstock.step import KV, Step
from tests.exactness.bits import BLOCK, Machine, build, prompt

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build()


@pytest.fixture
def kv(decoder: Decoder) -> KV:
    return Machine(decoder).kv


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(count: int, sampled: int = 1) -> Step:
    """A prompt of `count` tokens in the first blocks, its last `sampled` rows wanted."""
    at = torch.arange(count, dtype=torch.int32)
    return Step(
        tokens=ints(*prompt(count, 3)),
        positions=at,
        slots=at,
        query_start=ints(0, count),
        context_len=ints(count),
        block_table=torch.arange(-(-count // BLOCK), dtype=torch.int32)[None],
        sample_at=at[count - sampled :],
    )


def test_its_operators_are_those_of_the_decoder(decoder: Decoder, kv: KV) -> None:
    program = Program(decoder, kv)
    names = [call.name.removeprefix("penstock.") for call in program.calls]
    layer = ["linear", "rotary_cache", "paged_attention", "linear_add_", "linear", "linear_add_"]
    assert names[:7] == ["embedding", *layer]
    assert names[-3:] == ["embedding", "linear", "softcap_"]
    up = program.calls[5]
    assert up.shapes.startswith("[T, 224] [44, 112, 16, 2]")
    assert any(c is decoder.layers[0].mlp.up.packed["weight"] for c in up.constants)
    assert program.calls[-2].shapes.startswith("[S, 224]")


def test_a_row_that_is_sampled_often(decoder: Decoder, kv: KV) -> None:
    """More sampled rows than tokens."""
    step = replace(prefill(1), sample_at=ints(*[0] * 1000))
    with torch.inference_mode():
        want = decoder(step, kv)
    assert torch.equal(Program(decoder, kv)(step, kv), want)


@pytest.mark.parametrize("sampled", [0, 1, 40, 300])
def test_the_rows_that_are_sampled(decoder: Decoder, kv: KV, sampled: int) -> None:
    step = prefill(300, sampled)
    with torch.inference_mode():
        want = decoder(step, kv)
    got = Program(decoder, kv)(step, kv)
    assert got.shape == (sampled, 517) and torch.equal(got, want)


def test_logits_are_kept_for_few_rows_only(decoder: Decoder, kv: KV) -> None:
    program = Program(decoder, kv)
    first, second = program(prefill(40, 2), kv), program(prefill(40, 1), kv)
    assert first.data_ptr() == second.data_ptr()  # good until the next step
    many = KEPT_ROWS + 1
    assert program(prefill(many, many), kv).data_ptr() != first.data_ptr()
    assert program(prefill(40, 2), kv).data_ptr() == first.data_ptr()


def test_operators_are_timed(decoder: Decoder, kv: KV) -> None:
    program = Program(decoder, kv)
    times = torch.zeros(len(program.calls) + 1, dtype=torch.float64)
    begin = time.perf_counter()
    program(prefill(64), kv, times)
    end = time.perf_counter()
    seen = [begin, *times.tolist(), end]
    assert all(a <= b for a, b in itertools.pairwise(seen))
    with pytest.raises(RuntimeError, match=f"times must be {len(program.calls) + 1}"):
        program(prefill(64), kv, times[:3])


WRONG = {
    "token 528 is outside the table of 528": {"tokens": ints(528)},
    "token -1 is outside": {"tokens": ints(-1)},
    "position 2048 is beyond the table of 2048": {"positions": ints(2048)},
    "slot 8192 is beyond the cache of 8192": {"slots": ints(8192)},
    "block 256 is outside the cache of 256": {"block_table": ints(256)[None]},
    "has 1 queries, a context of 33 and 1 blocks": {"context_len": ints(33)},
    "doesn't cover the 1 queries": {"query_start": ints(0, 0)},
    "row 1 is outside the table of 1": {"sample_at": ints(1)},
    "row 7 is outside": {"sample_at": ints(*[0] * 300, 7)},
    "positions must be 1 contiguous int32, has 2": {"positions": ints(0, 1)},
    "tokens must be 1 contiguous int32": {"tokens": torch.tensor([0])},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_step(decoder: Decoder, kv: KV, words: str) -> None:
    program, step = Program(decoder, kv), prefill(1)
    want = program(step, kv).clone()
    with pytest.raises(RuntimeError, match=words):
        program(replace(step, **WRONG[words]), kv)
    assert torch.equal(program(step, kv), want)


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("pairs", [[(0, 3)], [(0, 3), (1, 4), (0, 5)], [(0, 3), (3, 4)]], ids=str)
def test_blocks_are_copied(stored: str, pairs: list[tuple[int, int]]) -> None:
    """Every part of every layer, as the cache's own way does it."""
    model = build(torch.bfloat16)
    got, want = (Machine(model, 8, stored, program=True) for _ in range(2))
    for machine in (got, want):
        for number, part in enumerate(part for layer in machine.kv for part in layer):
            generator = torch.Generator().manual_seed(number)
            values = torch.randint(0, 256, part.view(torch.uint8).shape, generator=generator)
            part.view(torch.uint8).copy_(values)
    assert isinstance(got.forward, Program)
    got.forward.copy_blocks(pairs)
    copy_blocks(block_rows(want.kv), pairs)
    for a, b in zip(got.kv, want.kv, strict=True):
        for one, other in zip(a, b, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    with pytest.raises(RuntimeError, match="block 8 is outside the cache of 8"):
        got.forward.copy_blocks([(0, 8)])


def test_another_cache(decoder: Decoder, kv: KV) -> None:
    with pytest.raises(KernelError, match="the cache that it was made for"):
        Program(decoder, kv)(prefill(1), Machine(decoder).kv)


def test_an_operator_that_no_program_holds(decoder: Decoder, kv: KV) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, step: Step, kv: KV) -> Tensor:
            logits: Tensor = decoder(step, kv)
            return logits * 2

    with pytest.raises(KernelError, match=r"aten::mul.* isn't one of Penstock's operators"):
        Program(Doubled(), kv)


def test_arrays_in_each_others_place(decoder: Decoder, kv: KV) -> None:
    class Swapped(torch.nn.Module):
        def forward(self, step: Step, kv: KV) -> Tensor:
            given = {f.name: getattr(step, f.name) for f in fields(step)}
            logits: Tensor = decoder(Step(**(given | {"slots": step.positions})), kv)
            return logits

    with pytest.raises(KernelError, match="takes the step's positions as its slots"):
        Program(Swapped(), kv)


def test_a_program_that_is_gone_frees_what_it_held() -> None:
    model = build()
    machine = Machine(model, program=True)
    weight = model.layers[0].mlp.up.packed["weight"]
    held = weight._use_count()  # type: ignore[attr-defined]
    machine.forward = model
    gc.collect()
    assert weight._use_count() == held - 1  # type: ignore[attr-defined]
    handle = torch.ops.penstock.program_new()
    torch.ops.penstock.program_free(handle)
    with pytest.raises(RuntimeError, match=f"There is no program {handle}"):
        torch.ops.penstock.program_finish(handle, 0)


def test_other_threads_run_meanwhile(decoder: Decoder, kv: KV) -> None:
    """The interpreter isn't held during a step: another thread is seen between two operators."""
    program, step = Program(decoder, kv), prefill(2000)
    times = torch.zeros(len(program.calls) + 1, dtype=torch.float64)
    seen: list[float] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(time.perf_counter())

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(20):
            program(step, kv, times)
            first, last = float(times[1]), float(times[-2])
            if any(first < moment < last for moment in seen):
                return
    finally:
        stop.set()
        looker.join()
    pytest.fail("no other thread ran during any of 20 steps")


def test_a_second_thread_is_refused(decoder: Decoder, kv: KV) -> None:
    program, step = Program(decoder, kv), prefill(2000)
    want = program(step, kv).clone()
    refused: list[str] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            try:
                program(step, kv)
            except RuntimeError as error:
                refused.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    try:
        while not refused:
            try:
                program(step, kv)
            except RuntimeError as error:
                refused.append(str(error))
    finally:
        stop.set()
        caller.join()
    assert "is running already" in refused[0]
    assert torch.equal(program(step, kv), want)


BUILDERS = {
    "out_dtype must be float32 or bfloat16": lambda p, x, w: p.program_linear(
        *(x.handle, x.rows, w, None, None, None, 32, False, None, 0.0, 0, False, torch.float16)
    ),
    "must have the same rows and dtype": lambda p, x, w: p.program_add_(
        x.handle, x.rows, p.program_sampled_rows(x.handle, x.rows)
    ),
    "columns, x": lambda p, x, w: p.program_add_(
        x.handle, x.rows, p.program_linear(
            *(x.handle, x.rows, w[:1], None, None, None, 16, False, None, 0.0, 0, False, None)
        ),
    ),
    "ends with float32 logits": lambda p, x, w: p.program_finish(x.handle, x.rows),
}  # fmt: skip


@pytest.mark.parametrize("words", BUILDERS)
def test_what_no_program_can_hold(words: str) -> None:
    class Made:
        handle = torch.ops.penstock.program_new()
        rows = torch.ops.penstock.program_embedding(
            handle, 0, torch.zeros(8, 32, dtype=torch.bfloat16), 32, 1.0, None, None
        )

    weight = ops.pack(torch.zeros(32, 32), torch.bfloat16)
    with pytest.raises(RuntimeError, match=words):
        BUILDERS[words](torch.ops.penstock, Made, weight)


def test_an_operator_without_a_form_for_programs(decoder: Decoder, kv: KV) -> None:
    class Sampling(torch.nn.Module):
        def forward(self, step: Step, kv: KV) -> Tensor:
            return ops.top_k(decoder(step, kv), 3)[0]

    with pytest.raises(KernelError, match=r"top_k can't be part of a program. Set enforce_eager"):
        Program(Sampling(), kv)
