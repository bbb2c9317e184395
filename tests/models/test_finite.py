"""Where numbers that aren't finite come from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.errors import ModelOutputError, WeightsError
from penstock.models.hub import resolve
from penstock.models.load import load_model
from penstock.models.weights import sources_of
from penstock.pipeline.build import BuildOptions, build

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def damaged(folder: Path, name: str, value: float) -> Path:
    """The embedded model with one value of a tensor changed."""
    shutil.copytree(resolve("stories"), folder)
    file = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[name].view(-1)[7] = value
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "model.layers.2.self_attn.k_proj.weight",
            r"1 of \d+ .*q_proj\.weight, model\.layers\.2.*k_proj",
        ),
        ("model.layers.1.mlp.down_proj.weight", r"of model\.layers\.1\.mlp\.down_proj\.weight are"),
        ("model.norm.weight", r"1 of 256 values of model\.norm\.weight are NaN"),
        ("model.embed_tokens.weight", r"of model\.embed_tokens\.weight are NaN or infinite"),
    ],
)
def test_a_request_is_told_which_tensor(tmp_path: Path, name: str, told: str) -> None:
    llm = LLM(damaged(tmp_path / "m", name, float("nan")), max_num_seqs=2)
    prompt = {"prompt_token_ids": [0, 1, 2]}
    for output in llm.generate([prompt, prompt], ONE):
        assert output.outputs[0].finish_reason == "error"
        with pytest.raises(ModelOutputError, match=rf"logits hold a NaN.* {told}"):
            raise output.error or AssertionError("no error")


def test_where_no_weight_is_to_blame(tmp_path: Path) -> None:
    """Numbers that are finite and too large for what comes of them."""
    llm = LLM(damaged(tmp_path / "m", "model.norm.weight", 3e38))
    llm.runtime.model.model.get_parameter("norm.weight").fill_(3e38)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], ONE)
    with pytest.raises(ModelOutputError, match=r"weights are all finite.*dtype float32"):
        raise output.error or AssertionError("no error")


def test_a_build_names_the_checkpoints_tensor(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    model = damaged(tmp_path / "m", name, float("inf"))
    with pytest.raises(WeightsError, match=rf"q_proj\.weight, {name}, .*1 of \d+ values"):
        build(BuildOptions(model, tmp_path / "engine"))
    assert not (tmp_path / "engine").exists()


def test_parameters_come_from_tensors() -> None:
    spec = load_model(resolve("stories")).spec
    for parameter in ("layers.3.attention.qkv.weight", "layers.3.mlp.up.weight", "head.weight"):
        assert sources_of(parameter, spec)
    assert sources_of("head.weight", spec) == ("model.embed_tokens.weight",)
    assert sources_of("layers.3.attention.qkv.scale", spec) == ()
