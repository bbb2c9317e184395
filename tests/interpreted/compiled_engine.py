"""Runs whole engines whose kernels are compiled for a GPU that isn't here, and not started.

All that a step needs on the way to a kernel is real: the dispatcher's choice, the launcher, its
arguments and what they are specialised on, Triton's compiler and ptxas. What kernels would have
written is zero, so tokens say nothing. Run in a process of its own, by name:
    python -m tests.interpreted.compiled_engine llama w4a16 draft_model
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"PENSTOCK_KERNELS": "triton", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
import penstock

del os.environ["TRITON_INTERPRET"]  # before Triton is imported: kernels are compiled

import torch
import triton

from penstock import LLM, SamplingParams, ops
from penstock.kernels import load
from penstock.runtime import device, engine_folder
from tests.kernels.triton.compiled import compiled
from tests.models.tiny import FAMILIES, STATED, make_tiny
from tests.models.tiny_gemma4 import GEMMA4

METHODS = ("draft_model", "medusa", "medusa-shared", "eagle", "eagle3", "self", "ngram")
FORMATS = ("w8a16", "w4a16", "w4a16-g32-asym", "w8a8", "w4a8", "fp8", "fp8-w8a8", "nf4", "mxfp4",
           "nvfp4")  # fmt: skip
CACHES = ("kv-int8", "kv-fp8")
WHOLE = ("float32", "embed", "any-order", "reach")
LARGE = ("8b", "8b-w4a16", "8b-w8a8", "8b-fp8-w8a8")
"""One layer of Llama-3.1-8B's shape, fewer tokens in its vocabulary: a large model's tiles."""

ON_CPUS = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite", "youtu", *STATED, *GEMMA4)
ON_GPUS = [name for name in FAMILIES if name not in ON_CPUS]
CASES = (*ON_GPUS, *METHODS, *FORMATS, *CACHES, *WHOLE, *LARGE)

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=4, ignore_eos=True),
    SamplingParams(
        temperature=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=4, ignore_eos=True
    ),
    SamplingParams(temperature=0.8, typical_p=0.9, n=2, seed=3, max_tokens=3, ignore_eos=True),
]


def prepare() -> None:
    """Send CPU tensors to Triton's launchers, and have what they allocate be zero."""
    for module in (device, engine_folder, load):
        module.interpreting = lambda: True  # type: ignore[attr-defined]
    zeros, zeros_like, new_zeros = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros

    def without(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            options.pop("memory_format", None)
            return call(*args, **options)

        return run

    torch.empty, torch.empty_like = without(zeros), without(zeros_like)
    torch.Tensor.new_empty = without(new_zeros)  # type: ignore[method-assign]
    leading = ops.softmax_top_k

    def likely(*args: Any) -> Any:
        """Candidates with a chance: or no tree would have a branch."""
        values, ids, weights = leading(*args)
        return values, ids, weights.fill_(0.3)

    ops.softmax_top_k = likely


def large(folder: Path) -> Path:
    """Its config.json, which is all of it."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 1, "vocab_size": 16_000, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(case: str, folder: Path) -> None:
    """One engine's life; raises what a launch raises."""
    options: dict[str, Any] = {"dtype": "bfloat16"}
    if case in LARGE:
        _, _, form = case.partition("-")
        options = {"load_format": "dummy", "quantization": form or None}
        live(large(folder), list(range(300)), {**options, "max_model_len": 8192, "num_blocks": 256})
        return
    tiny = make_tiny(case if case in FAMILIES else "llama", folder)
    if case in METHODS:
        from tests.interpreted.guessing import guessing, target

        tiny_prompt = [0, 0, 0, 0, 0, 1, 10, 37, 4, 19]  # what all kernels give is found again
        folder = target(folder / "target", 0.05, 2.0)
        options["speculative_config"] = guessing(case, folder.parent)
    else:
        tiny_prompt = tiny.prompt[:40].tolist()
    if case in FORMATS:
        options["quantization"] = case
    if case in CACHES:
        options["kv_cache_dtype"] = case.removeprefix("kv-")
    if case == "reach":
        options |= {"max_attention_window": 24, "sink_token_length": 3}
    if case == "float32":
        options["dtype"] = case
    if case == "any-order":
        options["deterministic"] = False
    limits = {"max_model_len": min(tiny.case.max_len, 96), "num_blocks": 24}
    live(folder, tiny_prompt, {**options, **limits}, embed=case == "embed")


def live(folder: Path, prompt: list[int], options: dict[str, Any], embed: bool = False) -> None:
    """Several requests, together."""
    llm = LLM(folder, skip_tokenizer_init=True, max_num_seqs=8, **options)
    assert llm.runtime.runner.graphs is not None
    items = [{"prompt_token_ids": prompt + prompt[:i]} for i in range(len(PARAMS))]
    if embed:
        llm.embed(items)
        return
    for output in llm.generate(items, PARAMS):
        for sample in output.outputs:
            assert sample.finish_reason == "length", sample
    speculation = llm.engine.speculation
    if speculation is not None:
        assert speculation.broken is None
        assert llm.stats()["spec_decode_num_draft_tokens"] > 0


def main(cases: list[str]) -> None:
    """Run each, and say how many kernels were started by it."""
    assert not triton.knobs.runtime.interpret
    assert penstock.kernels.native.handle is None
    prepare()
    for case in cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            kernels = compiled(lambda case=case, folder=folder: run(case, Path(folder)))
        different = {id(kernel) for kernel in kernels}
        print(f"{case}: {len(kernels)} launches of {len(different)} kernels", flush=True)
        assert len(different) > 10


if __name__ == "__main__":
    main(sys.argv[1:])
