"""Models that see from two GGUF files: the checkpoint's prompts, rows of pictures and tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from mmproj_writing import KINDS, TOKENS, whole, write_language, write_mmproj, write_pair
from safetensors.torch import load_file, save_file
from tests.models.seeing import (
    SeeingModel,
    make_gemma3,
    make_idefics3,
    make_internvl,
    make_lfm2,
    make_llava,
    make_qwen,
    make_qwen3,
    make_qwen3_5,
    picture,
)
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.errors import (
    ConfigError,
    InvalidPromptError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from penstock.pipeline.build import BuildOptions, build
from penstock.runtime.device import device_of
from penstock.runtime.footprint import footprint

MAKERS: dict[str, Callable[[Path], SeeingModel]] = {
    "idefics3": make_idefics3,
    "smolvlm": lambda folder: make_idefics3(folder, smol=True),
    "llava": make_llava,
    "llava-siglip": lambda folder: make_llava(folder, tower="siglip", vision_feature_layer=-1),
    "qwen2-vl": lambda folder: make_qwen(folder, older=True),
    "qwen2.5-vl": make_qwen,
    "qwen3-vl": make_qwen3,
    "qwen3.5": make_qwen3_5,
    "qwen3.5-moe": lambda folder: make_qwen3_5(folder, mixed=True),
    "internvl": make_internvl,
    "internvl-3.5": lambda folder: make_internvl(folder, text="Qwen3"),
    "internvl-llama": lambda folder: make_internvl(folder, text="Llama"),
    "lfm2-vl": make_lfm2,
    "gemma3": make_gemma3,
    "gemma3-wide-windows": lambda folder: make_gemma3(folder, window=300, tokens=4),
    "lfm2-vl-moe": lambda folder: make_lfm2(folder, mixed=True, normed=False),
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def token_of(made: SeeingModel) -> str:
    return TOKENS[KINDS[made.reference.config.model_type]]


def as_cut_by_a_file(made: SeeingModel) -> None:
    """The checkpoint's processor with what a projector's file, or llama.cpp, says of pictures."""
    file = made.folder / "preprocessor_config.json"
    own = json.loads(file.read_text())
    kind = KINDS[made.reference.config.model_type]
    if kind == "mlp":
        own["do_pad"] = True
        if own["image_processor_type"] == "SiglipImageProcessor":
            own["image_mean"] = own["image_std"] = [0.5] * 3
    if "merger" in kind:
        unit = (made.reference.config.vision_config.patch_size * 2) ** 2
        own["size"] = {"shortest_edge": 8 * unit, "longest_edge": 4096 * unit}
    if kind == "lfm2":
        own = {key: own[key] for key in ("image_processor_type", "encoder_patch_size")}
    file.write_text(json.dumps(own))


def as_checkpoint(made: SeeingModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """The same model with these tensors."""
    shutil.copytree(made.folder, folder)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")


def seen(llm: LLM, token: str) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """(prompt, continuation, rows of two pictures)."""
    images = [picture(200, 90, 1), picture(50, 150, 2)]
    text = "Look: <image> and <image>! What?".replace("<image>", token)
    given: Any = {"prompt": text, "multi_modal_data": {"image": images}}
    (output,) = llm.generate(given, GREEDY)
    sight = llm.runtime.sight
    assert sight is not None and output.prompt_token_ids is not None
    rows = [sight.rows_of(sight.pictures.cutter.cut(image)) for image in images]
    return output.prompt_token_ids, output.outputs[0].token_ids, rows


def check_same(files: LLM, token: str, folder: LLM) -> None:
    (prompt, tokens, rows), (wanted_prompt, wanted, wanted_rows) = (
        seen(files, token),
        seen(folder, "<image>"),
    )
    assert prompt == wanted_prompt
    assert all(torch.equal(a, b) for a, b in zip(rows, wanted_rows, strict=True))
    assert tokens == wanted


@pytest.mark.parametrize("name", MAKERS)
def test_files_in_float32_are_the_checkpoint(name: str, tmp_path: Path) -> None:
    made = MAKERS[name](tmp_path / "hf")
    as_cut_by_a_file(made)
    model, mmproj, back = write_pair(made, tmp_path, whole(Kind.F32))
    files = LLM(str(model), mmproj=str(mmproj), dtype="float32", strict=True)
    folder = tmp_path / "back" if name.startswith("gemma") else made.folder  # 1 is added to norms
    as_checkpoint(made, back, tmp_path / "back")
    check_same(files, token_of(made), LLM(str(folder), dtype="float32"))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0])
@pytest.mark.parametrize("name", ["idefics3", "qwen2.5-vl", "internvl"])
def test_other_types(name: str, kind: Kind, tmp_path: Path) -> None:
    """Of a checkpoint of the same values."""
    made = MAKERS[name](tmp_path / "hf")
    as_cut_by_a_file(made)
    model, mmproj, back = write_pair(made, tmp_path, whole(kind))
    as_checkpoint(made, back, tmp_path / "back")
    files = LLM(str(model), mmproj=str(mmproj), dtype="float32")
    check_same(files, token_of(made), LLM(str(tmp_path / "back"), dtype="float32"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_idefics3(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def written(made: SeeingModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model, mmproj, _ = write_pair(made, tmp_path_factory.mktemp("pair"), whole(Kind.F32))
    return model, mmproj


@pytest.fixture
def pair(written: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Files of a test's own."""
    model, mmproj = (Path(shutil.copy(file, tmp_path)) for file in written)
    return model, mmproj


