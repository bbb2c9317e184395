"""One thread a process: tests run side by side, and threads that wait for each other on a busy
machine take longer than tiny products. Tests of threads set as many as they need."""

import gc
import os
import signal
from collections.abc import Iterator

os.environ["OMP_WAIT_POLICY"] = "passive"  # or torch's threads keep cores busy while they wait
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's do too
import pytest
import torch

from penstock.kernels import native
from tests import quick

if not torch.cuda.is_available():  # before Triton is imported by anybody
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)

# Of a job in the background, Ctrl-C is ignored, and by all that it starts: tests of it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_freeze, _usual = gc.freeze, gc.get_threshold()


def pytest_addoption(parser: pytest.Parser) -> None:
    quick.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(quick.Durations(config))


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What measures times may fail once, and what waits for other processes may wait too long:
    other programs, on a shared machine, held it up. The report tells of it. Nothing else gets a
    second try: whatever is wrong once is wrong.
    """
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=5))
        elif item.get_closest_marker("multiprocess"):
            late = r"TimeoutError|TimeoutExpired|ReadTimeout|ConnectTimeout"
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=5, only_rerun=late))
    if config.getoption("--quick"):
        quick.leave_out(config, items)


def pytest_collection_finish() -> None:
    """Modules and tests stay, so no collection need walk them: that took a third of the time."""
    gc.collect()
    _freeze()


@pytest.fixture
def restore() -> Iterator[None]:
    """The instruction set and the threads that there were, for a test that chooses others."""
    isa, threads = native.isa, torch.get_num_threads()
    yield
    native.select_isa(isa)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _collections_as_usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands have fewer, and leave what they load out of them, for a process of their own."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    gc.set_threshold(*_usual)
