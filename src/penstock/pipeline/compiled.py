"""A graph as an AOTInductor package, for `runtime.package.PackageForward` to run.

torch compiles what lies between the operators to C++ and calls the same kernels, so the bits are
the same. One package serves every shape: nothing in it depends on how many rows there are, since
shapes only reach Penstock's operators, which choose by them at run time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
from pathlib import Path

from penstock.errors import ConfigError
from penstock.models.exported import sha256
from penstock.pipeline.graph import Graph
from penstock.runtime import compile_counter
from penstock.runtime.package import description, quiet, read_package, target

logger = logging.getLogger("penstock")


def compile_graph(graph: Graph, folder: Path) -> Path:
    """The package of `graph` in `folder`, compiled unless it is there.

    It is found again by what it depends on: the graph's digest, torch's version, the compiler and
    this CPU's vectors. Takes tens of seconds, most of them the C++ compiler's.
    One that is damaged is replaced. Raises ConfigError where there is no C++ compiler, and OSError
    before anything is compiled where `folder` can't be written.
    """
    facts = {**target(), "graph": graph.digest, "compiler": _compiler()}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    file = folder / f"{key}.pt2"
    if file.exists() and description(file).exists():
        try:
            read_package(file)
            return file
        except ConfigError as error:
            logger.warning("Compiled anew: %s", error)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{key}.{os.getpid()}.partial.pt2"
    partial.touch()  # or its failure would be known after tens of seconds
    try:
        _compile(graph, partial)
        found = {**facts, "sha256": sha256(partial), "inputs": graph.inputs.as_dict()}
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    described = description(partial)
    described.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    described.replace(description(file))
    return file


def _compile(graph: Graph, file: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    compile_counter.note("aot_inductor")
    graph.program.example_inputs = (graph.example(), {})
    try:
        with quiet():
            aoti_compile_and_package(graph.program, package_path=str(file))
    finally:
        graph.program.example_inputs = None


def _compiler() -> str:
    """The first line of what the C++ compiler says of itself."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"Compiling a graph needs a C++ compiler, and there is no {name!r}. Install g++, name "
            "another by CXX, or run the graph as a native program, which needs none."
        )
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]
