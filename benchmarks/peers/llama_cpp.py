"""llama.cpp, built from the source package of `llama-cpp-python` for this very CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.peers.home import CONVERT_TIMEOUT_S, RUNNERS, call, once, python_of
from benchmarks.peers.protocol import Format, Found, Missing, PeerError, Reply, Settings, Work

TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize")
BATCHED_TRIES = 4  # it may end before its logging thread has printed anything

# gcc 12's tile intrinsics lack a memory clobber, and its optimiser moves stores past them: on a CPU
# with AMX the program dies or reads stale data. A compiler barrier before each costs nothing.
INSTALL = """
mkdir -p llama.cpp && cd llama.cpp
python3 -m venv venv
venv/bin/pip install "torch>=2.11,<2.14" transformers safetensors sentencepiece cmake ninja
rm -rf llama_cpp_python-*
venv/bin/pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
tar xzf llama_cpp_python-*.tar.gz
source=$(echo llama_cpp_python-*/vendor/llama.cpp)
sed -i 's/^\\( *\\)_tile_load/\\1asm volatile("" ::: "memory"); _tile_load/' \\
    $source/ggml/src/ggml-cpu/amx/mmq.cpp
export PATH=$PWD/venv/bin:$PATH
cmake -S $source -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \\
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
cmake --build build --target llama-bench llama-batched-bench llama-quantize
"""

BF16 = Format("BF16", 16, 2.0, 2.0, "BF16")
Q8_0 = Format("Q8_0", 8, 34 / 32, 34 / 32, "Q8_0")  # 32 weights and a float16 scale
Q4_0 = Format("Q4_0", 4, 18 / 32, 34 / 32, "Q8_0")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """`llama-bench` and `llama-batched-bench`, as they come; neither times its sampling."""

    home: Path
    name: str = "llama.cpp"
    formats: tuple[Format, ...] = (BF16, Q8_0, Q4_0)
    install: str = INSTALL

    @property
    def _folder(self) -> Path:
        return self.home / "llama.cpp"

    def _tool(self, name: str) -> Path:
        return self._folder / "build" / "bin" / name

    def _source(self) -> Path:
        found = sorted(self._folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
        if not found:
            raise PeerError(f"There is no source of llama-cpp-python in {self._folder}.")
        return found[-1]

    def available(self) -> Found | Missing:
        for name in TOOLS:
            if not self._tool(name).exists():
                return Missing(f"{name} isn't built in {self._folder}.")
        try:
            return Found(version(self._source()))
        except (PeerError, OSError) as error:
            return Missing(str(error))

    def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
        def convert(folder: Path) -> None:
            command = convert_command(
                python_of(self._folder), self._source(), checkpoint, folder / "model.gguf"
            )
            call(command, timeout_s=CONVERT_TIMEOUT_S, threads=1)

        package = self._source().parents[1].name
        full = once(cache / f"{package}-{BF16.name}", convert) / "model.gguf"
        if form == BF16:
            return full

        def quantize(folder: Path) -> None:
            command = quantize_command(
                self._tool("llama-quantize"), full, folder / "model.gguf", form
            )
            call(command, timeout_s=CONVERT_TIMEOUT_S, threads=1)

        return once(cache / f"{package}-{form.name}-{form.head}", quantize) / "model.gguf"

    def run(self, model: Path, form: Format, works: Sequence[Work], settings: Settings) -> Reply:
        speeds: dict[str, float] = {}
        for command in bench_commands(self._tool("llama-bench"), model, works, settings):
            output = call(command, timeout_s=settings.timeout_s, threads=settings.threads)
            speeds |= read_bench(output)
        tool = self._tool("llama-batched-bench")
        for command in batched_commands(tool, model, works, settings):
            for _ in range(BATCHED_TRIES):
                output = call(command, timeout_s=settings.timeout_s, threads=settings.threads)
                if found := read_batched(output):
                    break
            speeds |= found
        if missing := [work.name for work in works if work.name not in speeds]:
            raise PeerError(f"Its programs said nothing of {', '.join(missing)}.")
        return Reply({work.name: speeds[work.name] for work in works})


def version(source: Path) -> str:
    """The package's version and that of the tree in it."""
    text = (source / "CMakeLists.txt").read_text()
    parts = re.findall(r"set\(LLAMA_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d+)\)", text)
    package = source.parents[1].name.replace("_", "-")
    return f"{package}, llama.cpp {'.'.join(parts)}" if parts else package


def convert_command(python: Path, source: Path, checkpoint: Path, out: Path) -> list[str]:
    script = RUNNERS / "convert_llama_cpp.py"
    return [*map(str, (python, script, source, checkpoint)), "--outfile", str(out),
            "--outtype", "bf16"]  # fmt: skip


def quantize_command(tool: Path, full: Path, out: Path, form: Format) -> list[str]:
    """Embedding and head stay in `form.head`: as they come, 4 bits get another head than here."""
    head = form.head.lower()
    types = ["--output-tensor-type", head, "--token-embedding-type", head]
    return [str(tool), *types, str(full), str(out), form.name]


def bench_commands(
    tool: Path, model: Path, works: Iterable[Work], settings: Settings
) -> list[list[str]]:
    """One program for all single decodes and one for all single prompts, each test once."""
    single = [work for work in works if work.batch == 1]
    shared = [str(tool), "-m", str(model), "-t", str(settings.threads), "-r", "1", "-o", "json"]
    commands = []
    if contexts := _contexts(single, "decode"):
        commands.append([*shared, "-p", "0", "-n", str(settings.tokens), "-d", contexts])
    if lengths := _contexts(single, "prefill"):
        commands.append([*shared, "-p", lengths, "-n", "0"])
    return commands


def batched_commands(
    tool: Path, model: Path, works: Iterable[Work], settings: Settings
) -> list[list[str]]:
    """One program for all batches of one context."""
    commands = []
    batches = sorted((w.context, w.batch) for w in works if w.batch > 1)
    for context, group in groupby(batches, key=lambda pair: pair[0]):
        counts = [batch for _, batch in group]
        commands.append(
            [
                str(tool), "-m", str(model),
                "-t", str(settings.threads), "-tb", str(settings.threads),
                "-c", str(max(counts) * (context + settings.tokens)), "-b", "2048", "-ub", "512",
                "-npp", str(context), "-ntg", str(settings.tokens),
                "-npl", ",".join(map(str, counts)), "--output-format", "jsonl",
            ]
        )  # fmt: skip
    return commands


def _contexts(works: Iterable[Work], kind: str) -> str:
    return ",".join(str(work.context) for work in works if work.kind == kind)


def read_bench(output: str) -> dict[str, float]:
    """Tokens/s by work from llama-bench's JSON."""
    return {_work(test).name: test["avg_ts"] for test in json.loads(output)}


def _work(test: dict[str, Any]) -> Work:
    if test["n_gen"]:
        return Work("decode", 1, test["n_depth"])
    return Work("prefill", 1, test["n_prompt"])


def read_batched(output: str) -> dict[str, float]:
    """Tokens/s by work from llama-batched-bench's lines of JSON."""
    tests = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {Work("decode", test["pl"], test["pp"]).name: test["speed_tg"] for test in tests}
