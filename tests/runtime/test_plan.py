"""A plan is data: through JSON and back it makes the same program, and nothing is traced."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.cache import PagedLayout, kv_dtype
from penstock.errors import KernelError
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.runtime import Program, compile_counter
from penstock.runtime.plan import PLAN_VERSION, Plan, Weight, fixed_tensors, record
from penstock.step import KV, Step
from tests.exactness.bits import BLOCK, build
from tests.runtime.test_program import ints, prefill

needs_native = pytest.mark.skipif(
    native.handle is None, reason=f"no native kernels: {native.reason}"
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build()


def fresh(decoder: Decoder, name: str = "auto") -> KV:
    layout = PagedLayout(
        tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in decoder.spec.layers),
        kv_dtype(name, decoder.dtype),
        BLOCK,
    )
    return layout.allocate(16)


def through_json(plan: Plan) -> Plan:
    return Plan.from_dict(json.loads(json.dumps(plan.as_dict())))


@needs_native
@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_a_plan_gives_the_decoders_logits(kind: str) -> None:
    model = build(torch.bfloat16)
    plan, tensors = record(model, fresh(model, kind), fixed_tensors(model))
    kv, expected = fresh(model, kind), fresh(model, kind)
    before = compile_counter.total()
    program = Program.of_plan(through_json(plan), tensors, kv)
    assert compile_counter.total() == before
    for step in (prefill(100, 7), decode(100)):
        with torch.inference_mode():
            want = model(step, expected)
        assert torch.equal(program(step, kv), want)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(kv[1], expected[1], strict=True))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def decode(position: int) -> Step:
    """The token after `position` others."""
    one = prefill(1)
    at = ints(position)
    table = torch.arange(-(-(position + 1) // BLOCK), dtype=torch.int32)[None]
    return replace(one, positions=at, slots=at, context_len=at + 1, block_table=table)


def test_json_keeps_all_of_it(decoder: Decoder) -> None:
    plan, tensors = record(decoder, fresh(decoder), fixed_tensors(decoder))
    assert through_json(plan) == plan
    assert set(plan.weights()) == set(tensors)
    assert "layers.0.attention.qkv.weight" in tensors
    first = plan.operators[0]
    assert first.op == "embedding" and first.arguments["weight"] == Weight("head.weight")
    assert first.shape == ("T", 224)


def test_recording_needs_no_data_and_is_counted(decoder: Decoder) -> None:
    """Shapes are enough: of tensors on `meta` the same plan comes."""
    want, _ = record(decoder, fresh(decoder), fixed_tensors(decoder))
    model = build()
    for module in model.modules():
        for name, tensor in list(module._parameters.items()):
            if tensor is not None:
                module._parameters[name] = torch.nn.Parameter(
                    tensor.to("meta"), requires_grad=False
                )
        if isinstance(packed := getattr(module, "packed", None), dict):
            packed.update({part: module._parameters[part] for part in packed})
    before = compile_counter.counts().get("program", 0)
    plan, _ = record(model, fresh(model), fixed_tensors(model))
    assert plan == want
    assert compile_counter.counts()["program"] == before + 1


def test_a_tensor_without_a_name_is_a_constant(decoder: Decoder) -> None:
    plan, tensors = record(decoder, fresh(decoder), {})
    assert next(iter(tensors)) == "constant.0" and len(tensors) == len(set(plan.weights()))
    assert tensors["constant.0"] is decoder.head.packed["weight"]


@needs_native
def test_what_a_plan_reads_must_be_there(decoder: Decoder) -> None:
    kv = fresh(decoder)
    plan, tensors = record(decoder, kv, fixed_tensors(decoder))
    less = {name: t for name, t in tensors.items() if name != "norm.weight"}
    with pytest.raises(KernelError, match=r"reads norm\.weight, which isn't there"):
        Program.of_plan(plan, less, kv)
    with pytest.raises(KernelError, match="layer 2's cache, which this cache of 2 layers"):
        Program.of_plan(plan, tensors, kv[:2])


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"operators": [{}], "output": 0},
        {"operators": 3, "output": 0},
        {"operators": [{"op": "x", "arguments": {"a": {"b": 1}}, "shape": None}], "output": 0},
        {"operators": [{"op": "x", "arguments": {"a": {"dtype": "nn"}}, "shape": None}], "output": 0},  # noqa: E501
    ],
)  # fmt: skip
def test_what_isnt_a_plan(data: dict[str, object]) -> None:
    with pytest.raises(KernelError, match=f"isn't a plan of version {PLAN_VERSION}"):
        Plan.from_dict(data)


@needs_native
def test_memory_is_taken_once(decoder: Decoder) -> None:
    """One set of buffers, of the larger of both phases; steps within it take no more."""
    kv = fresh(decoder)
    program = Program(decoder, kv)
    reserved = program.reserve(128, 4)
    assert program.workspace_bytes == reserved
    widest = max(int(o.shape[1]) for o in program.plan.operators if o.shape is not None)
    assert 128 * widest * 4 <= reserved
    for step in (prefill(128, 4), prefill(1), prefill(64)):
        program(step, kv)
        assert program.workspace_bytes == reserved
    program(prefill(129, 1), kv)
    assert program.workspace_bytes > reserved


@needs_native
def test_threads_change_no_bit(decoder: Decoder) -> None:
    kv = fresh(decoder)
    program = Program(decoder, kv)
    want = program(prefill(100, 9), kv).clone()
    program.use_threads([(1, 1), (64, 2), (128, 1)])
    assert torch.equal(program(prefill(100, 9), kv), want)
    with pytest.raises(RuntimeError, match="A step needs a thread"):
        program.use_threads([(1, 0)])


def test_nothing_of_torchs_compiler_is_imported() -> None:
    code = (
        "import sys, torch\n"
        "from tests.exactness.bits import Machine, build\n"
        "from penstock.runtime.plan import fixed_tensors, record\n"
        "model = build()\n"
        "record(model, Machine(model).kv, fixed_tensors(model))\n"
        "assert not [n for n in sys.modules if n.startswith(('torch._dynamo', 'torch._inductor'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WATCH = """
import threading
import time
from pathlib import Path
import torch
from penstock.runtime import Program
from tests.exactness.bits import build
from tests.runtime.test_plan import fresh
from tests.runtime.test_program import prefill

def worked():  # nanoseconds of all threads but this one
    me = str(threading.get_native_id())
    tasks = [p for p in Path("/proc/self/task").iterdir() if p.name != me]
    return sum(int((p / "schedstat").read_text().split()[0]) for p in tasks)

torch.set_num_threads(2)
model = build()
kv = fresh(model)
program, step = Program(model, kv), prefill(256)
program(step, kv)
found = []
for table in ([(512, 1)], [(64, 1)], []):
    program.use_threads(table)
    time.sleep(0.1)  # until nobody looks for work any more
    before = worked()
    for _ in range(50):
        program(step, kv)
    time.sleep(0.1)
    found.append(worked() - before)
print(*found)
"""


@needs_native
def test_a_step_runs_on_the_threads_of_its_size() -> None:
    """A second thread computes nothing where one was chosen, and takes part where none was."""
    done = subprocess.run([sys.executable, "-c", WATCH], check=True, capture_output=True, text=True)
    chosen, smaller, free = map(int, done.stdout.split())
    assert chosen < 1_000_000 < min(smaller, free)
