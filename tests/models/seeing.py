"""Tiny random models that see, with tokenizers and processors, made by transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from penstock.models.load import LoadedModel, load_model
from penstock.models.registry import read_spec
from penstock.models.vision.processor import open_pictures

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 319,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
IMAGE = 257
"""The id of `<image>`: letters come before, `<end>` among them."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token, and what stands for pictures."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = ["<end>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names += [f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7)]
    names += ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    names += [f"<|img_row_{y}_col_{x}|>" for y in range(1, 4) for x in range(1, 5)]
    names += ["<soft>", "<ends>", "[IMG_BREAK]", "[IMG_END]"]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass
class SeeingModel:
    """A checkpoint's folder, the model that it was made of, and transformers' processor."""

    folder: Path
    reference: Any
    processor: Any

    def inputs(self, text: str, images: list[Image.Image]) -> Any:
        """What transformers makes of a prompt."""
        return self.processor(text=text, images=images, return_tensors="pt")

    def greedy(
        self, text: str, images: list[Image.Image], count: int
    ) -> tuple[list[int], list[int]]:
        """(prompt, continuation) by transformers."""
        inputs = self.inputs(text, images)
        with torch.no_grad():
            made = self.reference.generate(
                **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )[0].tolist()
        length = inputs["input_ids"].shape[1]
        return made[:length], made[length:]

    def load(self, **asked: Any) -> LoadedModel:
        return load_model(self.folder, **asked)


def _write(folder: Path, model: Any, processor: dict[str, Any], tokenizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():  # so that what is seen changes what comes
            parameter.mul_(3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def make_idefics3(
    folder: Path,
    *,
    splits: bool = True,
    smol: bool = False,
    pixels: int = 56,
    patch: int = 14,
    fold: int = 2,
) -> SeeingModel:
    """Tiles of 56 pixels, four tokens each."""
    torch.manual_seed(7)
    kind = "SmolVLM" if smol else "Idefics3"
    config = getattr(transformers, f"{kind}Config")(
        vision_config={**VISION, "image_size": pixels, "patch_size": patch},
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        scale_factor=fold,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    tokenizer = make_tokenizer()
    given = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 3 * pixels},
        "max_image_size": {"longest_edge": pixels},
        "do_image_splitting": splits,
    }
    _write(folder, model, given, tokenizer)
    images = Idefics3ImageProcessorPil(**{k: v for k, v in given.items() if k[0] != "i"})
    processor = transformers.Idefics3Processor(
        images,
        tokenizer,
        image_seq_len=(pixels // patch // fold) ** 2,
        chat_template=TEMPLATE,
    )
    return SeeingModel(folder, model, processor)


def make_llava(
    folder: Path, *, tower: str = "clip", pixels: int = 56, **beside: Any
) -> SeeingModel:
    """One square of 56 pixels, 16 tokens."""
    torch.manual_seed(8)
    clip = tower == "clip"
    kinds = transformers.CLIPVisionConfig, transformers.SiglipVisionConfig
    vision = kinds[not clip](**{**VISION, "image_size": pixels})
    strategy = "default" if clip else "full"
    given = {"vision_feature_select_strategy": strategy, **beside}
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_seq_length=16,
        **given,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    tokenizer = make_tokenizer()
    if clip:
        own: dict[str, Any] = {
            "size": {"shortest_edge": pixels},
            "crop_size": {"height": pixels, "width": pixels},
        }
        images: Any = CLIPImageProcessorPil(**own)
    else:
        own = {"size": {"height": pixels, "width": pixels}}
        images = SiglipImageProcessorPil(**own)
    kind = "CLIPImageProcessor" if clip else "SiglipImageProcessor"
    _write(folder, model, {"image_processor_type": kind, **own}, tokenizer)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy=given["vision_feature_select_strategy"],
        num_additional_image_tokens=int(clip),
    )
    return SeeingModel(folder, model, processor)


def make_llava_next(folder: Path, *, tower: str = "clip", text: str = "Llama") -> SeeingModel:
    """Squares of 56 pixels, 16 patches each, in one of five shapes."""
    torch.manual_seed(16)
    clip = tower == "clip"
    kinds = transformers.CLIPVisionConfig, transformers.SiglipVisionConfig
    strategy = "default" if clip else "full"
    shapes = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    config = transformers.LlavaNextConfig(
        vision_config=kinds[not clip](**VISION),
        text_config=getattr(transformers, f"{text}Config")(**TEXT),
        image_token_index=IMAGE, image_grid_pinpoints=shapes,
        vision_feature_select_strategy=strategy,
    )  # fmt: skip
    model = transformers.LlavaNextForConditionalGeneration(config).eval()
    tokenizer = make_tokenizer()
    own = {
        "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
        "image_grid_pinpoints": shapes,
    }  # fmt: skip
    _write(folder, model, {"image_processor_type": "LlavaNextImageProcessor", **own}, tokenizer)
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(**own), tokenizer, patch_size=14,
        vision_feature_select_strategy=strategy, num_additional_image_tokens=int(clip),
    )  # fmt: skip
    return SeeingModel(folder, model, processor)


def make_qwen3(folder: Path, *, mixed: bool = False) -> SeeingModel:
    """Tokens of 32 pixels, two layers of the tower for the decoder's first two; mixed: with
    experts.
    """
    torch.manual_seed(10)
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**TEXT, "head_dim": 16, "rope_parameters": {**rope, "rope_theta": 10000.0}}
    vision = {
        "depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 70, "patch_size": 16,
        "out_hidden_size": 64, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    if mixed:
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    kind = "Qwen3VLMoe" if mixed else "Qwen3VL"
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    tokenizer = make_tokenizer()
    own = {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 20}, "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    _write(folder, model, {"image_processor_type": "Qwen2VLImageProcessorFast", **own}, tokenizer)
    return SeeingModel(folder, model, QwenProcessor(Qwen2VLImageProcessorPil(**own), tokenizer))


def make_qwen3_5(folder: Path, *, mixed: bool = False) -> SeeingModel:
    """Tokens of 32 pixels before layers with states; mixed: with experts."""
    torch.manual_seed(12)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {
        **TEXT, "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {**rope, "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    if mixed:
        del text["intermediate_size"]
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        text |= {"shared_expert_intermediate_size": 40}
    vision = {
        "depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 70, "patch_size": 16,
        "out_hidden_size": 64, "num_position_embeddings": 36,
    }  # fmt: skip
    kind = "Qwen3_5Moe" if mixed else "Qwen3_5"
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    tokenizer = make_tokenizer()
    own = {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 20}, "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    _write(folder, model, {"image_processor_type": "Qwen2VLImageProcessorFast", **own}, tokenizer)
    return SeeingModel(folder, model, QwenProcessor(Qwen2VLImageProcessorPil(**own), tokenizer))


def make_qwen(folder: Path, *, older: bool = False, published: bool = False) -> SeeingModel:
    """Tokens of 28 pixels, windows of two by two. published: text keys as they once were."""
    torch.manual_seed(9)
    kind = "Qwen2VL" if older else "Qwen2_5_VL"
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope, "tie_word_embeddings": False}
    vision: dict[str, Any] = {"depth": 3, "num_heads": 4, "patch_size": 14}
    if older:
        vision |= {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 64, "intermediate_size": 70, "out_hidden_size": 64}
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    tokenizer = make_tokenizer()
    own = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}}
    _write(folder, model, {"image_processor_type": "Qwen2VLImageProcessor", **own}, tokenizer)
    if published:
        file = folder / "config.json"
        given = json.loads(file.read_text())
        flat = given.pop("text_config")
        flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
        flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
        file.write_text(json.dumps({**flat, **given}))
    tokenizer.image_token, tokenizer.image_token_id = "<image>", IMAGE
    tokenizer.video_token, tokenizer.video_token_id = "<global-img>", IMAGE + 2
    images = Qwen2VLImageProcessorPil(**own)
    processor = QwenProcessor(images, tokenizer)
    return SeeingModel(folder, model, processor)