def load(model: Path, mmproj: Any = None) -> LLM:
    return LLM(str(model), mmproj=mmproj, dtype="float32")


def text_of(llm: LLM) -> list[int]:
    return llm.generate("Look: what?", GREEDY)[0].outputs[0].token_ids


def test_found_in_the_folder(
    pair: tuple[Path, Path], made: SeeingModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the file is given or its folder; texts are the same without it."""
    model, mmproj = pair
    caplog.set_level("INFO", "penstock")
    wanted = LLM(str(made.folder), dtype="float32")
    check_same(load(model), "<image>", wanted)
    assert "Pictures are read by mmproj-model.gguf, found beside model.gguf" in caplog.text
    folder = load(model.parent)
    assert folder.runtime.sight is not None and text_of(folder) == text_of(wanted)
    blind = load(model, False)
    assert blind.runtime.sight is None and text_of(blind) == text_of(wanted)
    with pytest.raises(InvalidPromptError, match="This model sees no pictures"):
        seen(blind, "<image>")
    mmproj.rename(model.parent / "eyes.gguf")
    assert load(model).runtime.sight is None
    assert load(model, model.parent / "eyes.gguf").runtime.sight is not None


def test_several_in_the_folder(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    model, mmproj = pair
    shutil.copy(mmproj, model.parent / "mmproj-other.gguf")
    assert load(model).runtime.sight is None
    assert "2 projectors of pictures lie beside model.gguf" in caplog.text
    assert load(model, mmproj).runtime.sight is not None


def test_one_in_the_folder_that_does_not_fit(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture, tmp_path_factory: Any
) -> None:
    """The model runs as it would without."""
    model, mmproj = pair
    other = make_qwen(tmp_path_factory.mktemp("other"))
    write_mmproj(other, mmproj, whole(Kind.F32))
    assert load(model).runtime.sight is None
    assert "isn't taken, so it sees no pictures" in caplog.text
    assert "'qwen2.5vl_merger', for models of qwen2vl, but" in caplog.text
    with pytest.raises(UnsupportedModelError, match="They belong to different models"):
        load(model, mmproj)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({"clip.projector_type": None}, "doesn't say which type of projector it is"),
    "an unbuilt type": (
        {"clip.projector_type": "kimivl"},
        "of the type 'kimivl', which isn't built. Built: idefics3, mlp, .*give the model's safet",
    ),
    "what hears": (
        {
            "clip.has_vision_encoder": None,
            "clip.has_audio_encoder": True,
            "clip.projector_type": "ultravox",
        },
        r"a projector \(ultravox\) that hears, which isn't built",
    ),
    "what hears, too": ({"clip.has_audio_encoder": True}, "that hears as well"),
    "no sizes": ({"clip.vision.embedding_length": None}, "has no clip.vision.embedding_length"),
    "no scale": (
        {"clip.vision.projector.scale_factor": None},
        "has no clip.vision.projector.scale_factor, which",
    ),
    "no means": ({"clip.vision.image_mean": None}, "image_mean must be three numbers"),
    "two means": ({"clip.vision.image_std": [0.5, 0.5]}, "image_std must be three numbers"),
    "a text": ({"clip.vision.patch_size": "a"}, "patch_size must be a whole number"),
    "nothing": ({"clip.vision.attention.head_count": 0}, "num_attention_heads must be a positive"),
    "no patches": ({"clip.vision.patch_size": 0}, "patch_size must be a positive integer"),
    "uneven": ({"clip.vision.attention.head_count": 7}, "isn't a multiple of num_attention_heads"),
    "both": ({"clip.use_silu": True}, "clip.use_silu must be false beside clip.use_gelu"),
    "silu": (
        {"clip.use_gelu": False, "clip.use_silu": True},
        "hidden_act='silu'; built for this family",
    ),
    "a billion layers": ({"clip.vision.block_count": 1 << 30}, "block_count must be at most"),
    "fewer layers": ({"clip.vision.block_count": 2}, "tensors have no place in 'idefics3'"),
    "more layers": ({"clip.vision.block_count": 4}, "lacks 12 of the tensors of 'idefics3'"),
    "other patches": ({"clip.vision.patch_size": 28}, "vision.* needs shape"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_metadata_is_named(name: str, made: SeeingModel, pair: tuple[Path, Path]) -> None:
    changes, said = CHANGES[name]
    model, mmproj = pair
    write_mmproj(made, mmproj, whole(Kind.F32), **changes)
    with pytest.raises(ModelError, match=said):
        load(model, mmproj)


def test_a_key_that_nothing_reads(made: SeeingModel, pair: tuple[Path, Path]) -> None:
    model, mmproj = pair
    write_mmproj(made, mmproj, whole(Kind.F32), **{"clip.vision.zoom": 3})
    with pytest.warns(UserWarning, match="keys that nothing reads: clip.vision.zoom"):
        load(model, mmproj)


def test_files_that_are_no_pair(
    made: SeeingModel, pair: tuple[Path, Path], tmp_path_factory: Any
) -> None:
    model, mmproj = pair
    with pytest.raises(UnsupportedModelError, match="is a projector of pictures, no model"):
        load(mmproj)
    with pytest.raises(ConfigError, match="given as the model and as its mmproj"):
        load(model, model)
    other = shutil.copy(model, model.parent / "other.gguf")
    with pytest.raises(UnsupportedModelError, match="architecture 'llama', no projector"):
        load(model, other)
    with pytest.raises(ModelNotFoundError, match="no such GGUF file"):
        load(model, model.parent / "none.gguf")
    with pytest.raises(ConfigError, match="goes with a language model in GGUF"):
        load(made.folder, mmproj)
    for wrong in (True, 5, ""):
        with pytest.raises(ConfigError, match="mmproj"):
            load(model, wrong)


def test_a_file_that_was_cut_off(pair: tuple[Path, Path]) -> None:
    model, mmproj = pair
    whole_file = mmproj.read_bytes()
    for length in (0, 3, 40, 900, len(whole_file) // 2, len(whole_file) - 5):
        mmproj.write_bytes(whole_file[:length])
        with pytest.raises(ModelError):
            load(model, mmproj)


def test_rows_of_another_width(pair: tuple[Path, Path], tmp_path_factory: Any) -> None:
    """Both numbers are said."""
    model, mmproj = pair
    wide = make_idefics3(tmp_path_factory.mktemp("wide"))
    tensors = load_file(wide.folder / "model.safetensors")
    name = "model.connector.modality_projection.proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:16]])
    save_file(tensors, wide.folder / "model.safetensors")
    write_mmproj(wide, mmproj, whole(Kind.F32))
    said = "rows of 80 values .mm.model.fc., but .*model.gguf has an embedding of 64"
    with pytest.raises(UnsupportedModelError, match=said):
        load(model, mmproj)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("v.patch_embd.weight.1", "has v.patch_embd.weight, but lacks v.patch_embd.weight.1"),
        ("v.blk.1.attn_k.weight", "but not the keys' and the values' beside it"),
        ("v.blk.0.ffn_up.weight", "lacks v.blk.0.ffn_up.weight"),
        ("mm.2.weight", "lacks mm.2.weight"),
        ("v.post_ln.weight", "lacks 1 of the tensors .*visual.merger.ln_q"),
    ],
)
def test_tensors_that_are_missing(lacks: str, said: str, tmp_path: Path) -> None:
    made = make_qwen(tmp_path / "hf")
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    write_language(made, model, whole(Kind.F32))
    write_mmproj(made, mmproj, whole(Kind.F32), left_out=lacks)
    with pytest.raises(ModelError, match=said):
        load(model, mmproj)


def test_names_of_later_converters(tmp_path: Path) -> None:
    """LLaVA's matrices by their own names, not by each other's."""
    made = make_llava(tmp_path / "hf")
    as_cut_by_a_file(made)
    model, mmproj, _ = write_pair(made, tmp_path, whole(Kind.F32), swapped=False)
    check_same(load(model, mmproj), "<image>", LLM(str(made.folder), dtype="float32"))


def test_tokens_that_stand_for_pictures(tmp_path: Path) -> None:
    """Most files of LLaVA's have none of their own; others are no pair with a projector."""
    made = make_llava(tmp_path / "hf")
    as_cut_by_a_file(made)
    model, mmproj, _ = write_pair(made, tmp_path, whole(Kind.F32))
    write_language(made, model, whole(Kind.F32), "<unk>")
    check_same(load(model, mmproj), "<unk>", LLM(str(made.folder), dtype="float32"))
    write_language(made, model, whole(Kind.F32), "<other>")
    with pytest.raises(UnsupportedModelError, match="has no token '<image>', by which pictures"):
        load(model, mmproj)


def test_llava_1_6_is_refused(tmp_path: Path) -> None:
    made = make_llava(tmp_path / "hf")
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    write_language(made, model, whole(Kind.F32))
    write_mmproj(made, mmproj, whole(Kind.F32), **{"clip.vision.image_grid_pinpoints": [336, 672]})
    with pytest.raises(UnsupportedModelError, match=r"is of a LLaVA 1\.6"):
        load(model, mmproj)
    write_mmproj(made, mmproj, whole(Kind.F32), **{"clip.vision.feature_layer": [1, 2]})
    with pytest.raises(UnsupportedModelError, match="feature_layer must be one layer"):
        load(model, mmproj)


def test_deep_layers_that_disagree(tmp_path: Path) -> None:
    made = make_qwen3(tmp_path / "hf")
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    write_language(made, model, whole(Kind.F32))
    flags = [True, False, False, False]
    write_mmproj(made, mmproj, whole(Kind.F32), **{"clip.vision.is_deepstack_layers": flags})
    with pytest.raises(UnsupportedModelError, match=r"the first 1 layers .* takes them for 2"):
        load(model, mmproj)


@pytest.mark.parametrize("maker", [make_qwen, make_qwen3])
def test_language_models_by_themselves(
    maker: Callable[[Path], SeeingModel], tmp_path: Path
) -> None:
    made = maker(tmp_path / "hf")
    write_language(made, tmp_path / "model.gguf", whole(Kind.F32))
    assert text_of(load(tmp_path / "model.gguf")) == text_of(LLM(str(made.folder), dtype="float32"))


def test_a_quantized_pair(
    made: SeeingModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The language model stays so; the tower's values are those of a checkpoint with them."""
    model, _, back = write_pair(made, tmp_path, whole(Kind.Q8_0))
    as_checkpoint(made, back, tmp_path / "back")
    files, folder = LLM(str(model)), LLM(str(tmp_path / "back"), dtype="bfloat16")
    assert "mmproj-model.gguf" in caplog.text and "Q8_0) are widened" in caplog.text
    assert files.runtime.model.model.formats.matrix.name == "w8a8-g32-blocks"
    (prompt, _, rows), (wanted_prompt, _, wanted_rows) = (
        seen(llm, "<image>") for llm in (files, folder)
    )
    assert prompt == wanted_prompt
    assert all(torch.equal(a, b) for a, b in zip(rows, wanted_rows, strict=True))


def test_a_chat(made: SeeingModel, pair: tuple[Path, Path]) -> None:
    """By the language model's own template."""
    said: Any = [{"role": "user", "content": [{"type": "image", "image": picture(90, 60)}, "Hm?"]}]
    got, want = (
        llm.chat(said, GREEDY)[0] for llm in (load(*pair), LLM(str(made.folder), dtype="float32"))
    )
    assert got.prompt_token_ids == want.prompt_token_ids
    assert got.outputs[0].token_ids == want.outputs[0].token_ids


def test_an_engine(made: SeeingModel, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Built of both, it is by itself; of the language model alone it reads texts."""
    model, mmproj = pair
    options: Any = {"model": model, "dtype": "float32", "max_num_seqs": 2, "profile": (1, 32, 64)}
    build(BuildOptions(output=tmp_path / "engine", **options))
    engine = LLM(str(tmp_path / "engine"))
    check_same(engine, "<image>", LLM(str(made.folder), dtype="float32"))
    with pytest.raises(ConfigError, match="was built with what it sees through, or without"):
        LLM(str(tmp_path / "engine"), mmproj=str(mmproj))
    with pytest.raises(UnsupportedModelError, match="sees pictures, and a compiled package"):
        build(BuildOptions(output=tmp_path / "other", forward="package", **options))
    again = BuildOptions(output=tmp_path / "blind", mmproj=False, **options)
    build(again)
    assert LLM(str(tmp_path / "blind")).runtime.sight is None
    assert "--no-mmproj" in again.command


def test_a_footprint(pair: tuple[Path, Path]) -> None:
    """With the tower's weights, and what it takes."""
    model, mmproj = pair
    seeing, blind = (
        footprint(EngineConfig.of(model=model, mmproj=each), device_of("cpu"))
        for each in (mmproj, False)
    )
    assert seeing.weights > blind.weights and seeing.workspace > blind.workspace


def test_what_does_not_go_with_pictures(pair: tuple[Path, Path], made: SeeingModel) -> None:
    """Where the projector was found, a run that went without it is told how it goes on."""
    model, _ = pair
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    options: Any = {"dtype": "float32", "speculative_config": draft}
    with pytest.raises(
        ConfigError, match=r"sees no pictures.* Or leave its pictures out by mmproj"
    ):
        LLM(str(model), **options)
    blind = LLM(str(model), mmproj=False, **options)
    assert text_of(blind) == text_of(LLM(str(made.folder), dtype="float32"))


def test_the_command_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What is found is told."""
    model, mmproj = pair
    image = tmp_path / "cat.png"
    picture(120, 60, 1).save(image)
    asked = ["-p", "What?", "--image", image, "--temperature", 0, "--max-tokens", 6]

    def run(*more: Any) -> Any:
        words = ["generate", model, *asked, "--dtype", "float32", *more]
        return CliRunner().invoke(app, list(map(str, words)))

    found = run()
    assert found.exit_code == 0, found.stderr
    assert "pictures are read by mmproj-model.gguf, found beside it" in found.stderr
    given: Any = {"prompt": "<image>What?", "multi_modal_data": {"image": image}}
    params = SamplingParams(temperature=0, max_tokens=6)
    (output,) = load(model).generate(given, params)
    assert found.stdout.rstrip("\n") == output.outputs[0].text.rstrip("\n")
    said = run("--mmproj", mmproj)
    assert said.stdout == found.stdout and "found beside" not in said.stderr
    blind = run("--no-mmproj")
    assert blind.exit_code == 1 and "This model sees no pictures" in blind.stderr
    both = run("--no-mmproj", "--mmproj", mmproj)
    assert both.exit_code and "Leave one" in both.stderr
