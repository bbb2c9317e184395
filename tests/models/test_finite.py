"""Where numbers that aren't finite come from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import Make

from penstock import LLM, SamplingParams
from penstock.errors import ModelOutputError, WeightsError
from penstock.models.finite import why_not_finite
from penstock.models.hub import resolve
from penstock.models.load import load_model
from penstock.parallel import Part
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
    with pytest.raises(WeightsError, match=rf"^{name}: 1 of \d+ values"):
        build(BuildOptions(model, tmp_path / "engine"))
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("lfm2", "model.layers.1.self_attn.out_proj.weight"),
        ("lfm2-moe", "model.layers.1.feed_forward.experts.2.w3.weight"),
        ("lfm2-moe", "model.layers.1.feed_forward.experts.5.w2.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("deepseek-v3", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
    ],
)
def test_names_are_the_checkpoints(tiny: Make, tmp_path: Path, family: str, tensor: str) -> None:
    """Of a request's error, among those that a matrix is made of; of a build's, that one."""
    folder = Path(shutil.copytree(tiny(family).folder, tmp_path / "m"))
    file = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    tensors[tensor].fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, num_blocks=8)
    (output,) = llm.generate([{"prompt_token_ids": list(range(3, 60))}], ONE)
    told = re.search("values of (.*) are NaN", str(output.error))
    assert told is not None
    names = told[1].split(", ")
    assert tensor in names and names == [name for name in names if name in tensors]
    with pytest.raises(WeightsError, match=rf"^{re.escape(tensor)}: "):
        build(BuildOptions(folder, tmp_path / "engine", max_model_len=64))


def test_ranks_speak_of_their_own(tmp_path: Path) -> None:
    model = resolve("stories")
    ours = load_model(model, ranks=None)
    said = why_not_finite(ours.model, ours.tensors)
    assert said.startswith("Its weights are all finite")
    ours.model.layers[0].mlp.down.part = Part((range(4),), 8)  # type: ignore[union-attr]
    assert why_not_finite(ours.model, ours.tensors).startswith("Of its weights those that this")