def make_internvl(folder: Path, *, pooled: bool = True, text: str = "Qwen2") -> SeeingModel:
    """Tiles of 56 pixels, four tokens each."""
    torch.manual_seed(11)
    config = transformers.InternVLConfig(
        vision_config={
            **VISION, "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True,
            "use_mean_pooling": pooled,
        },
        text_config=getattr(transformers, f"{text}Config")(**TEXT),
        image_token_id=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.InternVLForConditionalGeneration(config).eval()
    tokenizer = make_tokenizer()
    own = {"size": {"height": 56, "width": 56}, "max_patches": 6}
    given = {"image_processor_type": "GotOcr2ImageProcessorFast", **own, "crop_to_patches": False}
    _write(folder, model, given, tokenizer)
    return SeeingModel(folder, model, InternProcessor(GotOcr2ImageProcessorPil(**own), tokenizer))


def make_lfm2(folder: Path, *, mixed: bool = False, normed: bool = True) -> SeeingModel:
    """Tokens of 16 pixels, tiles of 48, a table of five by five positions; mixed: with experts."""
    torch.manual_seed(13)
    text: dict[str, Any] = {
        **TEXT, "bos_token_id": 1, "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }  # fmt: skip
    if mixed:
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        text |= {"num_dense_layers": 1}
    kind = "Lfm2Moe" if mixed else "Lfm2"
    vision = {k: v for k, v in VISION.items() if k != "image_size"}
    config = transformers.Lfm2VlConfig(
        vision_config=transformers.Siglip2VisionConfig(
            **{**vision, "patch_size": 8, "num_patches": 25, "vision_use_head": False}
        ),
        text_config=getattr(transformers, f"{kind}Config")(**text),
        image_token_id=IMAGE,
        projector_hidden_size=72,
        projector_use_layernorm=normed,
    )
    model = transformers.Lfm2VlForConditionalGeneration(config).eval()
    tokenizer = make_tokenizer()
    own = {
        "image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 8,
        "tile_size": 48, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 12,
    }  # fmt: skip
    _write(folder, model, own, tokenizer)
    return SeeingModel(folder, model, LfmProcessor(folder, tokenizer))


def make_gemma3(folder: Path, *, window: int = 12, tokens: int = 16) -> SeeingModel:
    """One square of 112 pixels, 16 tokens, which see each other both ways; two of three layers see
    less than such a square.
    """
    torch.manual_seed(14)
    tokenizer = make_tokenizer()
    soft, ends = tokenizer.convert_tokens_to_ids(["<soft>", "<ends>"])
    text = {k: v for k, v in TEXT.items() if k != "num_hidden_layers"}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **text, num_hidden_layers=3, head_dim=16, sliding_window=window,
            query_pre_attn_scalar=1,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        vision_config=transformers.SiglipVisionConfig(**{**VISION, "image_size": 112}),
        mm_tokens_per_image=tokens, boi_token_index=IMAGE, eoi_token_index=ends,
        image_token_index=soft,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, 0, 0.1)
        for parameter in model.model.vision_tower.parameters():  # a norm makes rows large again
            parameter.mul_(0.5)
    own = {"size": {"height": 112, "width": 112}}
    _write(folder, model, {"image_processor_type": "Gemma3ImageProcessor", **own}, tokenizer)
    tokenizer.boi_token, tokenizer.boi_token_id = "<image>", IMAGE
    tokenizer.eoi_token, tokenizer.eoi_token_id = "<ends>", ends
    tokenizer.image_token, tokenizer.image_token_id = "<soft>", soft
    images = Gemma3ImageProcessorPil(**own)
    return SeeingModel(folder, model, Gemma3Processor(images, tokenizer, image_seq_length=tokens))


def make_mistral3(folder: Path, *, text: str = "Mistral", bias: bool = False) -> SeeingModel:
    """Tokens of 28 pixels, pictures of up to 140 × 140."""
    torch.manual_seed(15)
    given: dict[str, Any] = {**TEXT, "head_dim": 16, "rms_norm_eps": 1e-4}
    if text == "Mistral":
        given["sliding_window"] = None
    vision = {**VISION, "hidden_act": "silu", "image_size": 140}
    config = transformers.Mistral3Config(
        text_config=getattr(transformers, f"{text}Config")(**given),
        vision_config=transformers.PixtralVisionConfig(**vision),
        image_token_index=IMAGE,
        multimodal_projector_bias=bias,
        tie_word_embeddings=False,
    )
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    tokenizer = make_tokenizer()
    own = {"size": {"longest_edge": 140}, "patch_size": {"height": 28, "width": 28}}
    _write(folder, model, {"image_processor_type": "PixtralImageProcessorFast", **own}, tokenizer)
    return SeeingModel(folder, model, PixtralProcessor(PixtralImageProcessorPil(**own), tokenizer))


class PixtralProcessor:
    """What transformers' processor does of pictures: it needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, *, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        found = self.image_processor(images=images, return_tensors=return_tensors)
        for high, wide in (found["image_sizes"] // 28).tolist():
            lines = ["<|>" * wide] * high
            text = text.replace("<image>", "[IMG_BREAK]".join(lines) + "[IMG_END]", 1)
        ids = self.tokenizer(text.replace("<|>", "<image>"), return_tensors=return_tensors)
        return {**ids, **found}


class LfmProcessor:
    """What transformers' processor does of pieces: it needs torchvision. How they are cut is held
    to it in `test_pictures.py`.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder, self.tokenizer = folder, tokenizer

    def __call__(self, *, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        spec = read_spec(self.folder)
        assert spec.pictures is not None and spec.decoder.vision is not None
        patch = spec.decoder.vision.patch
        cutter = open_pictures(self.folder, spec.pictures, spec.decoder.vision, "<|>").cutter
        pieces, shapes = [], []
        for image in images:
            found = cutter.cut(image)
            text = text.replace("<image>", found.text, 1)
            for tile in found.tiles:
                high, wide = tile.shape[1] // patch, tile.shape[2] // patch
                x = (tile.float() / 255 - 0.5) / 0.5
                x = x.view(3, high, patch, wide, patch).permute(1, 3, 2, 4, 0)
                x = x.reshape(high * wide, -1)
                pieces.append(x)
                shapes.append([high, wide])
        most = max(map(len, pieces))
        mask = torch.tensor([[1] * len(x) + [0] * (most - len(x)) for x in pieces])
        ids = self.tokenizer(text.replace("<|>", "<image>"), return_tensors=return_tensors)
        pad = torch.nn.functional.pad
        return {
            **ids,
            "pixel_values": torch.stack([pad(x, (0, 0, 0, most - len(x))) for x in pieces]),
            "spatial_shapes": torch.tensor(shapes),
            "pixel_attention_mask": mask,
        }


class InternProcessor:
    """What transformers' processor does of pictures: it needs one for videos."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, *, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        found = self.image_processor(
            images=images, return_tensors=return_tensors, crop_to_patches=True
        )
        for count in found.pop("num_patches").tolist():
            text = text.replace("<image>", f"<img>{'<|>' * (4 * count)}</img>", 1)
        ids = self.tokenizer(text.replace("<|>", "<image>"), return_tensors=return_tensors)
        return {**ids, **found}


class QwenProcessor:
    """What transformers' processor does of pictures: it needs one for videos, and torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, *, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        found = self.image_processor(images=images, return_tensors=return_tensors)
        for _, high, wide in found["image_grid_thw"].tolist():
            text = text.replace("<image>", "<|>" * (high * wide // 4), 1)
        text = text.replace("<|>", "<image>")
        ids = self.tokenizer(text, return_tensors=return_tensors)
        kinds = (ids["input_ids"] == IMAGE).int()
        return {**ids, **found, "mm_token_type_ids": kinds}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured blots, different for each seed."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
