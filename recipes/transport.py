"""Models in parts small enough to be moved: a tar file cut to pieces, and put together again."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError

PART_BYTES = 15 * 2**20


def split(work: Path, names: Sequence[str], out: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the folders `names` of `work` to `out`/models.NN and models.json; returns the files."""
    missing = [name for name in names if not (work / name).is_dir()]
    if missing:
        raise ConfigError(f"{work} has no {', '.join(missing)}: train first.")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            for file in sorted((work / name).iterdir()):
                archive.add(file, f"{name}/{file.name}")
    data = buffer.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for number, start in enumerate(range(0, len(data), part_bytes)):
        file = out / f"models.{number:02d}"
        file.write_bytes(data[start : start + part_bytes])
        files.append(file)
    about = {"parts": len(files), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (out / "models.json").write_text(json.dumps(about) + "\n")
    return [*files, out / "models.json"]


def join(parts: Path, work: Path) -> list[str]:
    """Restore the folders in `work`; returns their names. Raises ConfigError for a broken part."""
    if not (parts / "models.json").exists():
        raise ConfigError(f"{parts} has no models.json: is it a folder that `split` wrote?")
    about = json.loads((parts / "models.json").read_text())
    files = [parts / f"models.{number:02d}" for number in range(about["parts"])]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"{parts} lacks {', '.join(missing)} of {about['parts']} parts.")
    data = b"".join(file.read_bytes() for file in files)
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise ConfigError(
            f"The {about['parts']} parts in {parts} have {len(data):,} bytes whose checksum isn't "
            f"that of the {about['bytes']:,} that were split. Copy them again."
        )
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = sorted({member.name.split("/")[0] for member in archive.getmembers()})
        archive.extractall(work, filter="data")
    return names
