"""Adapters over every family against transformers' model with the same product in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora_files import write_adapter
from tiny import Make
from torch import nn

from penstock import LLM, LoRARequest, SamplingParams
from penstock.errors import UnsupportedModelError
from penstock.kernels import native

ADAPTED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-long", "olmo2", "smollm3",
    "gpt-neox", "gpt-neox-serial", "olmo3", "granite", "gemma", "cohere", "cohere2", "glm", "glm4",
    "starcoder2", "exaone4", "seed-oss", "ernie4_5", "ministral", "phi", "stablelm",
    "arcee", "hunyuan",
    "stablelm-parallel", "qwen3-next", "qwen3_5", "lfm2", "granite-hybrid", "bamba", "nemotron-h",
    "falcon-h1", "olmo-hybrid", "nemotron-h-latent", "gemma4", "gemma4-inputs",
)  # fmt: skip
APART = ("in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate", "mlp.gate")
APART += ("linear_attn.a_proj", "linear_attn.b_proj")
"""What only merging changes."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)


def layers_of(oracle: Any) -> dict[str, nn.Linear]:
    """The matrices of the layers, by their modules' names."""
    return {
        name: module
        for name, module in oracle.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and not name.endswith(APART)
    }


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
def test_as_merged_in_transformers(tiny: Make, tmp_path: Path, name: str, some: bool) -> None:
    """Of all matrices, or of some that are parts of joined ones; the model itself stays as it is.

    Every prompt token's log-probability, and greedy tokens.
    """
    case = tiny(name)
    linears = layers_of(case.oracle)
    chosen = [at for at in linears if not some or at.rsplit(".", 1)[1] in PARTS]
    shapes = [(at, tuple(linears[at].weight.shape)) for at in chosen]
    change = write_adapter(tmp_path / "lora", shapes, rank=5, scale=0.4)
    prompt = case.prompt.tolist()
    llm = LLM(
        case.folder,
        dtype="float32",
        max_model_len=case.case.max_len,
        skip_tokenizer_init=True,
        enable_lora=True,
    )
    asked = [LoRARequest("x", 1, tmp_path / "lora"), None]
    adapted, plain = llm.generate([prompt] * 2, GREEDY, lora_request=asked)
    for output, changes in ((plain, {}), (adapted, change)):
        with torch.inference_mode(), Added(linears, changes):
            text = prompt + output.outputs[0].token_ids
            logits = case.oracle(torch.tensor([text])).logits[0]
        assert output.outputs[0].token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        want = logits.log_softmax(-1)
        assert output.prompt_logprobs is not None
        for at, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            found = entry[prompt[at + 1]].logprob
            assert abs(found - want[at, prompt[at + 1]].item()) < 2e-4
    assert adapted.prompt_logprobs != plain.prompt_logprobs


PARTS = ("q_proj", "v_proj", "up_proj", "qkv_proj", "query_key_value", "dense")
PARTS += ("in_proj_z", "in_proj_qkvz", "w3")


class Added:
    """These products are in the matrices meanwhile."""

    def __init__(self, linears: dict[str, nn.Linear], change: dict[str, torch.Tensor]) -> None:
        self._before = {name: linears[name].weight.clone() for name in change}
        self._linears, self._change = linears, change

    def __enter__(self) -> None:
        for name, product in self._change.items():
            self._linears[name].weight.add_(product)

    def __exit__(self, *_: object) -> None:
        for name, before in self._before.items():
            self._linears[name].weight.copy_(before)


@pytest.mark.parametrize("said", [True, False])
def test_transposed_matrices_are_refused(tiny: Make, tmp_path: Path, said: bool) -> None:
    """GPT-2's: whether its adapter says so or not."""
    case = tiny("gpt2")
    config = {"fan_in_fan_out": True} if said else {}
    write_adapter(tmp_path, [("transformer.h.0.attn.c_attn", (192, 64))], **config)
    llm = LLM(case.folder, skip_tokenizer_init=True, enable_lora=True)
    with pytest.raises(UnsupportedModelError, match=r"fan_in_fan_out=True|has transposed"):
        llm.load_lora("x", tmp_path)
