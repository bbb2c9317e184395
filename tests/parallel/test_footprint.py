"""What each process of a divided model takes, by headers alone, beside what it has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cache import kv_dtype
from penstock.config import EngineConfig
from penstock.errors import ConfigError, UnsupportedModelError
from penstock.kernels import native
from penstock.models.load import load_model
from penstock.models.sources import open_source
from penstock.ops.ranks import HEADER
from penstock.parallel import Ranks, Stage
from penstock.pipeline.parts import Parts
from penstock.pipeline.prune.bases import Ranked
from penstock.runtime import Program
from penstock.runtime.device import CPU, Device
from penstock.runtime.footprint import _scratch, footprints, meetings_of, total_of
from penstock.runtime.meetings import met_bytes
from penstock.runtime.parts import PART_TOKENS, largest_part, parts_of
from penstock.runtime.plan import fixed_tensors
from penstock.step import Step
from tests.models.tiny import CASES as KINDS
from tests.models.tiny import Make, make_model
from tests.pipeline.test_kv_rank import chosen, written

needs_native = pytest.mark.skipif(native.handle is None, reason=str(native.reason))
LENGTH, TOKENS, SEQUENCES = 160, 96, 4
PLACE = 1 << 22
WIDE = {"num_hidden_layers": 1, "intermediate_size": 8192, "max_position_embeddings": 2048}
"""Rows that kernels keep beside a step's tensors are a sixth of all that a process has."""

MIXTURES = ["mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3"]
MODELS = ["llama3-rope", "gpt2", "olmo2", "cohere2", "ranked", *MIXTURES]
"""GQA, MHA, a norm over all heads or for two blocks, fewer dimensions, experts in both ways, sinks,
latents.
"""
DIVIDED: list[dict[str, int]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4},
    {"pipeline_parallel_size": 3},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]
WHOLE = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
CASES = [*product(MODELS, DIVIDED), *product(MIXTURES, [WHOLE])]
MEETING = [*product(["llama3-rope", "mixtral", "deepseek-v3"], [False]),
           *product(["mixtral", "deepseek-v3"], [True])]  # fmt: skip

