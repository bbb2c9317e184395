from pathlib import Path

import pytest
from recipes.transport import join, split

from penstock.errors import ConfigError


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for name in ("base", "draft"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "model.safetensors").write_bytes(name.encode() * 5000)
    return tmp_path / "work"


def test_parts_are_small_and_join_to_the_same_files(work: Path, tmp_path: Path) -> None:
    files = split(work, ["base", "draft"], tmp_path / "parts", part_bytes=20_000)
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) <= 20_000
    assert join(tmp_path / "parts", tmp_path / "joined") == ["base", "draft"]
    for name in ("base", "draft"):
        file = f"{name}/model.safetensors"
        assert (tmp_path / "joined" / file).read_bytes() == (work / file).read_bytes()


def test_a_part_that_is_broken_or_missing_is_an_error(work: Path, tmp_path: Path) -> None:
    files = split(work, ["base"], tmp_path / "parts", part_bytes=20_000)
    data = bytearray(files[0].read_bytes())
    data[700] ^= 1
    files[0].write_bytes(data)
    with pytest.raises(ConfigError, match="checksum"):
        join(tmp_path / "parts", tmp_path / "joined")
    files[0].unlink()
    with pytest.raises(ConfigError, match=r"lacks models.00"):
        join(tmp_path / "parts", tmp_path / "joined")


def test_a_model_that_is_missing_is_named(work: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat"):
        split(work, ["base", "chat"], tmp_path / "parts")
