"""Pictures: opened, cut and scaled as transformers does it, to the bit; what can't be is told."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.models.seeing import (
    SeeingModel,
    make_idefics3,
    make_internvl,
    make_lfm2,
    make_llava,
    make_qwen,
    make_qwen3,
    picture,
)

from penstock import LLM
from penstock.errors import ConfigError, InvalidPromptError, MissingExtraError, ModelError
from penstock.models.load import load_model
from penstock.models.registry import read_spec
from penstock.models.vision import opening
from penstock.models.vision.cutters import PieceCutter
from penstock.models.vision.opening import open_picture, open_pictures_of
from penstock.models.vision.pictures import Pictures
from penstock.models.vision.processor import open_pictures
from penstock.nn.grid import GridTower

SIZES = [(56, 56), (57, 56), (30, 20), (1, 300), (300, 1), (512, 64), (100, 333), (2000, 1500)]
PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "images"


def pictures_of(folder: Path, **chosen: Any) -> Pictures:
    spec = read_spec(folder)
    assert spec.pictures is not None and spec.decoder.vision is not None
    row, marks = "<image>", ("", "")
    if spec.pictures.marks is not None:
        row, marks = "<s>", ("<b>", "<e>")
    return open_pictures(folder, spec.pictures, spec.decoder.vision, row, chosen, marks)


def set_processor(folder: Path, **values: Any) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_idefics3(tmp_path_factory.mktemp("tiles"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_llava(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def stretched(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_llava(tmp_path_factory.mktemp("stretched"), tower="siglip")


@pytest.fixture(scope="module")
def canvas(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_internvl(tmp_path_factory.mktemp("canvas"))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_qwen(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    """Patches of 16 pixels."""
    return make_qwen3(tmp_path_factory.mktemp("wider"))


def check(model: SeeingModel, image: Image.Image) -> None:
    """Pixels and text as transformers' processor has them."""
    found = pictures_of(model.folder)
    cut = found.cutter.cut(image)
    inputs = model.inputs("<image>", [image])
    got = torch.stack([found.scaling(tile) for tile in cut.tiles])
    if cut.grid is None:
        pixels = inputs["pixel_values"].flatten(0, -4)
    else:
        tower = load_model(model.folder).model.vision
        assert isinstance(tower, GridTower)
        pixels, got = inputs["pixel_values"], tower._cut(got[0]).flatten(0, 1)
    assert torch.equal(got, pixels)
    ids = model.processor.tokenizer(cut.text)["input_ids"]
    assert ids == inputs["input_ids"][0].tolist()
    assert ids.count(found.token_id) == cut.tokens


@pytest.mark.parametrize("size", SIZES)
def test_cut_into_tiles(size: tuple[int, int], tiles: SeeingModel) -> None:
    check(tiles, picture(*size))


@pytest.mark.parametrize("size", SIZES[:3] + SIZES[5:])
def test_cut_out_and_stretched(
    size: tuple[int, int], whole: SeeingModel, stretched: SeeingModel
) -> None:
    check(whole, picture(*size))
    check(stretched, picture(*size))


@pytest.mark.parametrize("size", [*SIZES[:3], (1, 199), *SIZES[5:], (14, 14), (29, 27)])
def test_sides_that_are_multiples(
    size: tuple[int, int], grid: SeeingModel, wider: SeeingModel
) -> None:
    check(grid, picture(*size))
    check(wider, picture(*size))


@pytest.mark.parametrize("name", ["llama_dog.jpg", "exllamav3_cat.png"])
def test_photographs(
    name: str, tiles: SeeingModel, whole: SeeingModel, stretched: SeeingModel, grid: SeeingModel
) -> None:
    if not (PHOTOS / name).is_file():
        pytest.skip(f"{PHOTOS} isn't there")
    for model in (tiles, whole, stretched, grid):
        check(model, open_picture(PHOTOS / name))


def test_the_newer_file_comes_first(tmp_path: Path) -> None:
    make_idefics3(tmp_path)
    own = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    newer = {"image_processor": {**own, "do_image_splitting": False}, "image_seq_len": 4}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    assert len(pictures_of(tmp_path).cutter.cut(picture(300, 300)).tiles) == 1


