"""From what a user calls a model to a folder or a GGUF file on this machine."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, MissingExtraError, ModelNotFoundError, get_extra, nearest
from penstock.models.files import SETTINGS
from penstock.models.gguf.container import LATER_PART, is_gguf
from penstock.models.gguf.seeing import PATTERN as PROJECTORS

EMBEDDED = ("stories", "stories-chat")
"""Models that come with the package, in `assets/`: one goes on with a text, one replies."""

NAMED = (*EMBEDDED, "stories-draft")
"""Those, and the one that drafts for them."""

ADAPTERS = ("stories-shakespeare", "stories-verse")
"""LoRA adapters of `stories` that come along."""

_GUESSING = {
    "draft_model": "stories-draft",
    "medusa": "{}-medusa",
    "eagle": "{}-eagle",
    "eagle3": "{}-eagle",
}
"""What guesses for them and comes along, by the method: one draft for both, heads for each."""

_ASSETS = Path(__file__).parent.parent / "assets"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_WANTED = ["*.safetensors", *SETTINGS]
_WANTED_FOLDER = "additional_chat_templates"
_UNWANTED = [
    "consolidated*",  # Mistral's second layout
    f"{_WANTED_FOLDER}/*/*",
    # and files in other folders, which hold other formats: a pattern can't say "other" but by the
    # place of the first letter that differs
    *(f"{_WANTED_FOLDER[:i]}[!{_WANTED_FOLDER[i]}]*/*" for i in range(len(_WANTED_FOLDER))),
    *(f"{_WANTED_FOLDER[:i]}/*" for i in range(len(_WANTED_FOLDER))),
    f"{_WANTED_FOLDER}[!/]*/*",
]


def adapter_folder(adapter: str | Path) -> Path:
    """The folder of an adapter: an embedded one's name, or where it lies.

    A folder of an embedded adapter's name is reached as `./stories-verse`.
    """
    if not isinstance(adapter, str | Path) or not str(adapter).strip():
        raise ModelNotFoundError(f"An adapter's folder must be a path, not {adapter!r:.80}.")
    if adapter in ADAPTERS:
        return _embedded(str(adapter), None, "adapter_config.json")
    return Path(adapter)


def resolve(
    model: str | Path,
    revision: str | None = None,
    *,
    also: Iterable[str] = (),
    offered: Sequence[str] = NAMED,
) -> Path:
    """The folder of `model`: an existing one, an embedded model's, or a snapshot from the hub.

    Or a GGUF file: the one given, or the only model in a folder without config.json.

    revision: branch, tag or commit of a hub id; None is its main branch. also: patterns of files
    that are fetched from there too. offered: which of what comes along an error names.
    A folder of an embedded model's name is reached as `./stories`.
    """
    if model in EMBEDDED or model in _companions():
        return _embedded(str(model), revision, "config.json")
    if model in ADAPTERS:
        return _embedded(str(model), revision, "adapter_config.json")
    path = _place(model)
    if model and path.is_dir():
        _no_revision(path, revision)
        if path.name.endswith(".partial"):
            raise ModelNotFoundError(
                f"{path} was being written when its export or build ended. Start that again."
            )
        return _only_file(path) or path
    if is_gguf(path):
        _no_revision(path, revision)
        return path
    if path.is_file():
        raise ModelNotFoundError(
            f"{path} is a file, but no GGUF. Give the folder that holds config.json."
        )
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(
            f"There is no folder {path}.{_near(path)} Give a folder, a .gguf file, what comes "
            f"with penstock ({', '.join(offered)}) or a hub id like 'org/name'."
            f"{nearest(str(model), [*offered, *NAMED, *sorted(_companions()), *ADAPTERS])}"
        )
    return _download(model, revision, path, also)


def _place(model: str | Path) -> Path:
    """Where `model` would be if it were on this machine."""
    try:
        path = Path(model).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long; nobody's home
        raise ModelNotFoundError(
            f"{str(model)[:200]!r} can't be looked for: {error}. Give a folder, a .gguf file or a "
            "hub id like 'org/name'."
        ) from error
    return path


def _embedded(name: str, revision: str | None, needed: str) -> Path:
    """The folder in `assets/` of what comes with the package, if this installation has it."""
    _no_revision(name, revision)
    folder = _ASSETS / name
    if not (folder / needed).exists():
        raise ModelNotFoundError(
            f"{name!r} comes with penstock's wheel, and this installation hasn't got it: there "
            f"is no {needed} in {folder}. Install the whole wheel, or give a model of your own: a "
            "folder with config.json and *.safetensors, a .gguf file, or a hub id like 'org/name'."
        )
    return folder


def _companions() -> set[str]:
    """The names of all that guesses for the embedded models."""
    return {name for method in _GUESSING for name in companions(method)}


def companions(method: str) -> list[str]:
    """The names of what guesses by `method` for the embedded models."""
    return sorted({_GUESSING[method].format(model) for model in EMBEDDED})


def shipped(folder: Path, method: str) -> Path:
    """The folder of what guesses by `method` for the embedded model in `folder`.

    Raises ConfigError for any other model, which needs to be told.
    """
    names = [name for name in EMBEDDED if folder == _ASSETS / name]
    if not names:
        raise ConfigError(
            f"method={method!r} needs a model: a folder, a hub id or a name of what was made for "
            f"{folder}. Only embedded models ({', '.join(EMBEDDED)}) bring their own."
        )
    return resolve(_GUESSING[method].format(names[0]))


def _only_file(folder: Path) -> Path | None:
    """The GGUF file of a folder that has nothing else to load."""
    if (folder / "config.json").exists():
        return None
    beside = set(folder.glob(PROJECTORS))
    files = [file for file in sorted(folder.glob("*.gguf")) if file not in beside]
    models = [file for file in files if not LATER_PART.search(file.name)]
    if len(models) > 1:
        raise ModelNotFoundError(
            f"{folder} has no config.json, but {len(models)} models in GGUF: "
            f"{', '.join(file.name for file in models[:8])}. Give one of the files."
        )
    return models[0] if models else None


def _no_revision(model: str | Path, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(f"revision={revision!r} is of the hub, but {model} is on this machine.")


def _download(name: str, revision: str | None, path: Path, also: Iterable[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            f"{name!r} is no folder here, and fetching it from the hub needs huggingface_hub: "
            f"{get_extra('hub')}. Or give a folder."
        ) from error
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=[*_WANTED, *also], ignore_patterns=_UNWANTED
        )
    except Exception as error:  # its own, httpx's and the operating system's
        raise ModelNotFoundError(_failure(name, revision, path, error)) from error
    return Path(folder)


def _failure(name: str, revision: str | None, path: Path, error: Exception) -> str:
    kind = type(error).__name__
    where = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    way_out = f"{_near(path)} A folder with config.json and *.safetensors needs no hub."
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"):
        return f"The hub has no {where}, or it is private and needs HF_TOKEN.{way_out}"
    if kind == "GatedRepoError":
        return f"{where} is gated: accept its terms on the hub and set HF_TOKEN.{way_out}"
    if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set" if offline else "the hub can't be reached"
        return f"{where} isn't in the local cache, and {why}.{way_out}"
    return f"Fetching {where} from the hub failed: {kind}: {_first_line(error)}.{way_out}"


def _first_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no reason given"


def _near(path: Path) -> str:
    """Folders beside `path` with a similar name, as a phrase."""
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    try:
        beside = sorted(p.name for p in parent.iterdir() if p.is_dir())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=3, cutoff=0.5)
    return f" Near it: {', '.join(str(parent / name) for name in close)}." if close else ""
