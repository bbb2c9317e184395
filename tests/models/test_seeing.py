"""Models that see, against transformers: rows of pictures, prompts, what is generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.published_states import PUBLISHED_STATES
from tests.models.seeing import (
    IMAGE,
    SeeingModel,
    make_idefics3,
    make_internvl,
    make_lfm2,
    make_llava,
    make_qwen,
    make_qwen3,
    make_qwen3_5,
    picture,
)

from penstock import LLM, SamplingParams
from penstock.cache import PagedLayout
from penstock.errors import InvalidPromptError, UnsupportedModelError, WeightsError
from penstock.models.load import load_model
from penstock.models.registry import read_spec, spec_of
from penstock.nn.spec import GridSpec

MAKERS: dict[str, Callable[[Path], SeeingModel]] = {
    "idefics3": make_idefics3,
    "idefics3-whole": lambda folder: make_idefics3(folder, splits=False),
    "smolvlm": lambda folder: make_idefics3(folder, smol=True),
    "smolvlm-uneven": lambda folder: make_idefics3(folder, smol=True, pixels=60),
    "llava": make_llava,
    "llava-siglip": lambda folder: make_llava(folder, tower="siglip"),
    "llava-uneven": lambda folder: make_llava(folder, tower="siglip", pixels=60),
    "llava-keeps-class": lambda folder: make_llava(
        folder, vision_feature_select_strategy="full", vision_feature_layer=2
    ),
    "llava-last-layer": lambda folder: make_llava(folder, vision_feature_layer=-1),
    "qwen2.5-vl": make_qwen,
    "qwen2.5-vl-published": lambda folder: make_qwen(folder, published=True),
    "qwen2-vl": lambda folder: make_qwen(folder, older=True),
    "qwen3-vl": make_qwen3,
    "qwen3.5": make_qwen3_5,
    "qwen3.5-moe": lambda folder: make_qwen3_5(folder, mixed=True),
    "internvl": make_internvl,
    "internvl-normed": lambda folder: make_internvl(folder, pooled=False, text="Llama"),
    "internvl-3.5": lambda folder: make_internvl(folder, text="Qwen3"),
    "lfm2-vl": make_lfm2,
    "lfm2-vl-moe": lambda folder: make_lfm2(folder, mixed=True, normed=False),
}


@pytest.mark.parametrize("name", MAKERS)
def test_as_transformers(name: str, tmp_path: Path) -> None:
    """The prompt's tokens, the rows of a picture, and what comes, greedily."""
    made = MAKERS[name](tmp_path)
    images = [picture(200, 90, 1), picture(50, 150, 2)]
    text = "Look: <image> and <image>! What?"
    prompt, wanted = made.greedy(text, images, 16)
    llm = LLM(str(tmp_path), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=16, min_tokens=16)
    given = {"prompt": text, "multi_modal_data": {"image": images}}
    (output,) = llm.generate(given, params)
    assert output.prompt_token_ids == prompt
    assert output.outputs[0].token_ids == wanted
    swapped = {"prompt": text, "multi_modal_data": {"image": images[::-1]}}
    assert llm.generate(swapped, params)[0].outputs[0].token_ids != wanted
    _check_rows(made, llm)


def _check_rows(made: SeeingModel, llm: LLM) -> None:
    """The tower's, within what float32 rounds: transformers' own may be further from float64's."""
    sight = llm.runtime.sight
    assert sight is not None
    image = picture(130, 140, 5)
    inputs = made.inputs("<image>", [image])
    pixels = {k: v for k, v in inputs.items() if k.startswith(("pixel", "image_grid", "spatial"))}
    pixels["pixel_values"] = pixels["pixel_values"].double()
    with torch.no_grad():
        precise = deepcopy(made.reference).double()
        rows = torch.cat(list(precise.get_image_features(**pixels).pooler_output)).float()
    got = sight.rows_of(sight.pictures.cutter.cut(image))[:, : rows.shape[1]]
    torch.testing.assert_close(got, rows, rtol=1e-4, atol=1e-4 * rows.abs().max().item())


