"""The page in headless Chromium, against the fake server or a real one (docs/page.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from .fake import FakeServer

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


def playwright() -> Path:
    return Path(os.environ.get("PENSTOCK_PLAYWRIGHT", REPOSITORY))


def missing() -> str | None:
    if not (playwright() / "node_modules" / "playwright-core").is_dir():
        return "playwright-core isn't installed: PENSTOCK_PLAYWRIGHT names no folder that has it"
    if shutil.which("node") is None:
        return "node isn't installed"
    return None if shutil.which("chromium") else "chromium isn't installed"


@pytest.mark.slow
def test_page_in_a_browser() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    settings = {
        "PENSTOCK_PLAYWRIGHT": str(playwright().resolve()),
        "PENSTOCK_CHROMIUM": str(shutil.which("chromium")),
    }
    with ExitStack() as servers:
        if "PENSTOCK_PAGE_URL" not in os.environ:
            fakes = {
                "FAKE": FakeServer(running=9),
                "NO_TEMPLATE": FakeServer(template=False),
                "KEY": FakeServer(key="secret"),
                "SEES": FakeServer(sees=True),
                "SEVERAL": FakeServer(several=True),
                "FULL": FakeServer(running=64, blocks=100_000),
            }
            for name, fake in fakes.items():
                settings[f"PENSTOCK_PAGE_{name}"] = servers.enter_context(fake).url
            settings["PENSTOCK_PAGE_URL"] = settings["PENSTOCK_PAGE_FAKE"]
        ran = subprocess.run(
            ["node", "--test", str(HERE / "browser.test.mjs")],
            env=os.environ | settings, capture_output=True, check=False, text=True, timeout=900,
        )  # fmt: skip
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
