"""Checkpoints of models that attend over latents: as they are published, adapted, and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora_files import write_adapter
from tiny import Make, Sequence, Tiny
from torch import Tensor, nn

from penstock import LLM, LoRARequest, SamplingParams
from penstock.errors import ConfigError, UnsupportedModelError, WeightsError
from penstock.kernels import native
from penstock.models.load import load_model
from penstock.models.sources import open_source
from penstock.pipeline.parts import Parts

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")


def changed(
    tiny: Tiny, folder: Path, tensors: dict[str, Tensor] | None = None, **keys: Any
) -> Path:
    """A copy of a checkpoint with these tensors instead, and other keys."""
    shutil.copytree(tiny.folder, folder)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights(tiny: Tiny) -> dict[str, Tensor]:
    return load_file(tiny.folder / "model.safetensors")


def logits(folder: Path, tiny: Tiny, dtype: str = "float32") -> Tensor:
    loaded = load_model(folder, dtype=dtype, max_model_len=tiny.case.max_len)
    return Sequence(loaded.model).feed(tiny.prompt)


def is_matrix(name: str, tensor: Tensor) -> bool:
    apart = ("embed_tokens", "lm_head", "mlp.gate.")
    return tensor.dim() == 2 and not any(part in name for part in apart)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2", "glm4-moe-lite"])
def test_fp8_in_blocks_as_deepseek_publishes_it(tiny: Make, tmp_path: Path, name: str) -> None:
    """`kv_b_proj` too, which is widened: its rows don't stay together. Rows of activations are
    rounded as well, so that single tokens may go to other experts."""
    case = tiny(name)
    coded: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in weights(case).items():
        plain[key] = coded[key] = tensor
        if is_matrix(key, tensor):
            scale = (tensor.abs().amax() / 448).view(1, 1)
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            coded |= {key: codes, f"{key}_scale_inv": scale}
            plain[key] = codes.float() * scale
    method = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    folder = changed(case, tmp_path / "fp8", coded, quantization_config=method)
    model = load_model(folder, max_model_len=case.case.max_len).model
    assert model.get_submodule("layers.0.attention.out").weight_format.name == "fp8-w8a8-block"
    near = logits(changed(case, tmp_path / "plain", plain), case).log_softmax(-1)
    found = Sequence(model).feed(case.prompt).log_softmax(-1)
    assert (near.exp() * (near - found)).sum(-1).median() < 0.05
    other = load_model(tmp_path / "plain", dtype="bfloat16", max_model_len=32).model
    for part in ("key_up", "value_up"):
        at = f"layers.1.attention.heads.{part}"
        assert torch.equal(model.get_parameter(at), other.get_parameter(at))


def test_layers_that_guess_are_left_out(tiny: Make, tmp_path: Path) -> None:
    case = tiny("deepseek-v3")
    more = {
        key.replace("layers.2.", "layers.3."): tensor.clone()
        for key, tensor in weights(case).items()
        if "layers.2." in key
    }
    more["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    folder = changed(case, tmp_path / "more", weights(case) | more, num_nextn_predict_layers=1)
    assert torch.equal(logits(folder, case), logits(case.folder, case))
    folder = changed(case, tmp_path / "none", weights(case) | more, num_nextn_predict_layers=0)
    with pytest.raises(WeightsError, match="have no place"):
        logits(folder, case)
    folder = changed(case, tmp_path / "wrong", num_nextn_predict_layers=-1)
    with pytest.raises(UnsupportedModelError, match="num_nextn_predict_layers can't be -1"):
        logits(folder, case)


def test_experts_in_one_tensor(tiny: Make, tmp_path: Path) -> None:
    """As transformers has them in memory."""
    case = tiny("deepseek-v3")
    tensors = weights(case)
    for i in (1, 2):
        at = f"model.layers.{i}.mlp.experts"
        gates, ups, downs = (
            [tensors.pop(f"{at}.{e}.{part}_proj.weight") for e in range(12)]
            for part in ("gate", "up", "down")
        )
        joined = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        tensors |= {
            f"{at}.gate_up_proj": torch.stack(joined),
            f"{at}.down_proj": torch.stack(downs),
        }
    found = logits(changed(case, tmp_path / "joined", tensors), case)
    assert torch.equal(found, logits(case.folder, case))
    with pytest.raises(WeightsError, match=r"holds 12 experts, but config\.json says 8"):
        logits(changed(case, tmp_path / "fewer", tensors, n_routed_experts=8), case)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("deepseek-v3", {"topk_group": 5}, "can't be chosen from topk_group 5 of n_group 4"),
        ("deepseek-v3", {"n_group": 5}, "n_group 5 groups of 12 experts"),
        ("deepseek-v3", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 can't be chosen"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "heads that share keys aren't built"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek-v3", {"first_k_dense_replace": 1.5}, "must be a whole number from 0 on: 1.5"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "must be a whole number from 0 on: -1"),
        ("deepseek-v3", {"v_head_dim": 10**15}, "its values of all heads are"),
        ("deepseek-v3", {"q_lora_rank": 10**13}, "its values of compressed queries are"),
        ("deepseek-v3", {"n_shared_experts": 10**12}, "matrices of shared experts are"),
        ("deepseek-v3", {"routed_scaling_factor": 1e39}, "its scale of experts' weights is"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek-v2", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
        (
            "glm4-moe-lite",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types must name 3 layers, not 1",
        ),
        ("glm4-moe-lite", {"routed_scaling_factor": -1.0}, "routed_scaling_factor must be above 0"),
    ],
)
def test_what_is_refused(
    tiny: Make, tmp_path: Path, name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(changed(tiny(name), tmp_path / "x", **keys), max_model_len=32)


def test_a_latent_of_another_size(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"attention\.kv\.weight needs shape"):
        load_model(changed(tiny("deepseek-v2"), tmp_path / "x", kv_lora_rank=48), max_model_len=32)


@pytest.mark.parametrize("stored", ["fp8", "int8", "int4", "kivi"])
def test_caches_of_fewer_bytes_are_refused(tiny: Make, stored: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{stored}' isn't built for .*latents"):
        LLM(tiny("deepseek-v2").folder, skip_tokenizer_init=True, dtype="bfloat16",
            kv_cache_dtype=stored)  # fmt: skip


def test_methods_that_are_fitted_are_refused(tiny: Make) -> None:
    with pytest.raises(UnsupportedModelError, match=r"latents .*, which GPTQ isn't built for"):
        Parts.of(open_source(tiny("deepseek-v2").folder)).check_dense("GPTQ")


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
@needs_native
def test_adapters(tiny: Make, tmp_path: Path, name: str) -> None:
    """As merged in transformers; that of the heads' matrices is refused."""
    case = tiny(name)
    linears = {
        at: module
        for at, module in case.oracle.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in at and "kv_b_proj" not in at
    }
    shapes = [(at, tuple(linear.weight.shape)) for at, linear in linears.items()]
    change = write_adapter(tmp_path / "lora", shapes, rank=5, scale=0.4)
    llm = LLM(
        case.folder, dtype="float32", max_model_len=case.case.max_len, skip_tokenizer_init=True,
        enable_lora=True,
    )  # fmt: skip
    prompt = case.prompt.tolist()
    asked = [LoRARequest("x", 1, tmp_path / "lora"), None]
    outputs = llm.generate([prompt] * 2, GREEDY, lora_request=asked)
    for output, changes in zip(outputs, (change, {}), strict=True):
        before = {at: linears[at].weight.clone() for at in changes}
        with torch.inference_mode():
            for at, product in changes.items():
                linears[at].weight.add_(product)
            want = case.oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
            for at, weight in before.items():
                linears[at].weight.copy_(weight)
        assert output.prompt_logprobs is not None
        for at, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            found = entry[prompt[at + 1]].logprob
            assert abs(found - want[at, prompt[at + 1]].item()) < 2e-4
    heads = "model.layers.1.self_attn.kv_b_proj"
    write_adapter(tmp_path / "heads", [(heads, (4 * (12 + 18), 40))])
    with pytest.raises(
        UnsupportedModelError, match=r"kv_b_proj.*heads over latents are changed by merging alone"
    ):
        llm.load_lora("y", tmp_path / "heads")