def test_a_published_lfm2_vl() -> None:
    """LFM2-VL-450M's config as of 2025, from memory: no key is left."""
    text = PUBLISHED_STATES["LFM2-1.2B"] | {
        "block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "conv_dim_out": 1024,
        "hidden_size": 1024, "num_attention_heads": 16, "num_heads": 16,
    }  # fmt: skip
    vision = {
        "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768,
        "intermediate_size": 3072, "layer_norm_eps": 1e-06, "model_type": "siglip2_vision_model",
        "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "num_patches": 256,
        "patch_size": 16, "torch_dtype": "bfloat16", "vision_use_head": False,
    }  # fmt: skip
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"], "do_image_splitting": True,
        "downsample_factor": 2, "encoder_patch_size": 16, "image_token_index": 396,
        "max_image_tokens": 256, "max_num_patches": 1024, "max_pixels_tolerance": 2.0,
        "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "model_type": "lfm2-vl",
        "projector_bias": True, "projector_hidden_act": "gelu", "projector_hidden_size": 2560,
        "text_config": text, "tile_size": 512, "torch_dtype": "bfloat16",
        "use_image_special_tokens": True, "use_thumbnail": True, "vision_config": vision,
        "vision_feature_layer": -1,
    }  # fmt: skip
    spec = spec_of(config, "LFM2-VL-450M", strict=True)
    assert spec.pictures is not None and spec.pictures.token_id == 396
    assert spec.decoder.hidden == 1024 and spec.decoder.tied
    tower = spec.decoder.vision
    assert isinstance(tower, GridSpec) and len(tower.layers) == 12
    assert (tower.hidden, tower.table_side, tower.theta) == (768, 16, 0.0)
    assert (tower.projector.inner, tower.projector.fold) == (2560, 2)


@pytest.mark.parametrize("side", [25, 40, 50])
def test_positions_by_fractions(side: int, tmp_path: Path) -> None:
    """Of sides whose fractions fall beside their bounds in float32."""
    made = make_idefics3(tmp_path, splits=False, pixels=2 * side, patch=2, fold=5)
    text, images = "<image> What?", [picture(90, 60)]
    prompt, wanted = made.greedy(text, images, 8)
    llm = LLM(str(tmp_path), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
    given = {"prompt": text, "multi_modal_data": {"image": images}}
    (output,) = llm.generate(given, params)
    assert output.prompt_token_ids == prompt and output.outputs[0].token_ids == wanted
    _check_rows(made, llm)


def test_a_head_of_its_own_that_only_the_text_model_tells_of(tmp_path: Path) -> None:
    """As in files of before the whole model's config said it."""
    made = make_internvl(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("tie_word_embeddings") is False
    assert config["text_config"]["tie_word_embeddings"] is False
    file.write_text(json.dumps(config))
    _, wanted = made.greedy("<image>?", [picture(60, 90)], 8)
    prompt = {"prompt": "<image>?", "multi_modal_data": {"image": picture(60, 90)}}
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
    (output,) = LLM(str(tmp_path), dtype="float32").generate(prompt, params)
    assert output.outputs[0].token_ids == wanted


def test_a_template_that_reads_parts_only(tmp_path: Path) -> None:
    """As published ones do: what is said as a text is said to them as a part."""
    made = make_idefics3(tmp_path)
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.content[0].type == 'image' %}!{% endif %}:"
        "{% for p in m.content %}{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}"
        "{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
    )
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "image", "image": picture(9, 9)}, "What?"]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    llm = LLM(str(tmp_path), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.chat(said, params, chat_template=template)
    text = "system:Be brief;user!:<image>What?;assistant:A cat.;user:Sure?;"
    assert output.prompt_token_ids == made.inputs(text, [picture(9, 9)])["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "video_url", "video_url": {"url": "x"}}, "is of type 'video_url'"),
        ({"type": "img", "image": picture(9, 9)}, "is of type 'img'"),
        ({}, "is of type None"),
        ({"type": "text"}, "'text' has no text"),
        ({"type": "image"}, "'image' has no 'image'"),
        ({"type": "image_url", "image_url": {"url": "x.png", "detail": "high"}}, "detail 'high'"),
        (5, "must be a mapping such as .* not int"),
    ],
)
def test_parts_that_are_refused(part: Any, said: str, chatting: LLM) -> None:
    with pytest.raises(InvalidPromptError, match=said):
        chatting.chat([{"role": "user", "content": [part]}])


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(make_idefics3(tmp_path_factory.mktemp("chatting")).folder), dtype="float32")


