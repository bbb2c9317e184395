"""Mixtures of experts in an engine: promise 2, the ledger's experts, and what they don't go with.

Which experts a batch reads depends on all its tokens; what a token gets, on itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, LoRARequest, SamplingParams
from penstock.errors import ConfigError, UnsupportedModelError
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.roofline.ledger import StepRecord

from ..exactness import bits
from ..lora_files import write_adapter
from ..models.tiny import Tiny, make_tiny
from .test_engine_bits import GREEDY, Key, assert_same, engine_on, named, run

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")

LENGTHS = [200, 1, 33, 64, 5, 100, 40, 129]
PROMPTS = named([bits.prompt(length, 7 + i) for i, length in enumerate(LENGTHS)])


FORMS = [f"{name}{bits.MIXED}" for name in ("bfloat16", "w8a8", "w4a8")]
FORMS += [f"{name}{bits.LATENT}" for name in ("bfloat16", "w4a8")]


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return bits.build(torch.bfloat16, str(request.param))


@pytest.fixture(scope="module")
def alone(model: Decoder) -> dict[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for name, prompt in PROMPTS.items():
        engine = engine_on(model, max_num_seqs=1, enable_prefix_caching=False)
        found |= run(engine, {name: prompt}, GREEDY)[0]
    return found


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 40},
    "by two": {"max_num_seqs": 2},
    "giving way": {"num_blocks": 24},
    "ngram": {"speculative_config": {"method": "ngram", "adaptive": False}},
    "self": {"speculative_config": {"method": "self", "adaptive": False}},
}


@pytest.mark.parametrize("way", WAYS)
@needs_native
def test_a_sequence_is_its_own(model: Decoder, alone: dict[Key, Tensor], way: str) -> None:
    options = dict(WAYS[way])
    engine = engine_on(model, options.pop("num_blocks", 160), **options)
    got, _ = run(engine, PROMPTS, GREEDY)
    if "speculative_config" in WAYS[way]:
        got = {key: row for key, row in got.items() if key in alone}
    assert_same(got, alone)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("mixtral", tmp_path_factory.mktemp("mixtral"))


def llm_of(tiny: Tiny, **options: Any) -> LLM:
    chosen = {"max_model_len": tiny.case.max_len, "num_blocks": 24, "max_num_seqs": 8}
    return LLM(tiny.folder, skip_tokenizer_init=True, **chosen | options)


def steps_of(llm: LLM, prompts: list[list[int]], new: int = 4) -> list[StepRecord]:
    records: list[StepRecord] = []
    llm.engine.ledger.watch = records.append
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return records


@needs_native
def test_the_ledger_counts_the_experts_that_were_read(mixtral: Tiny) -> None:
    """Of one token those that it chose; of a prompt no more than there are, as the routers say."""
    experts = mixtral.load().spec.decoder.layers[0].mlp.experts
    assert experts is not None
    layers, chosen = 3, experts.per_token
    prompt = mixtral.prompt[:40].tolist()
    first, *decode = steps_of(llm_of(mixtral), [prompt])
    assert {record.size.experts for record in decode} == {layers * chosen}
    seen: list[set[int]] = []

    def watch(module: Any, args: Any, output: Any) -> None:
        seen.append(set(output[-1].flatten().tolist()))  # what it has chosen

    hooks = [layer.mlp.gate.register_forward_hook(watch) for layer in mixtral.oracle.model.layers]
    mixtral.expect(torch.tensor(prompt))
    for hook in hooks:
        hook.remove()
    assert first.size.experts == sum(map(len, seen))
    assert layers * chosen < first.size.experts <= layers * experts.count
    together = steps_of(llm_of(mixtral), [prompt, prompt[:7], prompt[3:21]])[-1]
    assert layers * chosen <= together.size.experts <= 3 * layers * chosen
    assert together.cost.weight_bytes >= decode[-1].cost.weight_bytes
    [eager, *_] = steps_of(llm_of(mixtral, enforce_eager=True), [prompt])
    assert eager.size.experts == 0  # nobody counts: the floor takes as few as could be
    assert eager.cost.weight_bytes < first.cost.weight_bytes


@needs_native
def test_what_is_computed_again_is_predicted_from_as_many_experts(mixtral: Tiny) -> None:
    """As many as tokens would choose that choose at random, not as few as there could be."""
    costs = llm_of(mixtral).engine.ledger.costs
    assert costs.expected_experts(0) == 0
    assert costs.expected_experts(1) == 3 * 2
    assert costs.expected_experts(2) == round(3 * (2 + 2 * 4 / 6))
    assert costs.expected_experts(1000) == 3 * 6


def test_adapters_of_attention_alone(mixtral: Tiny, tmp_path: Path) -> None:
    base = "model.layers.0.self_attn.q_proj"
    write_adapter(tmp_path / "q", [(base, (96, 64))], 4, 1, 3.0)
    expert = "model.layers.0.block_sparse_moe.experts.3.w2"
    write_adapter(tmp_path / "e", [(base, (96, 64)), (expert, (64, 100))], 4, 1)
    llm = llm_of(mixtral, enable_lora=True)
    llm.load_lora("q", tmp_path / "q")
    prompt = {"prompt_token_ids": mixtral.prompt[:30].tolist()}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    request = LoRARequest("q", 1, str(tmp_path / "q"))
    bare, changed = llm.generate([prompt, prompt], params, lora_request=[None, request])
    plain = llm_of(mixtral).generate([prompt], params)[0]
    assert bare.outputs[0].logprobs == plain.outputs[0].logprobs
    assert changed.outputs[0].logprobs != bare.outputs[0].logprobs
    with pytest.raises(UnsupportedModelError, match=r"w2\.weight: matrices of experts.*merge"):
        llm.load_lora("e", tmp_path / "e")


def test_a_gpu_is_refused_as_for_any_model(mixtral: Tiny) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="cuda"):
        llm_of(mixtral, device="cuda")
