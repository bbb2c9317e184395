"""Whether spinning threads fight: decode steps a second under libgomp's settings.

Penstock's kernels have threads of their own (csrc/cpu/parallel.cpp), which these settings don't
reach; torch's operators have libgomp's. So the settings should make no difference: where they do,
something waits in an OpenMP region.

    python benchmarks/spin_policy.py --rounds 8 --out benchmarks/results/spin-policy.md

Each round starts one process for each setting (libgomp reads them when it is loaded). It decodes
one sequence with two threads: quiet; beside another process that is always busy; and with a client
thread that does a little work after each step, as a server does. The figures are medians over the
rounds with their quartiles; `other` is the share of a core that the busy process got. `undisturbed`
is what the fastest tenth of the quiet steps reach in the best round: on a machine that others use,
the nearest to a machine that they don't.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.bench.environment import environment
from penstock.bench.workload import greedy
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.hardware import detect
from penstock.runtime import load_runtime

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SETTINGS: dict[str, dict[str, str]] = {
    "unset": {},
    **{
        f"GOMP_SPINCOUNT={n}": {"GOMP_SPINCOUNT": n}
        for n in ("0", "1000", "10000", "100000", "infinite")
    },
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
CASES = ("quiet", "busy", "client")
PROMPT, REQUEST_STEPS = 8, 400

Figures = dict[str, list[float]]
"""`model/case` → a figure for each round."""


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Another process that never waits."""
    code = "print(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def client_thread() -> Iterator[queue.SimpleQueue[object]]:
    """A thread that encodes what it is sent, about 50 µs of work, until it gets None."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()

    def serve() -> None:
        while (item := inbox.get()) is not None:
            for _ in range(5):
                json.loads(json.dumps({"id": "request", "choices": [{"text": str(item)}] * 4}))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield inbox
    finally:
        inbox.put(None)
        thread.join()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def decode(
    engine: Engine, seconds: float, inbox: queue.SimpleQueue[object] | None = None
) -> tuple[float, float]:
    """Steps a second, and of the fastest tenth; steps with prompts aren't counted."""
    times: list[float] = []
    spent = 0.0
    while spent < seconds:
        engine.add_request("0", [5] * PROMPT, greedy(REQUEST_STEPS))
        engine.step()
        while engine.has_unfinished and spent < seconds:
            start = time.perf_counter()
            engine.step()
            if inbox is not None:
                inbox.put(spent)
            times.append(time.perf_counter() - start)
            spent += times[-1]
        engine.abort("0", report=False)
    return len(times) / spent, 1 / sorted(times)[len(times) // 10]


def child(models: list[str], threads: int, seconds: float) -> None:
    """One process: every model in every case; prints JSON."""
    torch.set_num_threads(threads)
    found: dict[str, float] = {}
    for model in models:
        config = EngineConfig.of(model=model, skip_tokenizer_init=True, max_num_seqs=1)
        engine = Engine(config, load_runtime(config))
        name = Path(model).name
        decode(engine, 0.05)
        found[f"{name}/quiet"], found[f"{name}/undisturbed"] = decode(engine, seconds)
        with busy_process() as other:
            before, start = cpu_seconds(other.pid), time.perf_counter()
            found[f"{name}/busy"], _ = decode(engine, seconds)
            share = (cpu_seconds(other.pid) - before) / (time.perf_counter() - start)
            found[f"{name}/other"] = share
        with client_thread() as inbox:
            found[f"{name}/client"], _ = decode(engine, seconds, inbox)
    print(json.dumps(found))


def run(setting: dict[str, str], arguments: list[str]) -> dict[str, float]:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        env=clean | setting, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def cell(values: list[float], digits: int = 0) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table(found: dict[str, Figures], models: list[str], load: list[float]) -> str:
    """Markdown."""
    where: dict[str, Any] = environment(detect())
    hardware = where["hardware"]
    lines = [
        f"# Spin policy, {where['threads']} threads on {hardware['cores']} cores of "
        f"{hardware['processor']}, {where['isa']}, commit {where['commit']}, "
        f"torch {where['versions']['torch']}, {where['measured_at'][:10]}",
        "",
        "`python benchmarks/spin_policy.py`: decode steps a second of one sequence, median "
        f"(quartiles) of {len(load)} rounds that take the settings "
        "in turns. `undisturbed`: the fastest tenth of the quiet steps, best round. `other`: the "
        "share of a core that a competing busy process got. Runnable threads of others and ours "
        f"meanwhile, averages over a minute: {min(load):.1f} to {max(load):.1f}.",
    ]
    for model in models:
        name = Path(model).name
        lines += [
            "",
            f"{name}:",
            "",
            "| setting | quiet | undisturbed | beside a busy one | other | with a client thread |",
            "|---|---|---|---|---|---|",
        ]
        for setting, figures in found.items():
            quiet, busy, client = (cell(figures[f"{name}/{case}"]) for case in CASES)
            other = cell(figures[f"{name}/other"], 2)
            free = max(figures[f"{name}/undisturbed"])
            lines.append(f"| {setting} | {quiet} | {free:.0f} | {busy} | {other} | {client} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", help="default: the embedded one, and a tiny one")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="write the table here too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.models, options.threads, options.seconds)
        return
    found: dict[str, Figures] = {name: defaultdict(list) for name in options.settings}
    load: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or ["stories", _tiny(Path(folder) / "tiny")]
        arguments = ["--models", *models, "--threads", str(options.threads)]
        for number in range(options.rounds):
            names = options.settings
            for name in names if number % 2 == 0 else reversed(names):
                for key, value in run(
                    SETTINGS[name], [*arguments, "--seconds", str(options.seconds)]
                ).items():
                    found[name][key].append(value)
            load.append(os.getloadavg()[0])
            print(f"round {number + 1} of {options.rounds}, load {load[-1]:.1f}", file=sys.stderr)
    text = table(found, models, load)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


def _tiny(folder: Path) -> str:
    from make_checkpoint import write_checkpoint

    write_checkpoint("tiny", folder)
    return str(folder)


if __name__ == "__main__":
    main()
