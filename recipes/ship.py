"""From the folders that training left to the package's `assets/`, where users find them by name."""

import json
import shutil
from pathlib import Path

from penstock.errors import ConfigError
from recipes.family import ADAPTERS

NAMES = {
    "base": "stories",
    "chat": "stories-chat",
    "draft": "stories-draft",
    "shakespeare": "stories-shakespeare",
    "verse": "stories-verse",
}
"""What each member is called in the package."""

MAX_BYTES = 40_000_000  # of all members; what else guesses for them has a budget of its own
_MODEL = (
    *("README.md", "config.json", "generation_config.json", "loss.svg", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)
_ADAPTER = ("README.md", "adapter_config.json", "adapter_model.safetensors", "loss.svg")


def files_of(member: str) -> tuple[str, ...]:
    """What of a member's folder users need."""
    if member in ADAPTERS:
        return _ADAPTER
    return (*_MODEL, "acceptance.json") if member == "draft" else _MODEL


def ship(work: Path, assets: Path) -> str:
    """Copy every member's files to `assets`, replacing what is there; returns a table of sizes.

    Raises ConfigError, and copies nothing, if a file is missing or the members are too large.
    """
    sources = [work / member / name for member in NAMES for name in files_of(member)]
    missing = [str(file) for file in sources if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing)} files are missing, {missing[0]} first: train every member, then run "
            "`python -m recipes evaluate`, which writes their cards; what the draft is good for "
            "is measured by `python -m recipes.speculation measure --keep`."
        )
    total = sum(file.stat().st_size for file in sources)
    if total > MAX_BYTES:
        raise ConfigError(
            f"The family takes {total / 1e6:.1f} MB, and {MAX_BYTES / 1e6:.0f} MB may ship: train "
            "a smaller one (`pretrain --size small`)."
        )
    lines = ["| member | name | MB |", "|---|---|---|"]
    for member, name in NAMES.items():
        partial, folder = assets / f"{name}.partial", assets / name
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in files_of(member):
            shutil.copyfile(work / member / file, partial / file)
        if member in ADAPTERS:
            _rename_base(partial / "adapter_config.json")
        size = sum(file.stat().st_size for file in partial.iterdir())
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        lines.append(f"| {member} | {name} | {size / 1e6:.1f} |")
    return "\n".join([*lines, f"| all | | {total / 1e6:.1f} |"])


def _rename_base(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = NAMES["base"]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
