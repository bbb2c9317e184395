"""What the README, the documentation and the examples show runs as it stands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
EXAMPLES = [
    pytest.param(p.read_text(), id=p.name) for p in sorted((ROOT / "examples").glob("*.py"))
]


FORKS = """
import gc, json, os, sys, types

import openai, torch.export._trace  # what takes long to import
from penstock import LLM, SamplingParams

gc.collect()
gc.freeze()  # or each child's end walks all that, and copies its pages
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
asked = json.loads(line)
for number, name in enumerate((os.devnull, asked["out"], asked["err"])):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(asked["code"], asked["name"], "exec"), main.__dict__)
"""
"""Runs pieces of code one by one, each in a fresh process that has Penstock imported already."""

Run = Callable[[str, str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-W", "error", "-c", FORKS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as made:
        assert made.stdin is not None and made.stdout is not None

        def one(name: str, code: str) -> tuple[int, str, str]:
            files = {part: folder / f"{name}.{part}" for part in ("out", "err")}
            asked = {"name": name, "code": code, **{k: str(v) for k, v in files.items()}}
            timer = threading.Timer(300, os.killpg, (made.pid, signal.SIGKILL))
            timer.start()
            print(json.dumps(asked), file=made.stdin, flush=True)
            status = made.stdout.readline() or "-9"
            timer.cancel()
            return int(status), files["out"].read_text(), files["err"].read_text()

        yield one


@pytest.mark.parametrize("code", BLOCKS + EXAMPLES)
def test_runs(run: Run, code: str, request: pytest.FixtureRequest) -> None:
    status, out, err = run(request.node.callspec.id, code)
    assert status == 0, err
    assert out.strip()


def test_what_fails_is_told(run: Run) -> None:
    for code, says in (("import warnings; warnings.warn('oh')", "UserWarning: oh"),
                       ("json", "NameError"), ("raise SystemExit(3)", "")):  # fmt: skip
        status, _, err = run("fails", code)
        assert status != 0 and says in err
    assert run("goes-on", "print(__name__)")[:2] == (0, "__main__\n")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            file = page.parent / link if link else page
            assert file.exists(), f"{page.name} links to {link}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{page.name} links to {link}#{anchor}"
