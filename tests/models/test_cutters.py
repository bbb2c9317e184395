"""How pictures are cut, against transformers' processors: Gemma 3's, Mistral's, LLaVA-NeXT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.models.seeing import make_gemma3, make_llava_next, make_mistral3, picture
from tests.models.test_pictures import pictures_of, set_processor

from penstock.errors import InvalidPromptError, ModelError
from penstock.models.vision.cutters import AnyresCutter


@pytest.mark.parametrize(
    "size", [(140, 140), (141, 140), (1, 90), (300, 3), (29, 28), (1000, 700), (27, 27)]
)
def test_cut_into_lines(size: tuple[int, int], tmp_path: Path) -> None:
    made = make_mistral3(tmp_path)
    found = pictures_of(tmp_path).cutter.cut(picture(*size))
    inputs = made.inputs("<image>", [picture(*size)])
    text = made.processor.tokenizer.decode(inputs["input_ids"][0])
    assert found.text == text and found.text.count("<image>") == found.tokens
    scaled = pictures_of(tmp_path).scaling(found.tiles[0])
    torch.testing.assert_close(scaled, inputs["pixel_values"][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "size", [(56, 56), (57, 56), (20, 90), (300, 40), (40, 300), (1000, 700), (3, 100), (112, 113)]
)
def test_cut_into_any_shape(size: tuple[int, int], tmp_path: Path) -> None:
    made = make_llava_next(tmp_path)
    found = pictures_of(tmp_path).cutter.cut(picture(*size))
    inputs = made.inputs("<image>", [picture(*size)])
    assert found.tokens == found.text.count("<image>") == inputs["input_ids"].shape[1]
    assert found.order is not None and len(found.order) == found.tokens
    wanted, scaling = inputs["pixel_values"][0], pictures_of(tmp_path).scaling
    got = torch.stack([scaling(tile) for tile in found.tiles])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_what_is_left_out_tells_pictures_apart() -> None:
    """Though their tiles are the same bytes."""
    cutter = AnyresCutter(8, 4, ((8, 16), (16, 8), (16, 16)), 3, "<image>")
    black, other = (cutter.cut(Image.new("RGB", size)) for size in ((16, 16), (16, 13)))
    assert all(torch.equal(*pair) for pair in zip(black.tiles, other.tiles, strict=True))
    assert black.tokens > other.tokens and black.key != other.key


def test_shapes_that_arent_built(tmp_path: Path) -> None:
    make_llava_next(tmp_path)
    with pytest.raises(InvalidPromptError, match="1 × 300 pixels is too long and narrow"):
        pictures_of(tmp_path).cutter.cut(picture(1, 300))
    for values, said in (
        ({"image_grid_pinpoints": [[56, 56]]}, r"image_grid_pinpoints are \[\[56, 56\]\]"),
        ({"crop_size": {"height": 50, "width": 56}}, "cuts tiles of .50, 56. pixels"),
    ):
        own = (tmp_path / "preprocessor_config.json").read_text()
        set_processor(tmp_path, **values)
        with pytest.raises(ModelError, match=said):
            pictures_of(tmp_path)
        (tmp_path / "preprocessor_config.json").write_text(own)


def test_lines_that_arent_built(tmp_path: Path) -> None:
    make_mistral3(tmp_path)
    cutter = pictures_of(tmp_path).cutter
    with pytest.raises(InvalidPromptError, match="1 × 300 pixels is too long and narrow"):
        cutter.cut(picture(1, 300))
    for values, said in (
        ({"size": {"shortest_edge": 5}}, "size is"),
        ({"size": {"longest_edge": 0}}, "size is"),
        ({"do_center_crop": True, "size": {"longest_edge": 140}}, "do_center_crop is True"),
    ):
        set_processor(tmp_path, **values)
        with pytest.raises(ModelError, match=said):
            pictures_of(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"do_pan_and_scan": 1}, "do_pan_and_scan is 1"),
        ({"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 0}, "max_num_crops is 0"),
        ({"size": {"height": 56, "width": 112}}, "of {'height': 56.*, but its tower is of 112"),
    ],
)
def test_framed_squares_that_arent_built(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_gemma3(tmp_path)
    set_processor(tmp_path, **values)
    with pytest.raises(ModelError, match=said):
        pictures_of(tmp_path)


@pytest.mark.parametrize(
    "size", [(90, 90), (90, 76), (90, 75), (200, 90), (90, 200), (301, 40), (39, 400), (100, 25)]
)
def test_pan_and_scan(size: tuple[int, int], tmp_path: Path) -> None:
    made = make_gemma3(tmp_path)
    asked = {
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 30,
        "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2,
    }  # fmt: skip
    found = pictures_of(tmp_path, **asked).cutter.cut(picture(*size))
    inputs = made.processor(
        text="<image>", images=[picture(*size)], return_tensors="pt", images_kwargs=asked
    )
    text = found.text.replace("<s>", "<soft>").replace("<b>", "<image>").replace("<e>", "<ends>")
    assert made.processor.tokenizer(text)["input_ids"] == inputs["input_ids"][0].tolist()
    scaling = pictures_of(tmp_path).scaling
    got = torch.stack([scaling(tile) for tile in found.tiles])
    torch.testing.assert_close(got, inputs["pixel_values"], rtol=0, atol=1e-6)
    assert found.tokens == 16 * len(found.tiles)
    assert len(pictures_of(tmp_path).cutter.cut(picture(*size)).tiles) == 1
