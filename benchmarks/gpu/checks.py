"""Section: what must hold before a time means anything.

Kernels against their references, tokens against the CPU's, and results that don't depend on who
else is in the batch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.document import Context, Item
from benchmarks.gpu.ops import call_of, format_called, packed_matrix

from penstock import ops
from penstock.kernels.triton import launchers

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 24
PROMPTS = (7, 40, 65)
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of ‖ours − reference‖ / ‖reference‖, the reference in float32 from the same inputs."""


def items(context: Context) -> Iterator[Item]:
    yield "parity", lambda: parity(context)
    for family in ("llama",) if context.dry else ("llama", "qwen3", "gemma3"):
        yield f"invariance-{family}", lambda family=family: invariance(context, family)
    for family in families(context):
        yield f"greedy-{family}", lambda family=family: same_tokens(context, family)
    yield "tests", lambda: tests(context)


def families(context: Context) -> Sequence[str]:
    """Of tests/models; each has a tiny random checkpoint."""
    if importlib.util.find_spec("transformers") is None:
        return ()
    if context.dry:
        return ("llama",)
    from tests.models.tiny import FAMILIES

    return FAMILIES


# ── kernels ──────────────────────────────────────────────────────────────────────────────────


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; NaN stays NaN, which no limit admits."""
    a, b = found.double(), expected.double()
    return float((a - b).norm() / b.norm())


def parity(context: Context) -> dict[str, Any]:
    """Kernels at real sizes, where tests take small ones; every value within CLOSE."""
    device, there = context.device, launchers()
    found: dict[str, Any] = {}
    n, k = (64, 96) if context.dry else (6144, 4096)
    for dtype, most in CLOSE.items():
        name = str(dtype).removeprefix("torch.")
        x = torch.randn(5 if context.dry else 77, k, device=device).to(dtype)
        weight = torch.rand(k, device=device) + 0.5
        if "rms_norm" in there:
            expected = ops.op("rms_norm").reference(x.float(), weight, 1e-5)
            found[f"rms_norm-{name}"] = distance(there["rms_norm"](x, weight, 1e-5), expected)
        if "linear" in there:
            w = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
            y = there["linear"](x, w, None, None, None, n)
            found[f"linear-{name}"] = distance(y, x.double() @ w.double().t())
        found = {key: {"error": e, "most": most, "close": e <= most} if isinstance(e, float) else e
                 for key, e in found.items()}  # fmt: skip
    if "linear" in there:
        found |= _quantized(context, n, k)
    return {"compared": found, "all_close": all(one["close"] for one in found.values())}


def _quantized(context: Context, n: int, k: int) -> dict[str, Any]:
    """Each format's product beside that of what its codes stand for."""
    found = {}
    for form in ("w4a16-g128", "w8a16", "fp8", "nf4", "mxfp4", "nvfp4", "w8a8"):
        stored = format_called(form)
        packed = packed_matrix(stored, n, k, False, context.device)
        x = torch.randn(33, k, device=context.device).to(torch.bfloat16)
        w = stored.unpack(packed, n, k).double()
        error = distance(call_of(stored, packed, x, n, False)(), x.double() @ w.t())
        most = CLOSE[torch.bfloat16]
        found[f"linear-{form}"] = {"error": error, "most": most, "close": error <= most}
    return found


def tests(context: Context) -> dict[str, Any]:
    """The kernels' own tests, on this device."""
    if importlib.util.find_spec("pytest") is None:
        return {"missing": "pytest isn't installed"}
    seconds = max(context.left_s - 2.0, 1.0)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
               "-o", "filterwarnings=default", "--ignore-glob=*test_compiles*",
               "tests/kernels/triton"]  # fmt: skip
    if context.dry:
        command += ["-k", "no_rows"]
    elif importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(12, len(os.sched_getaffinity(0))))]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return {"passed": None, "late_after_s": seconds, "tail": text[-3000:]}
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)",
                                                     done.stdout[-400:])}  # fmt: skip
    return {"passed": done.returncode == 0, "counts": counts, "tail": done.stdout[-14000:]}


# ── engines ──────────────────────────────────────────────────────────────────────────────────


def _prompts(vocabulary: int, seed: int = 3) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=random).tolist() for n in PROMPTS]


def _generate(
    folder: str, prompts: list[list[int]], *, alone: bool = False, **how: Any
) -> list[Any]:
    """Tokens of each prompt, and of each token the log-probabilities of the likeliest five.

    alone: one prompt after another, else all in one batch.
    """
    from penstock import LLM, SamplingParams

    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 64}
    llm = LLM(folder, skip_tokenizer_init=True, **{**limits, **how})
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=5
    )
    found = []
    batches = [[prompt] for prompt in prompts] if alone else [prompts]
    for output in (output for batch in batches for output in llm.generate(batch, params)):
        one = output.outputs[0]
        ranks = [{t: entry.logprob for t, entry in token.items()} for token in one.logprobs or ()]
        found.append((list(one.token_ids), ranks))
    return found


def same_tokens(context: Context, family: str) -> dict[str, Any]:
    """Greedy tokens in float32 of a tiny random checkpoint: the GPU's beside the CPU's."""
    from tests.models.tiny import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        made = make_tiny(family, Path(folder))
        how: dict[str, Any] = {"dtype": "float32", "max_model_len": made.case.max_len}
        prompts = _prompts(320)
        cpu = _generate(folder, prompts, device="cpu", **how)
        ours = _generate(folder, prompts, device=context.device.type, **how)
    pairs = list(zip(cpu, ours, strict=True))
    apart = max(
        (abs(a[t] - b[t]) for (_, x), (_, y) in pairs for a, b in zip(x, y, strict=True)
         for t in a if t in b), default=0.0,
    )  # fmt: skip
    return {
        "equal": all(a[0] == b[0] for a, b in pairs),
        "cpu": [tokens for tokens, _ in cpu],
        "gpu": [tokens for tokens, _ in ours],
        "logprobs_apart": apart,
    }


def invariance(context: Context, family: str) -> dict[str, Any]:
    """bfloat16: tokens and log-probabilities by `==`, alone, together and in chunks."""
    from tests.models.tiny import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        made = make_tiny(family, Path(folder))
        how: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": made.case.max_len,
            "device": context.device.type,
            "enable_prefix_caching": False,
        }
        prompts = _prompts(320)
        together = _generate(folder, prompts, **how)
        found = {
            "alone": together == _generate(folder, prompts, alone=True, **how),
            "in chunks": together == _generate(folder, prompts, max_num_batched_tokens=16, **how),
        }
        if context.device.type == "cuda":
            eager = _generate(folder, prompts, enforce_eager=True, **how)
            found["without graphs"] = together == eager
    return {"equal": all(found.values()), "compared": found}