def test_padded_to_a_square(tmp_path: Path) -> None:
    """LLaVA's own processor may do so, in the mean's colour."""
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    made = make_llava(tmp_path)
    set_processor(tmp_path, do_pad=True)
    made.processor.image_processor = LlavaImageProcessorPil(
        do_pad=True, size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    check(made, picture(30, 71))
    check(made, picture(90, 31))


def test_a_key_is_of_what_is_seen(tiles: SeeingModel) -> None:
    cut = pictures_of(tiles.folder).cutter.cut
    one, again, other = cut(picture(99, 70)), cut(picture(99, 70)), cut(picture(99, 70, 1))
    assert one.key == again.key != other.key and one.key < 0 and other.key < 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_image_size": {"longest_edge": 112}}, "cuts tiles of 112 pixels"),
        ({"max_image_size": {"shortest_edge": 56}}, "max_image_size is {'shortest_edge': 56}"),
        ({"size": {"longest_edge": -4}}, "size is {'longest_edge': -4}"),
        ({"do_normalize": False}, "do_normalize is False"),
        ({"do_resize": None}, "do_resize is None"),
        ({"image_mean": [0.5]}, r"image_mean is \[0.5\]"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"rescale_factor": "1/255"}, "rescale_factor is '1/255'"),
        ({"resample": 9}, "resample is 9"),
        ({"do_image_splitting": "yes"}, "do_image_splitting is 'yes'"),
        ({"return_row_col_info": False}, "return_row_col_info is False"),
        ({"do_flip": True}, "do_flip is True"),
    ],
)
def test_processors_that_arent_built(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_idefics3(tmp_path)
    set_processor(tmp_path, **values)
    with pytest.raises(ModelError, match=said):
        pictures_of(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"size": {"shortest_edge": 64}},
        {"crop_size": {"height": 56, "width": 28}},
        {"do_center_crop": False},
        {"size": {"height": 56, "width": 56}},
        {"size": [1, 2]},
        {"crop_size": [56, 56]},
        {"size": {"shortest_edge": [1]}},
        {"do_pad": 1},
    ],
)
def test_squares_that_arent_built(values: dict[str, Any], tmp_path: Path) -> None:
    make_llava(tmp_path)
    set_processor(tmp_path, **values)
    with pytest.raises(ModelError, match=r"isn't built for (a tower of 56 × 56|this family)"):
        pictures_of(tmp_path)


