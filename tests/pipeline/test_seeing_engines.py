"""Built engines of models that see: the bits of the model, and what is wrong with some."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import EngineFolderError
from penstock.pipeline.build import BuildOptions, build
from penstock.runtime.engine_folder import MANIFEST, digest
from tests.models.seeing import (
    SeeingModel,
    make_idefics3,
    make_internvl,
    make_lfm2,
    make_qwen3,
    picture,
)

PROMPT: dict[str, Any] = {
    "prompt": "What is <image>, and why?",
    "multi_modal_data": {"image": picture(100, 90, 1)},
}


def said(llm: LLM) -> Any:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    sample = llm.generate(PROMPT, params)[0].outputs[0]
    logprobs = [{t: p.logprob for t, p in at.items()} for at in sample.logprobs or []]
    return sample.token_ids, logprobs, llm.embed(PROMPT)[0].outputs.embedding


@pytest.mark.parametrize("quantization", [None, "w4a8"])
@pytest.mark.parametrize("make", [make_idefics3, make_internvl, make_qwen3, make_lfm2])
def test_the_bits_of_the_model(
    make: Callable[[Path], SeeingModel], quantization: str | None, tmp_path: Path
) -> None:
    model, engine = tmp_path / "model", tmp_path / "engine"
    make(model)
    build(BuildOptions(str(model), engine, quantization=quantization))
    want = said(LLM(model, **({"quantization": quantization} if quantization else {})))
    assert said(LLM(engine)) == want
    assert said(LLM(engine, enforce_eager=True)) == want
    assert said(LLM(engine, max_model_len=200)) == want


def test_a_tower_that_isnt_there(tmp_path: Path) -> None:
    model, engine = tmp_path / "model", tmp_path / "engine"
    make_idefics3(model)
    build(BuildOptions(str(model), engine))
    manifest = json.loads((engine / MANIFEST).read_text())
    held, name = manifest["weights"]["tensors"], "vision.patches.weight"
    manifest["weights"]["tensors"] = {n + "s" * (n == name): x for n, x in held.items()}
    manifest["digest"] = digest({k: v for k, v in manifest.items() if k != "digest"})
    (engine / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(EngineFolderError, match=r"lacks 1 tensors of its tower, vision\.patches"):
        LLM(engine)
