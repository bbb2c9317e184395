"""`resolve`: folders, embedded models, hub ids; no network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from penstock.errors import ConfigError, MissingExtraError, ModelNotFoundError
from penstock.models import hub


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the hub does: return a folder or raise; the calls it got are returned."""
    calls: list[dict[str, Any]] = []

    def set_answer(result: Path | Exception) -> list[dict[str, Any]]:
        def download(name: str, **options: Any) -> str:
            calls.append({"name": name, **options})
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    set_answer(AssertionError("the hub was asked"))
    return set_answer


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    assert hub.resolve(folder) == folder
    assert hub.resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/org/name") == folder
    with pytest.raises(ConfigError, match="revision='v1' is of the hub"):
        hub.resolve(folder, "v1")
    assert answer is not None


def test_embedded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ASSETS", tmp_path / "assets")
    (tmp_path / "stories").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="'stories' comes with penstock's wheel"):
        hub.resolve("stories")
    (tmp_path / "assets" / "stories").mkdir(parents=True)
    (tmp_path / "assets" / "stories" / "config.json").write_text("{}")
    assert hub.resolve("stories") == tmp_path / "assets" / "stories"
    assert hub.resolve("./stories") == Path("stories")


def test_what_comes_with_embedded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name, or by the folder of the model that it guesses for."""
    monkeypatch.setattr(hub, "_ASSETS", tmp_path)
    stories = tmp_path / "stories"
    kinds = {"draft_model": "draft", "medusa": "medusa", "eagle": "eagle", "eagle3": "eagle"}
    for method, kind in kinds.items():
        with pytest.raises(ModelNotFoundError, match=f"'stories-{kind}' comes with"):
            hub.shipped(stories, method)
        with pytest.raises(ConfigError, match=f"method='{method}' needs a model: .* for elsewhere"):
            hub.shipped(Path("elsewhere"), method)
    for kind in ("draft", "medusa", "eagle"):
        (tmp_path / f"stories-{kind}").mkdir()
        (tmp_path / f"stories-{kind}" / "config.json").write_text("{}")
        assert hub.resolve(f"stories-{kind}") == tmp_path / f"stories-{kind}"
    for method, kind in kinds.items():
        assert hub.shipped(stories, method) == tmp_path / f"stories-{kind}"
    chat = tmp_path / "stories-chat"
    assert hub.shipped(chat, "draft_model") == tmp_path / "stories-draft"
    for kind in ("medusa", "eagle"):
        with pytest.raises(ModelNotFoundError, match=f"'stories-chat-{kind}' comes with"):
            hub.shipped(chat, kind)


@pytest.mark.parametrize("as_path", [True, False])
def test_a_folder_that_is_not_there(tmp_path: Path, as_path: bool, answer: Any) -> None:
    (tmp_path / "models" / "llama-3.2-1b").mkdir(parents=True)
    for wrong in ("models/llama-3.2-1B", "model/llama", "models/lama-3.2-1b/"):
        name = tmp_path / wrong if as_path else f"{tmp_path}/{wrong}"
        with pytest.raises(ModelNotFoundError, match=rf"no folder .*Near it: {tmp_path}/models"):
            hub.resolve(name)
    with pytest.raises(ModelNotFoundError, match=r"no folder [^ ]*zzz\. Give a folder"):
        hub.resolve(tmp_path / "zzz")
    assert answer is not None


def test_names_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"hub id like 'org/name'.* mean 'stories'\?"):
        hub.resolve("storys")
    for wrong, right in (
        ("storys-medusa", "stories-medusa"),
        ("stories-chat-egle", "stories-chat-eagle"),
        ("stories-vers", "stories-verse"),
    ):
        with pytest.raises(ModelNotFoundError, match=f"{', '.join(hub.NAMED)}.* mean '{right}'"):
            hub.resolve(wrong)
    with pytest.raises(ModelNotFoundError, match=r"\(stories-chat-eagle, stories-eagle\).* mean"):
        hub.resolve("storys-eagle", offered=hub.companions("eagle3"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFoundError, match="is a file"):
        hub.resolve("model.bin")
    for name in ("~nobody-of-that-name/model", "x" * 5000):
        with pytest.raises(ModelNotFoundError, match="can't be looked for"):
            hub.resolve(name)
    for name in ("", "a/b/c", "../x", "org/", "org/na me", "org\\name"):
        with pytest.raises(ModelNotFoundError, match="There is no folder"):
            hub.resolve(name)


def test_a_hub_id(tmp_path: Path, answer: Any) -> None:
    calls = answer(tmp_path)
    assert hub.resolve("org/some-name_1.5", revision="v2") == tmp_path
    assert calls[0]["name"] == "org/some-name_1.5"
    assert calls[0]["revision"] == "v2"
    patterns = (calls[0]["allow_patterns"], calls[0]["ignore_patterns"])
    files = (
        "model-00001-of-00002.safetensors model.safetensors.index.json config.json "
        "generation_config.json tokenizer.json tokenizer_config.json tokenizer.model merges.txt "
        "chat_template.jinja pytorch_model.bin model.gguf onnx/model.onnx original/params.json "
        "consolidated.safetensors original/consolidated.safetensors modeling_x.py README.md "
        "a/config.json additional/config.json additional_chat_template/x.jinja z/x.jinja "
        "additional_chat_templates_2/x.jinja additional_chat_templates/deep/x.jinja"
    ).split()
    files.insert(9, "additional_chat_templates/tool_use.jinja")
    filtered = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=patterns[0], ignore_patterns=patterns[1]
    )
    assert list(filtered) == files[:10]
    hub.resolve("org/heads", also=("medusa_lm_head.pt", "pytorch_model.bin"))
    more = huggingface_hub.utils.filter_repo_objects(
        [*files, "medusa_lm_head.pt", "medusa_lm_head.safetensors"],
        allow_patterns=calls[1]["allow_patterns"],
        ignore_patterns=calls[1]["ignore_patterns"],
    )
    assert set(more) == {*files[:10], "pytorch_model.bin", *(
        f"medusa_lm_head.{kind}" for kind in ("pt", "safetensors")
    )}  # fmt: skip


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            RepositoryNotFoundError("no", response=RESPONSE),
            "The hub has no 'org/name' at rev",
        ),
        (GatedRepoError("no", response=RESPONSE), "'org/name' .*is gated"),
        (LocalEntryNotFoundError("no"), "isn't in the local cache, and the hub can't be reached"),
        (ConnectionError("no route"), "failed: ConnectionError: no route"),
        (OSError(28, "No space left on device"), "failed: OSError: .*No space left"),
    ],
)
def test_when_the_hub_fails(answer: Any, failure: Exception, message: str) -> None:
    answer(failure)
    with pytest.raises(ModelNotFoundError, match=f"{message}.* needs no hub") as raised:
        hub.resolve("org/name", "main")
    assert raised.value.__cause__ is failure


def test_offline(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(LocalEntryNotFoundError("no"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"and HF_HUB_OFFLINE is set\. A folder"):
        hub.resolve("org/name")


def test_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub itself, told to stay offline, with an empty cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="'org/name' isn't in the local cache, and HF_HUB"):
        hub.resolve("org/name")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"clone: pip install .*'\.\[hub\]"):
        hub.resolve("org/name")
