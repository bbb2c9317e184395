"""`penstock plan`: what a model takes, how fast it can be and what it costs, before it is there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from penstock import LLM, SamplingParams, hardware
from penstock.hardware import Peaks, detect
from penstock.kernels import native
from penstock.models.hub import resolve
from penstock.runtime import rank

Run = Callable[..., Result]
H200 = ("--device", "cuda", "--bandwidth", 4800, "--tflops", 790)

ENGINE = """
import json, sys
from penstock import LLM, SamplingParams
from penstock.hardware import resident_bytes
given, blocks, sequences, prompt, answer = json.loads(sys.argv[1])
given |= {"num_blocks": blocks, "max_num_seqs": sequences, "max_model_len": prompt + answer}
llm = LLM("stories", **given)
prompts = [{"prompt_token_ids": [7 + i] * prompt} for i in range(sequences)]
llm.generate(prompts, SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True))
print(resident_bytes())
"""


@pytest.fixture(scope="module", autouse=True)
def _asked_once() -> Iterator[None]:
    """What an empty rank takes, for which a process starts, is found out once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "empty_bytes", cache(rank.empty_bytes))
        yield


def as_json(penstock: Run, *arguments: object) -> dict[str, Any]:
    result = penstock("plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_what_it_says(penstock: Run) -> None:
    result = penstock("plan", "--usd-hour", 0.25, "--concurrency", 4, "--cached", 0.5)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    for words in (
        "stories: llama, 8 layers of 256", "4 × 640 tokens of 4,096 B in bfloat16", "fits in",
        "of 512 tokens, 256 of them cached: ", "bound by memory: ", "of 4 sequences",
        "20.0 GB/s", "a million output tokens", "cache may hold all that a step reads",
    ):  # fmt: skip
        assert words in said
    assert "at least" not in said and "at most" not in said  # of what a CPU's cache may hold
    large = penstock("plan", "stories", "--concurrency", 600)  # keys and values alone don't fit
    said = " ".join(large.stdout.split())
    assert "tokens: at least" in said and ": at most" in said and "may hold" not in said
    one = penstock("plan", "stories", "--usd-hour", 1, "--output-len", 1).stdout
    assert "a million input tokens" in one and "a million output tokens" not in one


def test_floors_are_those_of_a_run(penstock: Run, known_peaks: Peaks) -> None:
    """An engine's ledger adds up the same floor, step by step."""
    sizes = ("--input-len", 300, "--output-len", 20, "--max-num-batched-tokens", 128)
    found = as_json(penstock, "stories", *sizes)["speed"]
    llm = LLM("stories", max_num_batched_tokens=128, max_model_len=320)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": list(range(5, 305))}], params)
    planned = found["prefill_s"] + 19 * found["decode_step_s"]
    assert output.metrics is not None
    assert output.metrics.floor_s == pytest.approx(planned, rel=1e-9)
    assert found["read_bytes_per_s"] == known_peaks.read_bytes_per_s


@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
@pytest.mark.parametrize(("given", "sizes", "cache"), [
    ({}, (48, 450, 50), 48 * 16 * 32 * 4096),
    ({"kv_cache_dtype": "kivi"}, (64, 900, 100), None),
    ({"max_attention_window": 128}, (64, 1500, 100), 555 * 32 * 4096),
])  # fmt: skip
def test_memory_is_what_an_engine_has(
    given: dict[str, Any], sizes: tuple[int, int, int], cache: int | None
) -> None:
    """Within 3%, the process counted: a third to a half of it are keys and values here."""
    command = [sys.executable, "-c", "from penstock.cli.main import run; run()", "plan", "stories"]
    for name, size in zip(("concurrency", "input-len", "output-len"), sizes, strict=True):
        command += [f"--{name}", str(size)]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    planned = json.loads(
        subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout
    )["memory"]
    asked = json.dumps([given, planned["num_blocks"], *sizes])
    command = [sys.executable, "-c", ENGINE, asked]
    measured = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert cache is None or planned["kv_cache_bytes"] == cache
    assert planned["total_bytes"] == pytest.approx(measured, rel=0.03)


@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
def test_ranks_are_told_one_by_one(penstock: Run) -> None:
    """What all have together, and each; those that are alike in a row."""
    memory = as_json(penstock, "stories", "-tp", 4, "-pp", 2)["memory"]
    assert [(x["rank"], x["stage"]) for x in memory["ranks"]] == [(i, 1 + i // 4) for i in range(8)]
    one = as_json(penstock, "stories")
    assert "ranks" not in one["memory"] and "meeting_bytes" not in one["memory"]
    assert (
        memory["kv_cache_bytes"] == 2 * one["memory"]["kv_cache_bytes"]
    )  # two key heads, four ranks
    shared = sum(x["meeting_bytes"] for x in memory["ranks"]) - memory["meeting_bytes"]
    assert shared == 3 * memory["meeting_bytes"] > 0
    said = " ".join(penstock("plan", "stories", "-tp", 4, "-pp", 2).stdout.split())
    for words in (
        "Rank 0 ",
        "Ranks 1 to 3 ",
        "Ranks 4 to 7 ",
        " each, stage 2: weights ",
        "stage 1: ",
    ):
        assert words in said
    assert "stage" not in penstock("plan", "stories", "-tp", 2).stdout
    speed = as_json(penstock, "stories", "-tp", 2)["speed"]
    assert speed == one["speed"]


def test_a_share_of_the_floor(penstock: Run) -> None:
    whole, half = (as_json(penstock, "--usd-hour", 1, "--share", s) for s in (1, 0.5))
    assert half["speed"]["prefill_s"] == 2 * whole["speed"]["prefill_s"]
    assert half["speed"]["requests_per_s"] == whole["speed"]["requests_per_s"] / 2
    for name, price in whole["cost"].items():
        assert half["cost"][name] == pytest.approx(price * (1 if name == "usd_hour" else 2))
    said = penstock("plan", "--share", 0.5).stdout
    assert "50% of the floor" in said and "at least" not in said and "at most" not in said


def test_a_machine_that_is_not_here(penstock: Run) -> None:
    found = as_json(penstock, "stories", *H200, "--memory", 141)
    assert found["speed"]["read_bytes_per_s"] == 4.8e12
    assert found["memory"]["available_bytes"] == 141 << 30
    assert found["memory"]["process_bytes"] == 0  # in another memory
    found = as_json(penstock, "stories", *H200)
    assert found["memory"]["available_bytes"] is found["memory"]["max_sequences"] is None
    said = penstock("plan", "stories", *H200)
    assert said.exit_code == 0 and "fits" not in said.stdout
    assert "compared with nothing" in said.stdout and "as given" in said.stdout
    assert found["memory"]["fits"] is None
    many = penstock("plan", "stories", *H200, "--max-num-batched-tokens", 8192)
    assert "of steps of up to 8,192 tokens" in many.stdout  # what a GPU sets aside
    here = ("--bandwidth", 20, "--tflops", 0.1, "--device", "cpu")
    named, own = (as_json(penstock, "--dtype", "float32", *more) for more in (here, ()))
    assert named["speed"]["prefill_s"] == own["speed"]["prefill_s"]  # what the tests' peaks are
    small = as_json(penstock, "stories", "--memory", 0.05)["memory"]
    assert small["available_bytes"] < small["total_bytes"] and small["max_sequences"] == 0
    assert small["fits"] is False
    assert "DOES NOT FIT" in penstock("plan", "stories", "--memory", 0.05).stdout


def test_memory_here_is_what_is_free(penstock: Run) -> None:
    found = as_json(penstock, "stories", "--quantization", "w4a8", "--kv-cache-dtype", "int8")
    assert 0 < found["memory"]["available_bytes"] <= detect().memory_bytes
    assert found["weight_formats"].startswith("w4a8") and "int8" in str(found["memory"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--share", 0], "--share must be above 0 and at most 1, not 0"),
        (["--share", "nan"], "--share must be above 0 and at most 1, not nan"),
        (["--usd-hour", -1], "--usd-hour must be above 0 and below 1e9, not -1"),
        (["--memory", "inf"], "--memory must be above 0 and below 1e9, not inf"),
        (["--bandwidth", 10], "give both, or neither"),
        (["--input-len", 9000], "9000 tokens in the cache and 128 to generate are 9128"),
        (["--device", "cuda"], "To plan for a GPU that isn't here, give --memory"),
        (["--concurrency", 3000], "--concurrency 3,000 needs --max-num-batched-tokens 3000"),
        (["--device", "gpu"], "device='gpu' isn't one of auto, cpu, cuda, cuda:N"),
        (["--cached", 0.01], "is less than a block of 32"),
        ([*H200, "--kv-cache-dtype", "kivi"], "is built for CPUs only"),
        (["nowhere/at/all"], "nowhere/at/all"),
        (["--quantization", "w3"], "w3"),
        (["-tp", 3], "tensor_parallel_size may be 1, 2, 4"),
        (["-pp", 9], "8 layers are too few for 9 stages"),
        (["-tp", 65], "tensor_parallel_size=65 are 65 processes, and 64 is the most"),
        (["-tp", 0], "must be"),
        (["--enable-expert-parallel"], "has no effect without a tensor_parallel_size above 1"),
        (["-tp", 2, "--enable-expert-parallel"], "a model without experts"),
        (["-tp", 2, "--kv-cache-dtype", "kivi"], "isn't built together with"),
        ([*H200, "-tp", 2], "tensor_parallel_size=2 is built for CPUs"),
    ],
)
def test_what_can_not_be_planned(penstock: Run, arguments: list[object], says: str) -> None:
    if arguments == ["--device", "cuda"]:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is one here")
    result = penstock("plan", *arguments)
    assert result.exit_code == 1
    assert says in " ".join(result.stderr.split())


def test_as_many_as_it_says_fit(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "resident_bytes", lambda: 0)  # of pytest: it grows
    sizes = ("stories", "--memory", 0.1, "--input-len", 100, "--output-len", 100)
    most = as_json(penstock, *sizes)["memory"]["max_sequences"]
    assert 10 < most < 2048
    for count, fits in ((most, True), (most + 1, False)):
        memory = as_json(penstock, *sizes, "--concurrency", count)["memory"]
        assert (memory["total_bytes"] <= memory["available_bytes"]) == fits


def test_a_config_of_quantized_weights(penstock: Run, tmp_path: Path) -> None:
    """How they are quantized shows in them: a format must stand for it."""
    config = json.loads((resolve("stories") / "config.json").read_text())
    for method, like in (("awq", "w4a16-g128-asym"), ("gptq", "w4a16-g128"), ("fp8", "fp8")):
        quantized = {**config, "quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(quantized))
        result = penstock("plan", tmp_path)
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert f"quantized ({method})" in said and f"quantization='{like}'" in said
        found = as_json(penstock, tmp_path, "--quantization", like)
        assert found["weight_formats"].startswith(like)


def test_headers_that_a_load_refuses(penstock: Run, tmp_path: Path) -> None:
    """Weights of fewer layers than config.json says."""
    folder = resolve("stories")
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    result = penstock("plan", tmp_path)
    assert result.exit_code == 1 and "The checkpoint lacks" in " ".join(result.stderr.split())


def test_a_built_engine_says_its_own(penstock: Run, engine: Path) -> None:
    result = penstock("plan", engine, "--input-len", 8, "--output-len", 8)
    assert result.exit_code == 1 and "penstock doctor says what it takes" in result.stderr
