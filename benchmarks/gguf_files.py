"""The same GGUF file in llama.cpp and in Penstock, side by side.

    python -m benchmarks.gguf_files --model CHECKPOINT --types Q4_K_M,Q4_0,Q8_0 --json OUT

llama.cpp's own tools make the files, in the mixtures that they choose: a type's name is what
`llama-quantize` is told, nothing else. Install them with `python -m benchmarks.peers --install
llama.cpp`. Both engines run as they come, in a process of their own, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import home
from benchmarks.peers.llama_cpp import BF16, LlamaCpp
from benchmarks.peers.penstock_peer import Penstock
from benchmarks.peers.protocol import Format, Missing, PeerError, Settings, Work

from penstock.bench.environment import environment
from penstock.hardware import detect
from penstock.models.gguf.source import GgufSource

WORKS = "decode@128,prefill@512,batch8"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_files")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a checkpoint's folder")
    add("--types", default="Q4_K_M,Q5_K_M,Q6_K,Q4_0,Q8_0", help="default: %(default)s")
    add("--work", default=WORKS, help="default: %(default)s")
    add("--rounds", type=int, default=3)
    add("--tokens", type=int, default=32, help="decoded and timed")
    add("--threads", type=int, default=detect().cores)
    add("--timeout", type=float, default=1800.0)
    add("--home", type=Path, default=home.default_home(), help="where peers live; %(default)s")
    add("--json", type=Path, help="where to write the result")
    return parser.parse_args()


def make(peer: LlamaCpp, checkpoint: Path, kind: str, cache: Path) -> Path:
    """The file that llama.cpp's tools make in `kind`."""
    full = peer.prepare(checkpoint, BF16, cache)

    def quantize(folder: Path) -> None:
        tool = peer.home / "llama.cpp" / "build" / "bin" / "llama-quantize"
        command = [str(tool), str(full), str(folder / "model.gguf"), kind]
        home.call(command, timeout_s=home.CONVERT_TIMEOUT_S, threads=1)

    return home.once(cache / f"{full.parent.name}-as-it-comes-{kind}", quantize) / "model.gguf"


def blocks(path: Path) -> dict[str, int]:
    """How many values the file has in each block type."""
    source, found = GgufSource(path), dict[str, int]()
    for name in source.names():
        count = 1
        for size in source.shape(name):
            count *= size
        found[source.stored_as(name)] = found.get(source.stored_as(name), 0) + count
    return found


def median(samples: list[dict[str, float]], work: str) -> float:
    return statistics.median(sample[work] for sample in samples)


def compare(path: Path, kind: str, chosen: argparse.Namespace, works: list[Work]) -> dict[str, Any]:
    """Both engines in turns; ratios are medians of the rounds' ratios."""
    form, names = Format(kind, 16, 0, 0, kind), [work.name for work in works]
    peers = {"llama.cpp": LlamaCpp(chosen.home), "Penstock": Penstock(chosen.home)}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for round_ in range(chosen.rounds):
        settings = Settings(chosen.threads, chosen.tokens, round_, chosen.timeout)
        for name, peer in sorted(peers.items(), reverse=bool(round_ % 2)):
            speeds = peer.run(path, form, works, settings).speeds
            samples[name].append(speeds)
            line = ", ".join(f"{work} {speed:,.1f}" for work, speed in speeds.items())
            print(f"{kind}, round {round_ + 1}: {name}: {line}", file=sys.stderr, flush=True)
    pairs = list(zip(samples["Penstock"], samples["llama.cpp"], strict=True))
    return {
        "type": kind,
        "bytes": path.stat().st_size,
        "values": blocks(path),
        "tokens_per_s": {n: {w: median(s, w) for w in names} for n, s in samples.items()},
        "ratio": {w: statistics.median(a[w] / b[w] for a, b in pairs) for w in names},
        "samples": samples,
    }


def table(result: dict[str, Any]) -> str:
    """Markdown: tokens/s here, and times llama.cpp."""
    works = result["setup"]["works"]
    lines = [f"| file | {' | '.join(works)} |", "|---" * (len(works) + 1) + "|"]
    for each in result["files"]:
        ours = each["tokens_per_s"]["Penstock"]
        cells = (f"{ours[work]:,.1f} ({each['ratio'][work]:.2f}×)" for work in works)
        lines.append(f"| `{each['type']}`, {each['bytes'] / 1e6:,.0f} MB | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command line; the JSON is written after each file."""
    chosen = arguments()
    chosen.home = chosen.home.resolve()
    peer = LlamaCpp(chosen.home)
    found = peer.available()
    if isinstance(found, Missing):
        sys.exit(f"error: {found.reason} Run python -m benchmarks.peers --install llama.cpp")
    try:
        works = [Work.parse(text) for text in chosen.work.split(",")]
    except ValueError as error:
        sys.exit(f"error: {error}")
    cache = chosen.home / "converted" / home.digest(chosen.model.resolve())
    cache.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "benchmark": "gguf_files",
        "setup": {
            "model": chosen.model.resolve().name,
            "works": [work.name for work in works],
            "rounds": chosen.rounds,
            "tokens": chosen.tokens,
            "threads": chosen.threads,
        },
        "peers": {"llama.cpp": found.version},
        "files": [],
        **environment(detect()),
    }
    for kind in chosen.types.split(","):
        try:
            path = make(peer, chosen.model.resolve(), kind, cache)
            result["files"].append(compare(path, kind, chosen, works))
        except PeerError as error:
            sys.exit(f"error: {kind}: {error}")
        if chosen.json:
            chosen.json.parent.mkdir(parents=True, exist_ok=True)
            chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