def test_a_chat(tmp_path: Path) -> None:
    """Pictures in the words of OpenAI's API and as what Pillow opened."""
    made = make_idefics3(tmp_path)
    image = picture(100, 50)
    image.save(tmp_path / "seen.png")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hm?"}]}]
    text = made.processor.apply_chat_template(messages, add_generation_prompt=True)
    prompt, wanted = made.greedy(text, [image], 8)
    llm = LLM(str(tmp_path), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
    path = str(tmp_path / "seen.png")
    for part in (
        {"type": "image", "image": image},
        {"type": "image_url", "image_url": {"url": f"file://{path}"}},
        {"type": "image_url", "image_url": path},
        {"image": image},
    ):
        asked = [{"role": "user", "content": [part, {"type": "input_text", "text": "Hm?"}]}]
        (output,) = llm.chat(asked, params)
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == wanted


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_bfloat16(quantization: str | None, tmp_path: Path) -> None:
    """What is rounded on load is the decoder: the tower's rows are the same bits."""
    make_llava(tmp_path)
    plain = load_model(tmp_path, dtype="bfloat16")
    found = load_model(
        tmp_path, **({"quantization": quantization} if quantization else {"dtype": "bfloat16"})
    )
    heads = plain.spec.decoder.vision
    assert heads is not None
    layers = heads.layers[0].attention
    pixels, rows = torch.randn(3, 56, 56), []
    for model in (plain, found):
        layout = PagedLayout(((layers.num_heads, layers.head_dim),), torch.bfloat16, 32)
        assert model.model.vision is not None
        with torch.inference_mode():
            rows.append(model.model.vision(pixels, layout.allocate(1)[0]))
    assert torch.equal(*rows) and rows[0].dtype is torch.bfloat16


def change(folder: Path, part: str | None = None, **values: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    (config if part is None else config[part]).update(values)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        (None, {"vision_feature_layer": [1, 2]}, "features of several layers aren't built"),
        (None, {"vision_feature_layer": -9}, "-9 isn't one of the 3 layers"),
        (None, {"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ("vision_config", {"model_type": "pixtral"}, "model_type='pixtral'"),
        ("vision_config", {"num_attention_heads": 5}, "isn't a multiple of num_attention_heads 5"),
        ("vision_config", {"patch_size": 57}, "image_size 56 has 0 patches"),
        ("vision_config", {"num_channels": 1}, "num_channels=1"),
        ("text_config", {"model_type": "gpt2"}, "model_type='gpt2'"),
        ("text_config", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("text_config", {"logit_scale": 2.0}, "logit_scale"),
    ],
)
def test_what_isnt_built(part: str | None, values: dict[str, Any], said: str, llava: Path) -> None:
    change(llava, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(llava)


def test_keys_that_nobody_reads_are_named_wherever_they_stand(llava: Path) -> None:
    change(llava, "vision_config", new_norm=True)
    with pytest.warns(UserWarning, match="new_norm"):
        read_spec(llava)
    with pytest.raises(UnsupportedModelError, match="new_norm"):
        read_spec(llava, strict=True)


def test_published_configs_leave_out_what_is_like_their_kind(llava: Path) -> None:
    """As LLaVA 1.5's: a Llama's shape goes without saying."""
    said = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    change(llava, text_config=said, image_token_index=32000)
    spec = read_spec(llava).decoder
    first = spec.layers[0]
    assert (spec.hidden, len(spec.layers), first.mlp.intermediate) == (4096, 32, 11008)
    assert spec.vision is not None and spec.vision.projector.out == 4096
    assert (first.attention.num_heads, spec.vision.tokens) == (32, 16)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, r"\[2, 0\] aren't layers of 4"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 2]}, "of the text model's 2"),
        ("vision_config", {"num_position_embeddings": 37}, "num_position_embeddings=37"),
        ("vision_config", {"out_hidden_size": 65}, "out_hidden_size=65"),
        ("vision_config", {"num_heads": 3}, "aren't those of num_heads 3"),
        ("text_config", {"rope_parameters": {"rope_type": "default"}}, "has no mrope_section"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
            "three numbers of pairs, 8 together",
        ),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [1, 1, 6], "mrope_interleaved": True}},
            "can't take turns",
        ),
    ],
)
def test_what_isnt_built_of_qwens(
    part: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_qwen3(tmp_path)
    change(tmp_path, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("vision_config", {"num_patches": 24}, "num_patches 24 aren't those of a square"),
        ("vision_config", {"model_type": "siglip"}, "model_type='siglip'"),
        ("vision_config", {"num_attention_heads": 5}, "isn't a multiple of num_attention_heads 5"),
        ("vision_config", {"hidden_act": "relu6"}, "hidden_act='relu6'"),
        ("text_config", {"model_type": "llama"}, "model_type='llama'"),
        (None, {"use_image_special_tokens": False}, "use_image_special_tokens=False"),
        (None, {"vision_feature_layer": -2}, "vision_feature_layer=-2"),
        (None, {"image_token_index": 5}, "image_token_index=5; built for this family: 257"),
        (None, {"downsample_factor": 0}, "downsample_factor must be a"),
    ],
)
def test_what_isnt_built_of_lfm2(
    part: str | None, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_lfm2(tmp_path)
    change(tmp_path, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(tmp_path)


def test_what_lfm2_leaves_unsaid(tmp_path: Path) -> None:
    """As transformers has it: tied, whatever the text model's part says, and no norm where none is
    wanted, although the file has one.
    """
    make_lfm2(tmp_path)
    change(tmp_path, "text_config", tie_word_embeddings=False)
    change(tmp_path, None, projector_use_layernorm=False)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["tie_word_embeddings"], config["image_token_id"]
    file.write_text(json.dumps(config))
    loaded = load_model(tmp_path)
    assert loaded.spec.decoder.tied
    assert loaded.spec.pictures is not None and loaded.spec.pictures.token_id == 396


def test_published_names_of_lfm2(tmp_path: Path) -> None:
    make_lfm2(tmp_path)
    want = load_model(tmp_path).model.state_dict()
    rename(tmp_path, lambda name: name.replace("vision_tower.", "vision_tower.vision_model."))
    got = load_model(tmp_path).model.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    make_llava(tmp_path)
    return tmp_path


def rename(folder: Path, names: Callable[[str], str | None]) -> None:
    """Give the checkpoint's tensors other names; None leaves one out."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {new: t for name, t in load_file(file).items() if (new := names(name)) is not None}
    save_file(tensors, file)


@pytest.mark.parametrize(
    "names",
    [
        lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),  # before 5
        lambda name: (  # as modules are called
            name
            if name == "lm_head.weight"
            else "model." + name.replace("language_model.model.", "language_model.")
        ).replace("model.language_model.lm_head", "lm_head"),
    ],
)
def test_other_names_of_the_same(names: Callable[[str], str], llava: Path) -> None:
    want = load_model(llava).model.state_dict()
    rename(llava, names)
    got = load_model(llava).model.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)


def test_every_tensor_is_taken_and_none_is_missing(llava: Path) -> None:
    rename(llava, lambda name: None if "layers.1.mlp.fc1.bias" in name else name)
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.fc1\.bias"):
        load_model(llava)


def test_a_tensor_too_many(llava: Path) -> None:
    rename(llava, lambda name: name.replace("vision_tower.pre_layrnorm.bias", "vision_tower.new"))
    with pytest.raises(WeightsError, match=r"vision_tower\.new"):
        load_model(llava)


def test_layers_that_nobody_reads_arent_loaded(llava: Path) -> None:
    tower = load_model(llava).model.vision
    assert tower is not None and len(tower.layers) == 2 and tower.post_norm is None


@pytest.mark.parametrize("command", ["export", "package", "onnx"])
def test_what_isnt_built_for_models_that_see(command: str, llava: Path, tmp_path: Path) -> None:
    from penstock.pipeline import build, export, onnx

    run = {
        "export": lambda: export.export_model(llava, tmp_path.parent / "out"),
        "package": lambda: build.build(
            build.BuildOptions(str(llava), tmp_path.parent / "out", forward="package")
        ),
        "onnx": lambda: onnx.export_onnx(llava, tmp_path.parent / "out.onnx"),
    }[command]
    with pytest.raises(UnsupportedModelError, match="sees pictures"):
        run()
    assert json.loads((llava / "config.json").read_text())["image_token_index"] == IMAGE