ENGINE = """
import json, os, subprocess, sys
from pathlib import Path
from penstock import LLM, SamplingParams
model, given, sequences, prompt, answer = json.loads(sys.argv[1])
llm = LLM(model, skip_tokenizer_init=True, max_model_len=prompt + answer, max_num_seqs=sequences,
          enable_prefix_caching=False, **given)
prompts = [{"prompt_token_ids": [7 + i] * prompt} for i in range(sequences)]
llm.generate(prompts, SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True))
task = Path(f"/proc/{os.getpid()}/task")
children = [int(x) for one in task.iterdir() for x in (one / "children").read_text().split()]
found = []
for process in (os.getpid(), *sorted(children)):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    kept = {x.split(":")[0]: int(x.split()[1]) * 1024 for x in lines if x.startswith("Rss")}
    found.append([kept["RssAnon"], kept["RssFile"], kept["RssShmem"]])
print(json.dumps(found))
"""


Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder_of(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Checkpoints by name, each made once: tiny ones, and two that are like none of those."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name in KINDS:
            return tiny(name).folder
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            if name == "ranked":
                parts = Parts.of(open_source(tiny("llama").folder))
                written(Ranked(parts, chosen(parts)), made[name])
            else:
                kind = KINDS["llama3-rope"]
                make_model(replace(kind, changes=kind.changes | WIDE)).save_pretrained(made[name])
        return made[name]

    return get


def asked(folder: Path, **more: Any) -> EngineConfig:
    return EngineConfig.of(
        model=str(folder), max_model_len=LENGTH, max_num_seqs=SEQUENCES, dtype="bfloat16",
        skip_tokenizer_init=True, **more,
    )  # fmt: skip


@needs_native
@pytest.mark.parametrize(("name", "divided"), CASES)
def test_each_has_what_it_was_said_to_have(
    folder_of: Folder, name: str, divided: dict[str, int]
) -> None:
    """Weights and cache by `==`, and so are the buffers of a step."""
    whole = bool(divided.get("enable_expert_parallel"))
    folder = folder_of(name)
    found = footprints(asked(folder, **divided), CPU, TOKENS)
    stages, width = (divided.get(f"{x}_parallel_size", 1) for x in ("pipeline", "tensor"))
    assert len(found) == stages * width
    meeting = torch.zeros(HEADER + 2 * PLACE, dtype=torch.uint8)
    for number, part in enumerate(found):
        stage = None if stages == 1 else Stage(number // width, stages, 0, 0)
        ranks = Ranks(number % width, width, meeting, whole, stage)
        loaded = load_model(folder, dtype="bfloat16", max_model_len=LENGTH, ranks=ranks)
        held = {t.data_ptr(): t.nbytes for t in fixed_tensors(loaded.model).values()}
        assert part.weights == sum(held.values())
        layout = CPU.layout(loaded.model.cached_layers, kv_dtype("auto", loaded.dtype), 32)
        assert part.layout == layout
        blocks = part.blocks(SEQUENCES, LENGTH)  # of a window, fewer than of all tokens
        growth = SEQUENCES if part.horizon else 0  # blocks that a window leaves are found again
        assert part.cache_bytes(SEQUENCES, LENGTH) == layout.nbytes(blocks + growth)
        program = Program(loaded.model, layout.allocate(1))
        tokens = TOKENS if stage is None else largest_part(TOKENS, stages)
        buffers = part.workspace - _scratch(part.described, tokens)
        assert program.touched(tokens, SEQUENCES) == buffers
        assert (part.meeting > 0) == (width > 1)
    total = sum(part.total(SEQUENCES, LENGTH) - part.meeting for part in found)
    assert total_of(found, SEQUENCES, LENGTH) == total + meetings_of(found)


@needs_native
@pytest.mark.parametrize(("name", "whole_experts"), MEETING)
def test_where_ranks_meet(tiny: Make, name: str, whole_experts: bool) -> None:
    """As far as a step has written to both places, and no further."""
    tokens, folder = 64, tiny(name).folder
    meeting = torch.zeros(HEADER + 2 * PLACE, dtype=torch.uint8)

    def rank(number: int) -> int:
        ranks = Ranks(number, 2, meeting, whole_experts)
        loaded = load_model(folder, dtype="bfloat16", ranks=ranks)
        kv = CPU.layout(loaded.model.cached_layers, loaded.dtype, 32).allocate(3)
        program = Program(loaded.model, kv)
        step = Step(
            tokens=torch.arange(10, 10 + tokens, dtype=torch.int32),
            positions=torch.arange(tokens, dtype=torch.int32),
            slots=torch.arange(tokens, dtype=torch.int32),
            query_start=torch.tensor([0, tokens], dtype=torch.int32),
            context_len=torch.tensor([tokens], dtype=torch.int32),
            block_table=torch.tensor([[0, 1]], dtype=torch.int32),
            sample_at=torch.tensor([tokens - 1], dtype=torch.int32),
        )
        with torch.inference_mode():
            for _ in range(2):
                program(step, kv)
        return met_bytes(program, tokens, 1, 2, PLACE)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    assert first == second
    used = 0
    for place in meeting[HEADER:].view(2, PLACE):
        written = place.nonzero()
        used += int(written[-1]) + 1 if len(written) else 0
    assert used <= first <= used + 2 * tokens * 2 + 64  # a row may end in zeros


def test_parts_are_no_larger() -> None:
    for stages in (2, 3):
        for most in (1, 63, 64, 127, 128, 191, 500, 2048, 5000):
            largest = 0
            for tokens in {most, min(most, 2 * PART_TOKENS - 1), *range(max(most - 70, 1), most)}:
                ends = torch.tensor([0, tokens], dtype=torch.int32)
                one = torch.zeros(tokens, dtype=torch.int32)
                step = Step(one, one, one, ends, ends[1:], one[None, :1], ends[1:] - 1)
                largest = max(largest, *(x.num_tokens for x in parts_of(step, stages)))
            assert largest_part(most, stages) >= largest
            assert largest_part(most, stages) <= max(largest, 2 * PART_TOKENS - 1)


def test_what_can_not_be_divided(tiny: Make) -> None:
    folder = tiny("llama3-rope").folder
    with pytest.raises(UnsupportedModelError, match="can't be shared among 3 ranks"):
        footprints(asked(folder, tensor_parallel_size=3), CPU)
    with pytest.raises(UnsupportedModelError, match="3 layers are too few for 4 stages"):
        footprints(asked(folder, pipeline_parallel_size=4), CPU)
    gpu = Device(torch.device("cuda"), by_triton=True)
    with pytest.raises(ConfigError, match="is built for CPUs"):
        footprints(asked(folder, tensor_parallel_size=2), gpu)


@needs_native
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="memory is read from /proc")
@pytest.mark.parametrize(("model", "options", "sizes"), [
    ("stories", {"tensor_parallel_size": 2}, (48, 450, 50)),
    ("stories", {"pipeline_parallel_size": 2}, (48, 450, 50)),
    ("wide", {"tensor_parallel_size": 2, "dtype": "float32"}, (1, 1900, 20)),
    pytest.param("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True},
                 (32, 200, 30), marks=pytest.mark.slow),
    pytest.param("deepseek-v3", {"tensor_parallel_size": 2}, (32, 200, 30), marks=pytest.mark.slow),
])  # fmt: skip
def test_memory_is_what_ranks_have(
    folder_of: Folder, model: str, options: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    """Each process within 3%, and so all of them, what they share counted once."""
    folder = model if model == "stories" else str(folder_of(model))
    command = [sys.executable, "-c", ENGINE, json.dumps([folder, options, *sizes])]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    command = [sys.executable, "-c", "from penstock.cli.main import run; run()", "plan", folder]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    for name, size in zip(("concurrency", "input-len", "output-len"), sizes, strict=True):
        command += [f"--{name}", str(size)]
    planned = json.loads(
        subprocess.run([*command, "--json"], check=True, capture_output=True).stdout
    )["memory"]
    ranks = planned["ranks"]
    assert len(ranks) == len(measured) == 2
    for rank, has in zip(ranks, measured, strict=True):
        assert rank["total_bytes"] == pytest.approx(sum(has), rel=0.03)
    anonymous, files, shared = zip(*measured, strict=True)
    together = sum(anonymous) + max(files) + max(shared)
    assert planned["total_bytes"] == pytest.approx(together, rel=0.03)
    for name in ("weights_bytes", "kv_cache_bytes", "workspace_bytes"):
        assert planned[name] == sum(rank[name] for rank in ranks)