@pytest.mark.parametrize(
    "size", [*SIZES, (56, 112), (80, 160), (79, 158), (112, 112), (100, 100), (70, 70)]
)
def test_cut_by_the_nearest_shape(size: tuple[int, int], canvas: SeeingModel) -> None:
    """A tie goes to more tiles where the picture has pixels for them."""
    check(canvas, picture(*size))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": {"height": 64, "width": 64}}, "its tower is of 56 × 56 pixels"),
        ({"size": {"shortest_edge": 56}}, "its tower is of 56 × 56 pixels"),
        ({"min_patches": 7}, "min_patches 7 are more than max_patches 6"),
        ({"max_patches": 0}, "max_patches is 0"),
        ({"min_patches": "1"}, "min_patches is '1'"),
    ],
)
def test_canvases_that_arent_built(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_internvl(tmp_path)
    set_processor(tmp_path, **values)
    with pytest.raises(ModelError, match=said):
        pictures_of(tmp_path)


def test_a_side_that_patches_dont_fill(tmp_path: Path) -> None:
    """As of SmolVLM-Instruct and of LLaVA's SigLIP, 384 pixels in patches of 14."""
    for made in (
        make_idefics3(tmp_path / "tiles", pixels=60),
        make_llava(tmp_path / "whole", tower="siglip", pixels=60),
    ):
        check(made, picture(100, 70))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"patch_size": 16}, "patch_size is 16, its tower's 14"),
        ({"merge_size": 1}, "merge_size is 1"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels 9 are more than max_pixels 4"),
        ({"size": 448}, "size is 448"),
        ({"size": {"height": 56, "width": 56}}, "size is {'height': 56"),
        ({"min_pixels": 0}, "min_pixels is 0"),
        ({"max_pixels": "many"}, "max_pixels is 'many'"),
        ({"size": {"shortest_edge": "no"}}, "size is"),
    ],
)
def test_grids_that_arent_built(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_qwen(tmp_path)
    set_processor(tmp_path, **values)
    with pytest.raises(ModelError, match=said):
        pictures_of(tmp_path)


@pytest.mark.parametrize(
    ("size", "settings", "tokens", "digest"),
    [
        ((56, 56), "tiny", 9, "3285dba43db3dc45"),
        ((57, 56), "tiny", 9, "f1beb5ce118fb38a"),
        ((30, 20), "tiny", 6, "60dc5f24fe667453"),
        ((1, 199), "tiny", 12, "fa0c01dcefd68054"),
        ((199, 1), "tiny", 12, "571c00e8acb9dcd2"),
        ((512, 64), "tiny", 45, "92b1ca266f9fb018"),
        ((100, 333), "tiny", 33, "0dda3487a8ede69c"),
        ((2000, 1500), "tiny", 48, "1521b274ce6587da"),
        ((300, 200), "published", 70, "b2f67a05284410c6"),
        ((1000, 700), "published", 1783, "83ae5a0ebfc66d7f"),
        ((700, 1000), "published", 1783, "bbbcdfdc87216bfe"),
    ],
)
def test_cut_into_pieces(
    size: tuple[int, int], settings: str, tokens: int, digest: str, tmp_path: Path
) -> None:
    """The text and bytes of transformers 5.24's processor, which needs torchvision (0.28)."""
    make_lfm2(tmp_path)
    if settings == "published":
        config = json.loads((tmp_path / "config.json").read_text())
        config["vision_config"]["patch_size"] = 16
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "preprocessor_config.json").write_text("{}")
    found = pictures_of(tmp_path).cutter.cut(picture(*size))
    assert found.text.count("<image>") == found.tokens == tokens
    seen = hashlib.sha256(found.text.encode())
    for tile in found.tiles:
        seen.update(tile.numpy().tobytes())
    assert seen.hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"encoder_patch_size": 16}, "encoder_patch_size is 16, its tower's 8"),
        ({"downsample_factor": 1}, "downsample_factor is 1, its tower's 2"),
        ({"tile_size": 40}, "tile_size is 40"),
        ({"resample": 3}, "resample is 3"),
        ({"min_tiles": 5}, "processor's min_tiles 5 are more than max_tiles 4"),
        ({"min_image_tokens": 13}, "min_image_tokens 13 are more than max_image_tokens 12"),
        ({"max_image_tokens": 0}, r"max_image_tokens is 0, .* \(1 to 16,384 are\)"),
        ({"use_image_special_tokens": False}, "use_image_special_tokens is False"),
        ({"use_thumbnail": 1}, "use_thumbnail is 1"),
        ({"max_pixels_tolerance": "2"}, "max_pixels_tolerance is '2'"),
    ],
)
def test_pieces_that_arent_built(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_lfm2(tmp_path)
    set_processor(tmp_path, **values)
    with pytest.raises(ModelError, match=said):
        pictures_of(tmp_path)


def test_marks_around_pieces_are_said_outside(tmp_path: Path) -> None:
    """As the whole processor's own."""
    make_lfm2(tmp_path)
    own = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {"max_tiles": None}
    for marks in (True, False):
        whole = {"use_image_special_tokens": marks, "image_processor": own}
        (tmp_path / "processor_config.json").write_text(json.dumps(whole))
        if marks:
            assert pictures_of(tmp_path).cutter.cut(picture(30, 20)).tokens == 6
        else:
            with pytest.raises(ModelError, match="use_image_special_tokens is False"):
                pictures_of(tmp_path)


@pytest.mark.parametrize("bounds", [(4, 12), (64, 256), (256, 256), (200, 256), (1, 1)])
def test_no_piece_has_more_tokens_than_is_planned_for(bounds: tuple[int, int]) -> None:
    cutter = PieceCutter(48, 8, 2, (1, 1), bounds, 2.0, True, "<image>")
    sizes = np.unique(np.geomspace(1, 60_000, 90).astype(int)).tolist()
    most = 0
    for width in sizes:
        for height in (h for h in sizes if max(h, width) <= 200 * min(h, width)):
            high, wide = cutter._whole(width, height)
            most = max(most, high * wide // cutter.unit**2)
    assert bounds[0] <= most <= cutter.most_tokens <= 2 * most + 20


def test_pixels_as_processors_once_said_them(tmp_path: Path) -> None:
    made = make_qwen(tmp_path)
    set_processor(tmp_path, size=None, min_pixels=28 * 28 * 6, max_pixels=28 * 28 * 12)
    for size in ((20, 20), (300, 400)):
        assert 6 <= pictures_of(made.folder).cutter.cut(picture(*size)).tokens <= 12


def test_what_may_be_chosen_otherwise(tmp_path: Path) -> None:
    grid, tiles, whole, canvas = (tmp_path / x for x in ("grid", "tiles", "whole", "canvas"))
    pieces = tmp_path / "pieces"
    make_lfm2(pieces)
    make_internvl(canvas)
    make_qwen(grid)
    make_idefics3(tiles)
    make_llava(whole)

    def tokens(folder: Path, **instead: Any) -> int:
        llm = LLM(folder, mm_processor_kwargs=instead)
        assert llm.runtime.sight is not None
        return llm.runtime.sight.pictures.cutter.cut(picture(300, 300)).tokens

    assert tokens(grid, max_pixels=57 * 57, min_pixels=1) == 4
    assert tokens(grid, size={"shortest_edge": 1, "longest_edge": 84 * 84}) == 9
    assert tokens(tiles, do_image_splitting=False) == 4
    assert tokens(tiles, size={"longest_edge": 112}) == 20
    assert tokens(canvas) == 5 * 4
    assert tokens(canvas, crop_to_patches=False) == tokens(canvas, max_patches=1) == 4
    assert tokens(pieces) == 4 * 9 + 9
    assert tokens(pieces, use_thumbnail=False) == 4 * 9
    assert tokens(pieces, do_image_splitting=False) == 9
    assert tokens(pieces, max_tiles=2) == 2 * 9 + 9
    assert tokens(pieces, max_tiles=1) == 9
    assert tokens(pieces, min_image_tokens=25, max_image_tokens=36) == 4 * 9 + 36
    for folder, key, said in (
        (grid, "max_pixel", r"not 'max_pixel'\. Did you mean 'max_pixels'"),
        (tiles, "max_pixels", "may say size, do_image_splitting, not 'max_pixels'"),
        (whole, "crop_size", "have nothing to say, not 'crop_size'"),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(folder, mm_processor_kwargs={key: 5})
    with pytest.raises(ConfigError, match="mm_processor_kwargs: max_pixels can't be 'a' for"):
        LLM(grid, mm_processor_kwargs={"max_pixels": "a"})
    with pytest.raises(ConfigError, match=r"min_tiles 5 are more than max_tiles 4\. Choose both"):
        LLM(pieces, mm_processor_kwargs={"min_tiles": 5})
    with pytest.raises(ConfigError, match=r"max_image_tokens can't be 0 .* \(1 to 16,384 are\)"):
        LLM(pieces, mm_processor_kwargs={"max_image_tokens": 0})
    with pytest.raises(ConfigError, match="of models that see pictures"):
        LLM(mm_processor_kwargs={"max_pixels": 5})
    with pytest.raises(ConfigError, match="must be an object such as"):
        LLM(grid, mm_processor_kwargs=[5])


def test_no_processor(tmp_path: Path) -> None:
    make_llava(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        pictures_of(tmp_path)


# ── opening ──────────────────────────────────────────────────────────────────────────────────────


def as_bytes(image: Image.Image, kind: str, **options: Any) -> bytes:
    memory = io.BytesIO()
    image.save(memory, kind, **options)
    return memory.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF"])
def test_the_same_picture_however_it_comes(kind: str, tmp_path: Path) -> None:
    image = picture(20, 30).quantize(64).convert("RGB")  # few colours, so that GIF has them all
    data, want = as_bytes(image, kind), np.asarray(image)
    (tmp_path / "file").write_bytes(data)
    url = f"data:image/x;base64,{base64.b64encode(data).decode()}"
    for given in (data, tmp_path / "file", str(tmp_path / "file"), url, image, want):
        found = open_picture(given)
        assert found.mode == "RGB" and np.array_equal(np.asarray(found), want)


def test_upright_and_on_white() -> None:
    image = picture(20, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert open_picture(as_bytes(image, "JPEG", exif=exif)).size == (30, 20)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert open_picture(clear).getpixel((1, 1)) == (255, 255, 255)
    half = Image.new("LA", (4, 4), (0, 255))
    assert open_picture(half).getpixel((1, 1)) == (0, 0, 0)


PNG = as_bytes(picture(40, 40), "PNG")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", "0 bytes aren't a picture"),
        (b"not a picture", "13 bytes aren't a picture that is read: PNG, JPEG"),
        (PNG[:200], "can't be read"),
        (PNG[:40], "can't be read|aren't a picture"),
        (b"%PDF-1.4", "aren't a picture"),
        ("nowhere.png", "No such file"),
        ("nul\0.png", "can't be read"),
        ("http://example.org/cat.png", "isn't fetched. Download it"),
        ("data:image/png,abc", "must look like data:image/png;base64"),
        ("data:image/png;base64,***", "isn't base64"),
        (7, "not int"),
        (np.zeros((4, 4), np.uint8), r"not uint8 \[4, 4\]"),
        (np.zeros((4, 4, 3), np.float32), "not float32"),
        (np.zeros((0, 4, 3), np.uint8), r"\[0, 4, 3\]"),
        (Image.new("1", (9000, 9000)), "9,000 × 9,000 pixels"),
        (Image.new("1", (70_000, 1)), "a side has at most 65,535"),
        (Image.new("F", (4, 4)), r"numbers of 32 bits \(F\)"),
    ],
)
def test_what_isnt_a_picture(given: Any, said: str) -> None:
    with pytest.raises(InvalidPromptError, match=said):
        open_picture(given)


def test_a_bomb_isnt_unpacked() -> None:
    """A small file of many pixels is refused by its header."""
    data = as_bytes(Image.new("1", (28_000, 2_500)), "PNG")
    assert len(data) < 100_000
    with pytest.raises(InvalidPromptError, match="28,000 × 2,500 pixels"):
        open_picture(data)


def test_long_and_narrow(whole: SeeingModel, grid: SeeingModel, tmp_path: Path) -> None:
    for model in (whole, grid, make_lfm2(tmp_path)):
        cut = pictures_of(model.folder).cutter.cut
        with pytest.raises(InvalidPromptError, match="1 × 300 pixels is too long and narrow"):
            cut(picture(1, 300))


def test_too_long_to_be_made_square(tmp_path: Path) -> None:
    made = make_llava(tmp_path)
    set_processor(tmp_path, do_pad=True)
    with pytest.raises(InvalidPromptError, match="9,000 × 2 pixels is too long"):
        pictures_of(made.folder).cutter.cut(picture(9000, 2))


def test_together_they_are_too_large() -> None:
    """Seen before the first is unpacked."""
    broken = as_bytes(Image.new("1", (8000, 8000)), "PNG")[:100]
    with pytest.raises(InvalidPromptError, match="5 pictures have 320,000,000 pixels together"):
        open_pictures_of([broken] * 5)


def test_sixteen_bits() -> None:
    ramp = np.arange(0, 1 << 16, 256, dtype=np.uint16)[None]
    found = np.asarray(open_picture(as_bytes(Image.fromarray(ramp), "PNG")))
    assert found[0, :, 0].tolist() == list(range(256))


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"needs Pillow.*\[vision\]"):
        opening.pillow()
