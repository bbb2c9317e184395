"""What this machine has: memory within control groups, a folder for what is kept, sound peaks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock import hardware
from penstock.hardware import (
    Gpu,
    GpuPeaks,
    Hardware,
    Peaks,
    cache_folder,
    cpu_quota,
    detect,
    load_gpu_peaks,
    load_peaks,
    save_gpu_peaks,
    save_peaks,
)

GIB = 1 << 30
MIB = 1 << 20


class Groups:
    """Control groups in a folder of the test's own."""

    def __init__(self, root: Path) -> None:
        self.root = root / "cgroup"
        self.own = root / "self"

    def be_in(self, *lines: str) -> None:
        self.own.write_text("".join(line + "\n" for line in lines))

    def put(self, group: str, **files: object) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """None at first, on a machine with 64 GiB of which 32 are free."""
    found = Groups(tmp_path)
    found.be_in("0::/")
    found.put("")
    monkeypatch.setattr(hardware, "_GROUPS", found.root)
    monkeypatch.setattr(hardware, "_GROUPS_OF_SELF", found.own)
    sizes = {"MemTotal": 64 * GIB, "MemAvailable": 32 * GIB}
    monkeypatch.setattr(hardware, "_kilobytes", sizes.__getitem__)
    return found


def seen() -> tuple[int, int]:
    found = detect()
    return found.memory_bytes, found.available_bytes


def test_without_limits(groups: Groups) -> None:
    assert seen() == (64 * GIB, 32 * GIB)
    groups.put("", memory__max="max", memory__current=GIB)
    assert seen() == (64 * GIB, 32 * GIB) and cpu_quota() is None
    groups.own.unlink()
    assert seen() == (64 * GIB, 32 * GIB) and cpu_quota() is None


def test_files_in_memory_are_free(groups: Groups) -> None:
    """A container that has read its model before: nearly all that it uses is the page cache."""
    stat = f"anon {100 * MIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}"
    groups.put("", memory__max=4 * GIB, memory__current=3 * GIB + 100 * MIB, memory__stat=stat)
    assert seen() == (4 * GIB, GIB * 4 - 100 * MIB)
    groups.put("", memory__stat=f"inactive_file {5 * GIB}")  # counters are read one by one
    assert seen() == (4 * GIB, 4 * GIB)
    (groups.root / "memory.stat").unlink()
    assert seen() == (4 * GIB, GIB - 100 * MIB)
    groups.put("", memory__current=5 * GIB)
    assert seen() == (4 * GIB, 0)


def test_the_tightest_group_counts(groups: Groups) -> None:
    """As of a service with MemoryMax, within a slice that others use up."""
    groups.be_in("0::/work.slice/penstock.service")
    groups.put("work.slice", memory__max=8 * GIB, memory__current=7 * GIB, cpu__max="max 100000")
    groups.put(
        "work.slice/penstock.service",
        memory__max=6 * GIB, memory__current=GIB, cpu__max="150000 100000",
    )  # fmt: skip
    assert seen() == (6 * GIB, GIB) and cpu_quota() == 1.5
    groups.put("work.slice", cpu__max="50000 100000")
    assert cpu_quota() == 0.5


@pytest.mark.parametrize("named", ["/docker/1f", "/../1f"])
def test_a_container_that_sees_its_own_group_as_the_outermost(groups: Groups, named: str) -> None:
    groups.be_in(f"0::{named}")
    groups.put("", memory__max=2 * GIB, memory__current=GIB)
    assert seen() == (2 * GIB, GIB)


def test_groups_of_version_1(groups: Groups) -> None:
    groups.be_in("9:name=systemd:/", "4:memory:/one/two", "2:cpu,cpuacct:/one", "0::/")
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    of = {"memory__usage_in_bytes": 3 * GIB, "memory__stat": stat}
    groups.put("memory/one/two", memory__limit_in_bytes=9223372036854771712, **of)
    groups.put("memory/one", memory__limit_in_bytes=4 * GIB, **of)
    groups.put("cpu/one", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    groups.put("cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert seen() == (4 * GIB, 3 * GIB) and cpu_quota() == 1.5


# ── where measurements are kept ──────────────────────────────────────────────────────────────────


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's process: no variable, no home. Returns the folder of temporary files."""

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PENSTOCK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hardware._temporary_folder.cache_clear()
    return tmp_path


def test_the_cache_of_who_has_no_home(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_folder()
    assert folder.parent == homeless and folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder
    hardware._temporary_folder.cache_clear()
    assert cache_folder() == folder
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/penstock")
    monkeypatch.setenv("PENSTOCK_CACHE", "mine")
    assert cache_folder() == Path("mine")


def test_a_temporary_folder_that_others_can_write_to_is_not_taken(homeless: Path) -> None:
    """What is kept is read back, compiled code among it."""
    folder = cache_folder()
    folder.chmod(0o777)
    hardware._temporary_folder.cache_clear()
    assert cache_folder() != folder and cache_folder() == cache_folder()


@pytest.mark.parametrize("value", ["", "caches"])
def test_an_empty_or_relative_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "penstock"


# ── peaks ────────────────────────────────────────────────────────────────────────────────────────

MACHINE = Hardware("a processor", 2, (), 1, 1)
GPU = Gpu("a GPU", 0, (9, 0), 132, 1 << 37, 1 << 37, 0, "550", "12.4")
PEAKS = Peaks(1e9, 1e10, 0.0, 2, "then")
GPU_PEAKS = GpuPeaks(4e12, 4e12, 5e13, 4e14, 8e14, 8e14, 0.0, 0.0, 5e-6, "a GPU", "then")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read_bytes_per_s", 0),
        ("read_bytes_per_s", None),
        ("read_bytes_per_s", float("nan")),
        ("read_bytes_per_s", float("inf")),
        ("read_bytes_per_s", -1.0),
        ("read_bytes_per_s", "1e9"),
        ("read_bytes_per_s", True),
        ("int8_ops", -1.0),
        ("measured_at", None),
    ],
)
def test_peaks_that_are_no_figures_are_measured_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: Any
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    file, gpu_file = save_peaks(MACHINE, PEAKS, "native"), save_gpu_peaks(GPU, GPU_PEAKS)
    assert load_peaks(MACHINE, 2, "native") == PEAKS and load_gpu_peaks(GPU) == GPU_PEAKS
    file.write_text(json.dumps(asdict(PEAKS) | {name: value}))
    gpu_file.write_text(json.dumps(asdict(GPU_PEAKS) | {name: value}))
    assert load_peaks(MACHINE, 2, "native") is None and load_gpu_peaks(GPU) is None
