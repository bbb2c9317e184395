"""Where peers and converted checkpoints live, and how their programs are called."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import PeerError, Reply, Settings, Sizes, Work

from penstock.hardware import cache_folder

RUNNERS = Path(__file__).parent / "runners"
MARK = "PEERS "  # begins the line of a runner's output that is its reply
CONVERT_TIMEOUT_S = 3600.0


def default_home() -> Path:
    """PENSTOCK_PEERS, else a folder beside Penstock's measured peaks."""
    chosen = os.environ.get("PENSTOCK_PEERS")
    return Path(chosen) if chosen else cache_folder() / "peers"


def digest(checkpoint: Path) -> str:
    """Of the configuration and every weight: equal checkpoints share a conversion."""
    sha = hashlib.sha256()
    for file in [checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))]:
        with file.open("rb") as stream:
            sha.update(hashlib.file_digest(stream, "sha256").digest())
    return sha.hexdigest()[:16]


def sizes(checkpoint: Path) -> Sizes:
    """Counted in the headers of the weights; a tied head is the embedding, and of experts those
    count that a token takes."""
    matrices, heads = 0.0, {}
    config = json.loads((checkpoint / "config.json").read_text())
    experts = config.get("num_experts", config.get("n_routed_experts", 1))
    share = config.get("num_experts_per_tok", 1) / experts
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
        for name, tensor in header.items():
            shape = tensor.get("shape", [])
            if len(shape) == 2 and ".layers." in name:
                matrices += shape[0] * shape[1] * (share if ".experts." in name else 1.0)
            elif len(shape) == 2:
                heads[name] = shape[0] * shape[1]
    head = heads.get("lm_head.weight", max(heads.values(), default=0))
    return Sizes(round(matrices), head)


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` unless it was before; what fails half-way leaves nothing."""
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder


def call(
    command: Sequence[str | Path], *, timeout_s: float, threads: int, cwd: Path | None = None
) -> str:
    """Run a program to its end with `threads` threads; its standard output.

    Raises PeerError with its last words.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            cwd=cwd,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{Path(words[0]).name} took longer than {timeout_s:.0f} s.") from None
    except OSError as error:
        raise PeerError(str(error)) from None
    if done.returncode:
        raise PeerError(_last_words(done.stderr) or f"{words[0]} ended with {done.returncode}.")
    return done.stdout


def _last_words(text: str) -> str:
    """Where an error says what it is: an exception's line, else the last one not indented."""
    lines = [line.strip() for line in text.splitlines() if line and not line[0].isspace()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (named or lines or [""])[-1]


def job(model: Path, works: Sequence[Work], settings: Settings, **options: Any) -> dict[str, Any]:
    """What a runner is told."""
    return {
        "model": str(model),
        "works": [{"name": work.name, **asdict(work)} for work in works],
        "threads": settings.threads,
        "tokens": settings.tokens,
        "seed": settings.seed,
        **options,
    }


def call_runner(
    python: Path, runner: str, told: dict[str, Any], *, timeout_s: float, threads: int
) -> Reply:
    """Run `runners/<runner>.py` with a peer's own Python and read its reply."""
    command = [python, RUNNERS / f"{runner}.py", json.dumps(told)]
    return read_reply(call(command, timeout_s=timeout_s, threads=threads))


def read_reply(output: str) -> Reply:
    """The marked line of a runner's output; engines print what they like around it."""
    marked = [line for line in output.splitlines() if line.startswith(MARK)]
    if not marked:
        raise PeerError("The runner ended without a reply.")
    return Reply(**json.loads(marked[-1].removeprefix(MARK)))


def python_of(folder: Path) -> Path:
    """The interpreter of the virtual environment in a peer's folder."""
    return folder / "venv" / "bin" / "python"


def versions(python: Path, *packages: str) -> str | None:
    """`name version` of each package that `python` has; None where the first is missing."""
    script = (
        "import sys, importlib.metadata as m\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    try:
        lines = call([python, "-c", script, *packages], timeout_s=60, threads=1).splitlines()
    except PeerError:
        return None
    return ", ".join(lines) if lines and lines[0].split()[0] == packages[0] else None
