"""Adapters of models whose layers have states: a row's bits are its own, and so are prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from penstock import LLM, LoRARequest, SamplingParams
from penstock.errors import UnsupportedModelError
from penstock.kernels import native
from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights

from ..lora_files import write_adapter
from ..models.tiny import Tiny, make_tiny

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
WHO = ["x", None, "y", "x", "y", None]
APART = ("in_proj_a", "in_proj_b")


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2", "granite-hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def folders(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    shapes = [
        (name, tuple(module.weight.shape))
        for name, module in model.oracle.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and not name.endswith(APART)
    ]
    write_adapter(base / "x", shapes, 5, 1, 0.5)
    write_adapter(base / "y", shapes[::2], 16, 2, 0.5)
    return {name: base / name for name in "xy"}


def llm_of(model: Tiny, **options: Any) -> LLM:
    chosen: dict[str, Any] = {"max_model_len": model.case.max_len, "num_blocks": 40}
    chosen |= {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2}
    return LLM(model.folder, **chosen | options)


def outputs(llm: LLM, folders: dict[str, Path], prompts: list[list[int]]) -> list[Any]:
    asked = [None if who is None else LoRARequest(who, 1, folders[who]) for who in WHO]
    found = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], PARAMS, lora_request=asked[: len(prompts)]
    )
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 8},
        {"num_blocks": 12},
        {"quantization": "w8a8"},
        {"speculative_config": {"method": "ngram", "adaptive": False}},
        {"enforce_eager": True},
    ],
)
def test_together_as_alone(model: Tiny, folders: dict[str, Path], options: dict[str, Any]) -> None:
    prompts = [model.prompt[:length].tolist() for length in (70, 70, 33, 64, 70, 5)]
    plain = llm_of(model, quantization=options.get("quantization"), enable_prefix_caching=False)
    asked = [None if who is None else LoRARequest(who, 1, folders[who]) for who in WHO]
    alone = []
    for prompt, lora in zip(prompts, asked, strict=True):
        (o,) = plain.generate([{"prompt_token_ids": prompt}], PARAMS, lora_request=lora)
        alone.append((o.outputs[0].token_ids, o.outputs[0].logprobs))
    assert alone[0] != alone[1] != alone[4]  # of one prompt
    llm = llm_of(model, **options)
    assert outputs(llm, folders, prompts) == alone
    assert outputs(llm, folders, prompts) == alone  # from what is known by now


def test_prefixes_are_an_adapters_own(model: Tiny, folders: dict[str, Path]) -> None:
    llm = llm_of(model)
    prompt = {"prompt_token_ids": model.prompt[:70].tolist()}
    found = []
    for who in ("x", None, "y", "x", None, "y"):
        lora = None if who is None else LoRARequest(who, 1, folders[who])
        (output,) = llm.generate([prompt], PARAMS, lora_request=lora)
        found.append(output.metrics.cached_tokens)
    assert found == [0, 0, 0, 64, 64, 64]


def test_gates_of_a_rule_are_merged_only(tmp_path: Path) -> None:
    model = make_tiny("qwen3_5", tmp_path / "m")
    write_adapter(tmp_path / "a", [("model.layers.1.linear_attn.in_proj_a", (4, 64))])
    llm = llm_of(model)
    with pytest.raises(
        UnsupportedModelError, match=r"changes .*in_proj_a.* of a delta rule.*--merge"
    ):
        llm.load_lora("a", tmp_path / "a")
    write_adapter(tmp_path / "c", [("model.layers.1.linear_attn.conv1d", (192, 3))])
    with pytest.raises(UnsupportedModelError, match=r"changes a convolution .*isn't built"):
        llm.load_lora("c", tmp_path / "c")
    with pytest.raises(UnsupportedModelError, match=r"changes a convolution .*isn't built"):
        export_model(model.folder, tmp_path / "e", weights=NewWeights(merge_lora=tmp_path / "c"))
