"""Models that see, against transformers: rows of pictures, prompts, what is generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.seeing import (
    IMAGE,
    SeeingModel,
    make_gemma3,
    make_idefics3,
    make_internvl,
    make_lfm2,
    make_llava,
    make_llava_next,
    make_mistral3,
    make_qwen,
    make_qwen3,
    make_qwen3_5,
    picture,
)

from penstock import LLM, SamplingParams
from penstock.cache import PagedLayout
from penstock.errors import InvalidPromptError, UnsupportedModelError, WeightsError
from penstock.models.load import load_model

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
    "llava-next": make_llava_next,
    "llava-next-siglip": lambda folder: make_llava_next(folder, tower="siglip", text="Mistral"),
    "qwen2.5-vl": make_qwen,
    "qwen2.5-vl-published": lambda folder: make_qwen(folder, published=True),
    "qwen2-vl": lambda folder: make_qwen(folder, older=True),
    "qwen3-vl": make_qwen3,
    "qwen3-vl-moe": lambda folder: make_qwen3(folder, mixed=True),
    "qwen3.5": make_qwen3_5,
    "qwen3.5-moe": lambda folder: make_qwen3_5(folder, mixed=True),
    "internvl": make_internvl,
    "internvl-normed": lambda folder: make_internvl(folder, pooled=False, text="Llama"),
    "internvl-3.5": lambda folder: make_internvl(folder, text="Qwen3"),
    "lfm2-vl": make_lfm2,
    "gemma3": make_gemma3,
    "gemma3-wide-windows": lambda folder: make_gemma3(folder, window=300, tokens=4),
    "mistral3": make_mistral3,
    "mistral3-ministral": lambda folder: make_mistral3(folder, text="Ministral3", bias=True),
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


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3-vl-moe", "llava-next"])
def test_texts_alone(name: str, tmp_path: Path) -> None:
    """Of models that see, to which none is shown."""
    made = MAKERS[name](tmp_path)
    llm = LLM(str(tmp_path), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
    (output,) = llm.generate("No picture at all, and some words more.", params)
    ids = torch.tensor([output.prompt_token_ids])
    with torch.no_grad():
        found = made.reference.generate(
            input_ids=ids, max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    assert found[0].tolist() == output.prompt_token_ids + output.outputs[0].token_ids


def _check_rows(made: SeeingModel, llm: LLM) -> None:
    """The tower's, within what float32 rounds: transformers' own may be further from float64's."""
    sight = llm.runtime.sight
    assert sight is not None
    image = picture(130, 140, 5)
    inputs = made.inputs("<image>", [image])
    pixels = {k: v for k, v in inputs.items() if k.startswith(("pixel", "image_", "spatial"))}
    pixels["pixel_values"] = pixels["pixel_values"].double()
    with torch.no_grad():
        precise = deepcopy(made.reference).double()
        rows = torch.cat(list(precise.get_image_features(**pixels).pooler_output)).float()
    got = sight.rows_of(sight.pictures.cutter.cut(image))[:, : rows.shape[1]]
    torch.testing.assert_close(got, rows, rtol=1e-4, atol=1e-4 * rows.abs().max().item())


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


def test_what_lfm2_leaves_unsaid(tmp_path: Path) -> None:
    """As transformers has it: tied, whatever the text model's part says, and no norm where none is
    wanted, although the file has one.
    """
    make_lfm2(tmp_path)
    change(tmp_path, "text_config", tie_word_embeddings=False)
    change(tmp_path, None, projector_use_layernorm=False)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["tie_word_embeddings"]
    file.write_text(json.dumps(config))
    assert load_model(tmp_path).spec.decoder.tied
    del config["image_token_id"]
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="token 396 stands for pictures in prompts"):
        load_model(tmp_path)  # which has no such token


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


def module_names(name: str) -> str:
    """As transformers' modules are called, not its files."""
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.")


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
@pytest.mark.parametrize(
    "names",
    [module_names, lambda name: name.replace("vision_tower.vision_model.", "vision_tower.")],
)
def test_names_of_files_and_modules(names: Callable[[str], str], name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    want = load_model(tmp_path).model.state_dict()
    rename(tmp_path, names)
    got = load_model(tmp_path).model.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)


def test_experts_that_lie_the_other_way(tmp_path: Path) -> None:
    """As in published files of Qwen3-VL, which transformers transposes."""
    from safetensors.torch import load_file, save_file

    make_qwen3(tmp_path, mixed=True)
    want = load_model(tmp_path).model.state_dict()
    file, turned = tmp_path / "model.safetensors", 0
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
        turned += 1
    save_file(tensors, file)
    got = load_model(tmp_path).model.state_dict()
    assert turned == 4
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
