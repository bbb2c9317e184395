"""Embeddings of every family against transformers' `last_hidden_state`, pooled by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, MAX_LEN, STATED, Make
from torch.nn.functional import cosine_similarity, normalize

from penstock import LLM
from penstock.engine import PoolingParams

LENGTHS = (1, 33, 70)

# Absolute, of unit vectors: float32 rounds to 1e-7 and both sides add in other orders; bfloat16
# keeps 8 bits through every layer.
TOLERANCE = {"float32": 2e-6, "bfloat16": 0.02}


def llm(folder: Any, dtype: str, **kwargs: Any) -> LLM:
    return LLM(
        folder,
        dtype=dtype,
        max_model_len=MAX_LEN,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=16,
        max_num_batched_tokens=64,  # the longest comes in chunks
        **kwargs,
    )


MIXED = ("mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "gpt-oss", "qwen3-next", "qwen3_5-moe")
MIXED += ("lfm2-moe",)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_transformers(tiny: Make, name: str, dtype: str) -> None:
    made = tiny(name)
    engine = llm(made.folder, dtype)
    prompts = [made.prompt[:length] for length in LENGTHS]
    base = made.oracle.base_model
    with torch.inference_mode():
        states = [base(tokens[None]).last_hidden_state[0] for tokens in prompts]
    for kind in ("last", "mean"):
        params = PoolingParams(kind)  # type: ignore[arg-type]
        outputs = engine.embed([tokens.tolist() for tokens in prompts], params)
        for state, output in zip(states, outputs, strict=True):
            want = normalize(state[-1] if kind == "last" else state.mean(0), dim=0)
            found = torch.tensor(output.outputs.embedding)
            far = (found - want).abs().max()
            if dtype == "bfloat16" and name in MIXED:  # a token may take another expert
                assert cosine_similarity(found, want, dim=0) > 0.5
            else:
                # states add up what rounding has done: of random weights twenty times as much
                assert far <= TOLERANCE[dtype] * (20 if name in STATED else 1)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gpt-neox"])
def test_eager_gives_the_same_bits(tiny: Make, name: str) -> None:
    folder = tiny(name).folder
    prompts = [tiny(name).prompt[:length].tolist() for length in LENGTHS]
    for dtype in ("float32", "bfloat16"):
        found = [
            [o.outputs.embedding for o in engine.embed(prompts, PoolingParams("mean"))]
            for engine in (llm(folder, dtype), llm(folder, dtype, enforce_eager=True))
        ]
        assert found[0] == found[1]
