"""Every family's tiny checkpoint: greedy tokens over Triton's kernels are transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.errors import InvalidPromptError, UnsupportedModelError
from tests.models.seeing import (
    SeeingModel,
    make_gemma3,
    make_idefics3,
    make_internvl,
    make_llava_next,
    make_mistral3,
    make_qwen,
    make_qwen3,
    picture,
)
from tests.models.tiny import FAMILIES, STATED, each_kind, make_tiny
from tests.models.tiny_gemma4 import GEMMA4

LENGTH = 4
PROMPT = 30
"""Tokens: beyond all windows but Phi-3's, and the answer begins a block."""

ON_CPUS = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite", "youtu", *STATED, *GEMMA4)
"""Families that no GPU runs yet."""


@pytest.mark.parametrize("family", ON_CPUS)
def test_what_is_for_cpus_is_refused(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"built for CPUs only.*device='cpu'"):
        LLM(tmp_path, skip_tokenizer_init=True, dtype="float32", max_model_len=64)


def test_pictures_that_are_for_cpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those whose tokens see each other both ways; texts are read."""
    made = make_gemma3(tmp_path)
    llm = LLM(tmp_path, dtype="float32", max_model_len=128, max_num_seqs=2)
    assert "Pictures of this model are read on CPUs only" in caplog.text
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH)
    output = llm.generate("What?", params)[0]
    with torch.no_grad():
        wanted = made.reference.generate(
            input_ids=torch.tensor([output.prompt_token_ids]), do_sample=False,
            max_new_tokens=LENGTH, min_new_tokens=LENGTH,
        )[0].tolist()  # fmt: skip
    assert output.outputs[0].token_ids == wanted[-LENGTH:]
    with pytest.raises(InvalidPromptError, match="This model sees no pictures"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": picture(60, 90)}}, params)


@pytest.mark.parametrize(
    "make",
    [make_idefics3, make_internvl, make_llava_next, make_mistral3, make_qwen, make_qwen3],
)
def test_a_picture(make: Callable[[Path], SeeingModel], tmp_path: Path) -> None:
    """And again, when its blocks are in the cache."""
    made, images = make(tmp_path), [picture(60, 90)]
    text = "What is <image>?"
    _, wanted = made.greedy(text, images, LENGTH)
    llm = LLM(tmp_path, dtype="float32", max_model_len=128, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    for _ in range(2):
        prompt = {"prompt": text, "multi_modal_data": {"image": images}}
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == wanted
    assert llm.engine.computing.overlapped > 0


@pytest.mark.quick
@pytest.mark.parametrize(
    "family",
    each_kind(f for f in FAMILIES if f not in ON_CPUS),
)
def test_greedy_tokens(family: str, tmp_path: Path) -> None:
    tiny = make_tiny(family, tmp_path)
    llm = LLM(
        tmp_path, skip_tokenizer_init=True, dtype="float32", max_model_len=tiny.case.max_len,
        num_blocks=16, max_num_seqs=2,
    )  # fmt: skip
    prompt = tiny.prompt[: 40 if family.startswith("phi3") else PROMPT].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
    tokens = torch.tensor(prompt)
    for _ in range(LENGTH):
        tokens = torch.cat((tokens, tiny.expect(tokens)[-1:].argmax(-1)))
    assert found == tokens[len(prompt) :].tolist()
    assert llm.runtime.runner.graphs is not None
    assert llm.runtime.runner.graphs.counts.replays > 0
    assert llm.engine.computing.overlapped > 0
