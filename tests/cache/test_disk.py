"""Blocks on disk: what was put there comes back whole, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cache import disk
from penstock.cache.disk import DiskStore, Files, digest_of, root_digest
from penstock.errors import ConfigError

SIZE = 40


def wait_for(files: Files, written: int) -> None:
    end = time.monotonic() + 10
    while files.written < written and time.monotonic() < end:
        time.sleep(0.002)
    assert files.written == written


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path / "blocks", SIZE, 1 << 20)
    yield made
    made.close()


def data(seed: int) -> bytes:
    return bytes((seed + i) % 256 for i in range(SIZE))


def test_what_was_put_comes_back(files: Files, tmp_path: Path) -> None:
    """At once, and in another process's place."""
    for seed in range(5):
        assert files.takes(f"{seed}")
        files.put(f"{seed}", data(seed))
        assert not files.takes(f"{seed}")
        assert files.get(f"{seed}") == data(seed)
    wait_for(files, 5)
    other = Files(tmp_path / "blocks", SIZE, 1 << 20)
    assert len(other) == 5 and "3" in other and "7" not in other
    assert [other.get(f"{seed}") for seed in range(5)] == [data(seed) for seed in range(5)]
    assert other.read == 5
    other.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: whole[:10],
        lambda whole: b"",
        lambda whole: b"penstkv9" + whole[8:],
        lambda whole: whole[:-3] + bytes((whole[-3] ^ 1,)) + whole[-2:],
        lambda whole: whole[:8] + bytes(8) + whole[16:],
    ],
)
def test_a_damaged_file_is_removed(
    spoil: object, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.put("a", data(1))
    wait_for(files, 1)
    file = files.folder / "a.kv"
    file.write_bytes(spoil(file.read_bytes()))  # type: ignore[operator]
    assert files.get("a") is None
    assert (files.damaged, "a" in files, file.exists()) == (1, False, False)
    assert "is damaged and is removed" in caplog.text
    assert files.takes("a")


def test_a_file_that_another_process_removed(files: Files) -> None:
    files.put("a", data(1))
    wait_for(files, 1)
    (files.folder / "a.kv").unlink()
    assert files.get("a") is None and files.damaged == 0 and "a" not in files


EACH = SIZE + disk._HEAD.size


def there(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.kv"))


def put_path(files: Files, *names: str) -> None:
    for before, name in pairwise((None, *names)):
        assert name is not None
        files.put(name, data(0), before)


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    files = Files(tmp_path, SIZE, 4 * EACH)
    for name in "abcd":
        files.put(name, data(0))
    wait_for(files, 4)
    files.use(["a"])  # now b is the oldest
    for name in "ef":
        files.put(name, data(0))
    wait_for(files, 6)
    assert there(tmp_path) == ["a", "d", "e", "f"]
    assert files.nbytes == 4 * EACH
    files.close()
    for number, name in enumerate("dfea"):  # as their times say it to the next process
        os.utime(tmp_path / f"{name}.kv", (number, number))
    later = Files(tmp_path, SIZE, 4 * EACH)
    later.put("g", data(0))
    wait_for(later, 1)
    assert there(tmp_path) == ["a", "e", "f", "g"]
    later.close()


def test_the_ends_of_prompts_go_first(tmp_path: Path) -> None:
    """Without its beginning nobody finds what is behind it; so it is after a restart."""
    for again in (False, True):
        folder = tmp_path / f"{again}"
        files = Files(folder, SIZE, 6 * EACH)
        put_path(files, "a0", "a1", "a2")
        put_path(files, "b0", "b1", "b2")
        wait_for(files, 6)
        files.use(["a0", "a1", "a2"])
        if again:
            files.close()
            files = Files(folder, SIZE, 6 * EACH)
        put_path(files, "c0", "c1")
        wait_for(files, 2 if again else 8)
        assert there(folder) == ["a0", "a1", "a2", "b0", "c0", "c1"]
        files.close()


def test_a_prompt_that_is_larger_than_all(tmp_path: Path) -> None:
    files = Files(tmp_path, SIZE, 4 * EACH)
    put_path(files, *"abcdefgh")
    files.close()
    assert there(tmp_path) == ["a", "b", "c", "d"]
    assert files.written + files.dropped == 8 and files.nbytes == 4 * EACH


def test_what_another_process_writes_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    """And counts, and what it removes doesn't, once it is looked."""
    one, other = (Files(tmp_path, SIZE, 3 * EACH) for _ in range(2))
    put_path(other, "a", "b")
    wait_for(other, 2)
    assert "a" in one and one.get("b") == data(0) and "c" not in one
    (tmp_path / "a.kv").unlink()
    monkeypatch.setattr(disk, "_LOOKS_S", 0.0)
    put_path(one, "c", "d")
    wait_for(one, 2)
    assert there(tmp_path) == ["b", "c", "d"] and len(one) == 3 and "a" not in one
    one.close()
    other.close()


def test_a_folder_that_is_removed(files: Files) -> None:
    files.put("a", data(1))
    wait_for(files, 1)
    shutil.rmtree(files.folder.parent)
    files.put("b", data(2))
    files.put("c", data(3))
    wait_for(files, 3)
    assert there(files.folder) == ["b", "c"] and files.takes("a")


def test_two_of_one_process(tmp_path: Path) -> None:
    """Or of containers, whose processes have one number: nobody writes into another's file."""
    both = [Files(tmp_path, SIZE, 1 << 20) for _ in range(2)]
    for number in range(200):
        for files in both:
            files.put(f"{number}", data(number))
    for files in both:
        files.close()
    assert [files.dropped for files in both] == [0, 0]
    later = Files(tmp_path, SIZE, 1 << 20)
    assert [later.get(f"{n}") for n in range(200)] == [data(n) for n in range(200)]
    later.close()


def test_what_the_system_refuses_isnt_damaged(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files.put("a", data(1))
    wait_for(files, 1)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", _too_many, raising=False)
        assert files.get("a") is None and files.get("a") is None
    assert caplog.text.count("Too many open files") == 1
    assert files.get("a") == data(1) and files.damaged == 0


def _too_many(*args: Any) -> Any:
    raise OSError(24, "Too many open files")


def test_what_isnt_a_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kv")
    (tmp_path / "dir.kv").mkdir()
    (tmp_path / "link.kv").symlink_to(tmp_path / "nowhere")
    files = Files(tmp_path, SIZE, 1 << 20)
    assert len(files) == 0 and not any(name in files for name in ("pipe", "dir", "link"))
    files.close()


def test_nothing_is_written_behind_what_was_left_out(files: Files) -> None:
    assert files.takes("a") and not files.takes("c", "b") and files.dropped == 1
    files.put("a", data(1))
    assert files.takes("b", "a")


def test_its_owner_alone_reads_it(tmp_path: Path) -> None:
    files = Files(tmp_path / "new" / "model", SIZE, EACH)
    files.put("a", data(1))
    files.close()
    for path in (tmp_path / "new", files.folder, files.folder / "a.kv"):
        assert path.stat().st_mode & 0o077 == 0


def test_many_uses_take_no_memory(tmp_path: Path) -> None:
    files = Files(tmp_path, SIZE, 1 << 20)
    put_path(files, "a", "b")
    for _ in range(3000):
        files.use(["a", "b"])
    assert len(files._oldest) < 2000
    files.close()
    assert there(tmp_path) == ["a", "b"]


def test_nothing_waits_for_a_slow_disk(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), files._put

    def slow(digest: str, held: bytes) -> None:
        gate.wait(10)
        write(digest, held)

    monkeypatch.setattr(files, "_put", slow)
    monkeypatch.setattr(disk, "QUEUED_BYTES", 3 * SIZE)
    taken = [name for name in "abcdef" if files.takes(name) and not files.put(name, data(0))]
    assert taken == ["a", "b", "c"] and files.dropped == 3
    gate.set()
    wait_for(files, 3)
    assert files.takes("d")


def test_a_full_disk_costs_blocks_only(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        files.put("a", data(0))
        end = time.monotonic() + 10
        while not files.dropped and time.monotonic() < end:
            time.sleep(0.002)
    assert "No space left" in caplog.text and "a" not in files
    assert list(files.folder.iterdir()) == []
    files.put("b", data(1))
    wait_for(files, 1)


def test_what_is_queued_is_written_at_the_end(tmp_path: Path) -> None:
    files = Files(tmp_path, SIZE, 1 << 20)
    for seed in range(50):
        files.put(f"{seed}", data(seed))
    files.close()
    assert files.written == 50 and not files.takes("more")


def test_what_others_left_behind(tmp_path: Path) -> None:
    old, new, strange = (tmp_path / name for name in ("a.1.tmp", "b.2.tmp", "README"))
    for file in (old, new, strange):
        file.write_bytes(b"x")
    os.utime(old, (1, 1))
    files = Files(tmp_path, SIZE, 1 << 20)
    assert (old.exists(), new.exists(), strange.exists(), len(files)) == (False, True, True, 0)
    files.close()


def test_what_a_killed_process_was_writing(tmp_path: Path) -> None:
    """Goes with the next start, but not what another still writes."""
    code = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); " \
        "print(flush=True); time.sleep(60)"  # fmt: skip
    names = [tmp_path / "killed.1.tmp", tmp_path / "slow.1.tmp"]
    writers = [
        subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE)
        for name in names
    ]
    try:
        for writer, name in zip(writers, names, strict=True):
            assert writer.stdout is not None
            writer.stdout.readline()
            os.utime(name, (time.time() - 20,) * 2)
        writers[0].kill()
        writers[0].wait()
        (tmp_path / "new.1.tmp").write_bytes(b"x")
        Files(tmp_path, SIZE, 1 << 20).close()
        assert sorted(x.name for x in tmp_path.iterdir()) == ["new.1.tmp", "slow.1.tmp"]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_what_is_written_is_locked(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, sum_of = [], disk.zlib.crc32

    def crc32(block: bytes) -> int:
        seen.extend(disk._is_abandoned(str(x), 20) for x in files.folder.glob("*.tmp"))
        return sum_of(block)

    monkeypatch.setattr(disk.zlib, "crc32", crc32)
    files.put("a", data(1))
    wait_for(files, 1)
    assert seen == [False]


def test_rows_of_several_pieces(tmp_path: Path) -> None:
    """Whole words and bytes; other blocks stay as they are."""
    rows = [torch.arange(60).view(6, 10), torch.arange(42, dtype=torch.int8).view(6, 7)]
    want = [row.clone() for row in rows]
    store = DiskStore(tmp_path, "model", rows, 1 << 20)
    for block in (1, 4):
        store.put(f"{block}", block, None)
    for row in rows:
        row[[1, 4]] = 0
    each = [store.files.get(f"{block}") for block in (4, 1)]
    assert all(held is not None for held in each)
    store.load([4, 1], each)  # type: ignore[arg-type]
    assert all(torch.equal(row, held) for row, held in zip(rows, want, strict=True))
    assert (tmp_path / "model").stat().st_mode & 0o077 == 0
    store.close()
    assert store.files.written == 2


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    """What is queued is written, and nothing holds the cache any longer."""
    store = DiskStore(tmp_path, "model", [torch.zeros(2, 4)], 1 << 20)
    store.put("a", 0, None)
    files = store.files
    del store
    assert files.written == 1 and not files._writer.is_alive()


def test_folders_that_cant_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"prefix_cache_dir=.* can't be written to"):
        DiskStore(tmp_path / "file", "model", [torch.zeros(2, 4)], 1 << 20)


def test_digests_tell_all_apart() -> None:
    roots = {root_digest(salt) for salt in (None, "", "a", "b")}
    found = {digest_of(root, tokens) for root in roots for tokens in ([1, 2], [12], [2, 1], [-1])}
    assert len(roots) == 4 and len(found) == 16
    assert root_digest("\ud800") not in roots  # half a character, which JSON may hold


def test_who_waits_until_all_is_written(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = Files._write_file

    def slowly(self: Files, path: Path, data: bytes) -> None:
        go.wait(10)
        write(self, path, data)

    monkeypatch.setattr(Files, "_write_file", slowly)
    assert files.reached(files.mark())  # there is nothing to wait for
    for seed in range(3):
        files.put(f"{seed}", data(seed))
    mark = files.mark()
    files.put("later", data(7))
    assert not files.reached(mark)
    go.set()
    end = time.monotonic() + 10
    while not files.reached(mark):
        assert time.monotonic() < end
    assert files.written >= 3


def test_what_cant_be_written_is_waited_for_as_well(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Files, path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "_write_file", full)
    files.put("0", data(0))
    end = time.monotonic() + 10
    while not files.reached(files.mark()):
        assert time.monotonic() < end
    assert files.dropped == 1
