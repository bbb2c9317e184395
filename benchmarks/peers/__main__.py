"""Penstock and its peers on the same work: `python -m benchmarks.peers --model DIR`.

Run from the root of the checkout with Penstock's interpreter. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import home, rounds, table
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino_genai import OpenVino
from benchmarks.peers.penstock_peer import DEFAULT_FORMATS, Penstock
from benchmarks.peers.protocol import Found, Peer, PeerError, Settings, Work
from benchmarks.peers.rounds import Contender
from benchmarks.peers.transformers_peer import Transformers
from benchmarks.peers.vllm_cpu import Vllm

from penstock.bench.environment import environment
from penstock.hardware import detect
from penstock.roofline import measure

PEERS = {"llama.cpp": LlamaCpp, "openvino": OpenVino, "transformers": Transformers, "vllm": Vllm}
OUR_FORMATS = [form.name for form in Penstock(Path()).formats]
WORKS = "decode@128,decode@2000,prefill@512,prefill@2048,batch8,batch16"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, help="a checkpoint's folder, as benchmarks/make_checkpoint.py's")
    add("--peers", default=",".join(PEERS), help="of %(default)s")
    add("--bits", default="16,8,4", help="formats to compare, by the bits of a weight")
    add("--penstock-formats", default=",".join(DEFAULT_FORMATS), help=f"of {','.join(OUR_FORMATS)}")
    add("--work", default=WORKS, help="default: %(default)s")
    add("--rounds", type=int, default=3)
    add("--tokens", type=int, default=32, help="decoded and timed; default: %(default)s")
    add("--threads", type=int, default=detect().cores, help="default: all cores")
    add("--timeout", type=float, default=1800.0, help="seconds for one run of one engine")
    add("--home", type=Path, default=home.default_home(), help="where peers live; %(default)s")
    add("--json", type=Path, help="where to write the result")
    add("--install", metavar="PEERS", help="install these into --home and end")
    add("--show", type=Path, metavar="JSON", help="print the tables of an earlier result and end")
    return parser.parse_args()


def chosen_from(text: str, known: Sequence[str]) -> list[str]:
    """The names in `text`, each of which must be known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"error: {', '.join(map(repr, unknown))}: choose from {', '.join(known)}.")
    return names


def chosen_peers(text: str, folder: Path) -> list[Peer]:
    return [PEERS[name](folder) for name in chosen_from(text, list(PEERS))]


def install(peers: Sequence[Peer], folder: Path) -> None:
    """Run each peer's own commands."""
    folder.mkdir(parents=True, exist_ok=True)
    for peer in peers:
        print(f"{peer.name}:{peer.install}", flush=True)
        subprocess.run(["bash", "-euc", peer.install], cwd=folder, check=True)


def look_for(peers: Sequence[Peer]) -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the peers that are here; reasons why others aren't, with the way out."""
    found, skipped = {}, {}
    names = {kind(Path()).name: name for name, kind in PEERS.items()}
    for peer in peers:
        answer = peer.available()
        if isinstance(answer, Found):
            found[peer.name] = answer.version
        else:
            way = f"python -m benchmarks.peers --install {names.get(peer.name, peer.name)}"
            skipped[peer.name] = f"{answer.reason} Install it: {way}"
    return found, skipped


def line_up(
    peers: Sequence[Peer], model: Path, folder: Path, bits: Sequence[int], ours: Sequence[str]
) -> list[Contender]:
    """Every peer in every chosen format, converted; a conversion that fails is an error of it."""
    cache = folder / "converted" / home.digest(model)
    cache.mkdir(parents=True, exist_ok=True)
    sizes = home.sizes(model)
    contenders = []
    for peer in peers:
        for form in peer.formats:
            left_out = peer.name == table.OURS and form.name not in ours
            if form.bits not in bits or left_out:
                continue
            contender = Contender(peer, form, form.weight_bytes(sizes), model)
            say(f"preparing {contender.label}")
            try:
                contender.model = peer.prepare(model, form, cache)
            except PeerError as error:
                contender.error = str(error)
            contenders.append(contender)
    # rivals at equal bits run one after another
    return sorted(contenders, key=lambda each: -each.form.bits)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare(chosen: argparse.Namespace, works: Sequence[Work]) -> None:
    """The whole measurement; the JSON is written after each round."""
    peers: list[Peer] = [Penstock(chosen.home), *chosen_peers(chosen.peers, chosen.home)]
    found, skipped = look_for(peers)
    for peer, reason in skipped.items():
        say(f"{peer} skipped: {reason}")
    bits = [int(number) for number in chosen_from(chosen.bits, ["16", "8", "4"])]
    ours = chosen_from(chosen.penstock_formats, OUR_FORMATS)
    here = [peer for peer in peers if peer.name in found]
    contenders = line_up(here, chosen.model.resolve(), chosen.home.resolve(), bits, ours)
    settings = Settings(chosen.threads, chosen.tokens, 0, chosen.timeout)
    where = environment(detect())

    def keep(done: int, runs: list[dict[str, Any]]) -> None:
        setup = {
            "model": chosen.model.resolve().name,
            "works": [work.name for work in works],
            "rounds": done,
            "tokens": chosen.tokens,
            "threads": chosen.threads,
        }
        result = {
            "benchmark": "peers",
            "setup": setup,
            "peers": found,
            "skipped": skipped,
            "contenders": [contender.as_dict() for contender in contenders],
            "runs": runs,
            **where,
        }
        if chosen.json:
            chosen.json.parent.mkdir(parents=True, exist_ok=True)
            chosen.json.write_text(json.dumps(result, indent=2) + "\n")
        if done == chosen.rounds:
            print(table.report(result))

    rounds.measure(
        contenders, works, settings, rounds=chosen.rounds, peaks=measure, say=say, keep=keep
    )


def main() -> None:
    """The command line."""
    chosen = arguments()
    if chosen.install:
        install(chosen_peers(chosen.install, chosen.home), chosen.home)
        return
    if chosen.show:
        print(table.report(json.loads(chosen.show.read_text())))
        return
    if chosen.model is None or not (chosen.model / "config.json").exists():
        sys.exit("error: --model wants the folder of a checkpoint.")
    try:
        works = [Work.parse(text) for text in chosen.work.split(",")]
    except ValueError as error:
        sys.exit(f"error: {error}")
    compare(chosen, works)


if __name__ == "__main__":
    main()
