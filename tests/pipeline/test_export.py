"""An export folder: it loads with the same bits, and is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, ModelError, PenstockError
from penstock.models.exported import MANIFEST, read_exported, verify_exported
from penstock.models.load import load_model
from penstock.pipeline import load_graph
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.export import Export, export_model
from penstock.pipeline.graph import weights_of
from penstock.pipeline.new_weights import NewWeights
from tests.pipeline.test_graph import machine, steps


@pytest.fixture(scope="module")
def exported(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    return export_model(tiny_folder, tmp_path_factory.mktemp("out") / "model")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_loads_with_the_same_bits(tiny_folder: Path, exported: Export) -> None:
    want = load_model(tiny_folder).model
    got = load_model(exported.folder).model
    assert same(weights_of(got), weights_of(want))
    forward = load_graph(exported.folder / "graph.pt2").bind(weights_of(got))
    assert torch.equal(steps(machine(got, forward), 320), steps(machine(want), 320))


def test_generate_from_it(tiny_folder: Path, exported: Export) -> None:
    def tokens(folder: Path) -> list[int]:
        llm = LLM(folder, skip_tokenizer_init=True, num_gpu_blocks_override=16)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": [5, 9, 17]}], params)
        return list(outputs[0].outputs[0].token_ids)

    assert tokens(exported.folder) == tokens(tiny_folder)


def test_transformers_loads_it(tiny_folder: Path, exported: Export) -> None:
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        assert torch.equal(load(exported.folder)(ids).logits, load(tiny_folder)(ids).logits)


def test_what_is_in_it(exported: Export) -> None:
    names = {p.relative_to(exported.folder).as_posix() for p in exported.folder.rglob("*.*")}
    assert names == set(exported.manifest.files) | {MANIFEST}
    assert {"graph.pt2", "model.safetensors", "config.json", "chat_template.jinja"} <= names
    assert "additional_chat_templates/tools.jinja" in names and "pytorch_model.bin" not in names
    assert verify_exported(exported.folder) == exported.manifest
    assert exported.manifest.graph["digest"] == exported.graph.digest
    text = (exported.folder / MANIFEST).read_text()
    assert str(exported.folder.parent) not in text  # says nothing of the machine


CARD = "---\r\nlicense: other\r\n---\r\n# tiny\r\n\r\nIn float32, caf\xe9.\r\n"


def test_the_card_says_what_the_weights_are_in(tiny_folder: Path, tmp_path: Path) -> None:
    """Behind its metadata; bytes that aren't UTF-8 stay, too."""
    source, card = shutil.copytree(tiny_folder, tmp_path / "tiny"), CARD.encode("latin-1")
    (source / "README.md").write_bytes(card)
    export_model(source, tmp_path / "plain")
    assert (tmp_path / "plain" / "README.md").read_bytes() == card
    export_model(source, tmp_path / "codes", weights=NewWeights(quant="w8a8"))
    noted = (tmp_path / "codes" / "README.md").read_bytes()
    head, _, rest = noted.partition(b"> Exported by Penstock from tiny: weights in w8a8 by rtn, ")
    said, _, rest = rest.partition(b"\n\n")
    assert head + rest == card and head.endswith(b"---\r\n")
    assert said.endswith(b"The card below is the original's, and speaks of its weights.")
    verify_exported(tmp_path / "codes")


def test_what_it_was_exported_for_is_what_engines_use(tiny_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "bfloat16"
    shutil.copytree(tiny_folder, source)
    config = json.loads((tiny_folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    whole = load_file(tiny_folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in whole.items()}, source / "model.safetensors")
    done = export_model(source, tmp_path / "out", kv_cache_dtype="int8", max_model_len=64)
    assert [len(layer) for layer in done.graph.caches] == [4] * 3  # with scales
    llm = LLM(tmp_path / "out", skip_tokenizer_init=True, num_gpu_blocks_override=8)
    assert llm.runtime.layout.dtype is torch.int8 and llm.runtime.model.max_model_len == 64
    llm = LLM(tmp_path / "out", skip_tokenizer_init=True, kv_cache_dtype="fp8", max_model_len=96)
    assert llm.runtime.layout.dtype is torch.float8_e4m3fn
    assert llm.runtime.model.max_model_len == 96
    llm = LLM(tmp_path / "out", skip_tokenizer_init=True, kv_cache_dtype="bfloat16")
    assert llm.runtime.layout.dtype is torch.bfloat16
    wide = {"skip_tokenizer_init": True, "dtype": "float32"}
    with pytest.raises(ConfigError, match=r"or say kv_cache_dtype='float32'\."):
        LLM(tmp_path / "out", **wide)
    assert LLM(tmp_path / "out", kv_cache_dtype="float32", **wide).runtime.layout.dtype is (
        torch.float32
    )
    again = export_model(tmp_path / "out", tmp_path / "again", kv_cache_dtype="bfloat16")
    assert again.manifest.kv_cache_dtype == "bfloat16"
    assert [len(layer) for layer in again.graph.caches] == [2] * 3
    options = BuildOptions(tmp_path / "out", tmp_path / "engine", kv_cache_dtype="bfloat16")
    assert build(options)["choices"]["kv_cache_dtype"] == "bfloat16"
    llm = LLM(tmp_path / "engine", skip_tokenizer_init=True)
    assert llm.runtime.layout.dtype is torch.bfloat16


def test_a_folder_that_is_taken(exported: Export, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exists\. Give --force to replace it"):
        export_model(tiny_folder, exported.folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"holds files that Penstock didn't write|is a file"):
        export_model(tiny_folder, tmp_path / "mine", force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"holds files that Penstock didn't write|is a file"):
        export_model(tiny_folder, tmp_path / "file", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine"]


def test_force_keeps_what_is_somebody_elses(tiny_folder: Path, tmp_path: Path) -> None:
    export_model(tiny_folder, tmp_path / "out")
    letter = tmp_path / "out" / "letters" / "one.txt"
    letter.parent.mkdir()
    letter.write_text("dear")
    with pytest.raises(ConfigError, match=r"holds letters/one\.txt, which wasn't written with it"):
        export_model(tiny_folder, tmp_path / "out", force=True)
    assert letter.read_text() == "dear"
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="holds files that Penstock didn't write"):
        export_model(tiny_folder, tmp_path / "stray", force=True)


def test_force_replaces_an_export(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty folder is free
    export_model(tiny_folder, tmp_path / "out")
    export_model(tiny_folder, tmp_path / "out", force=True, max_model_len=32)
    assert verify_exported(tmp_path / "out").max_model_len == 32
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cant_be_written(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="There is no folder"):
        export_model(tiny_folder, tmp_path / "file" / "out")


def test_an_engine_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "engine.json").write_text("{}")
    with pytest.raises(ConfigError, match="is an engine: export the model"):
        export_model(tmp_path / "engine", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_a_model_that_fails_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' is widened to bfloat16"):
        export_model(tiny_folder, tmp_path / "out", kv_cache_dtype="int8")  # float32
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, sys
from pathlib import Path
from penstock.errors import EngineFolderError
from penstock.pipeline.export import export_model
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file grows beyond it
try:
    export_model(sys.argv[1], Path(sys.argv[2]))
except EngineFolderError as error:
    print(error)
"""


def test_a_disk_that_is_full(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tiny_folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "The disk filled up while" in done.stdout and "are free now" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut", r"model\.safetensors has 1,000 bytes, but was exported with"),
        ("gone", r"graph\.pt2 is missing"),
        ("garbled", r"penstock\.json isn't a manifest"),
        ("endless", r"penstock\.json isn't a manifest: OverflowError"),
        ("unsummed", r"penstock\.json isn't a manifest: KeyError\('sha256'\)"),
        ("long", r"penstock\.json isn't a manifest: TypeError\(.*'max_model_len': 'x'"),
        ("deep", r"penstock\.json isn't a manifest: RecursionError"),
        ("newer", "has format 99, but this Penstock reads 1"),
    ],
)
def test_a_folder_that_was_damaged(
    tiny_folder: Path, tmp_path: Path, damage: str, words: str
) -> None:
    folder = export_model(tiny_folder, tmp_path / "out").folder
    manifest = folder / MANIFEST
    if damage == "cut":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "gone":
        (folder / "graph.pt2").unlink()
    elif damage == "garbled":
        manifest.write_text(manifest.read_text()[:-9])
    elif damage == "deep":
        manifest.write_text("[" * 100_000)
    else:
        said = json.loads(manifest.read_text())
        changes = {
            "endless": {"files": {"graph.pt2": {"bytes": float("inf"), "sha256": ""}}},
            "unsummed": {"files": {"graph.pt2": {"bytes": 1}}},
            "long": {"choices": said["choices"] | {"max_model_len": "x"}},
            "newer": {"format": 99},
        }
        manifest.write_text(json.dumps(said | changes[damage]))
    with pytest.raises(ModelError, match=words):
        LLM(folder, skip_tokenizer_init=True)


def test_a_file_that_was_changed(tiny_folder: Path, tmp_path: Path) -> None:
    folder = export_model(tiny_folder, tmp_path / "out").folder
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors has been changed since"):
        verify_exported(folder)


KILLED = """
import os, random, signal, sys
from pathlib import Path
import torch
from penstock.pipeline.export import export_model

source, output = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
events = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile"}

def count(limit):
    # the process ends by SIGKILL at its `limit`-th doing in the folder
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in events and str(output) in str(args[0]):
            seen += 1
            if seen == limit:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    export_model(source, output, force=True, max_model_len=64)
    return seen

def child(limit):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(count(limit)).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    found = os.read(reader, 64)
    os.close(reader)
    return found, status

export_model(source, output, max_model_len=32)  # and whatever is imported late is now
total = int(child(-1)[0])
print(total, flush=True)
for limit in sorted(random.Random(7).sample(range(1, total + 1), 10)):
    _, status = child(limit)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    print(limit, flush=True)
    sys.stdin.readline()
"""


def test_killed_at_ten_random_moments(tiny_folder: Path, tmp_path: Path) -> None:
    """What is left is an earlier export, the new one, or nothing that loads wrongly."""
    output = tmp_path / "out"
    want = weights_of(load_model(tiny_folder, max_model_len=32).model)
    command = [sys.executable, "-c", KILLED, str(tiny_folder), str(output)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as running:  # type: ignore[call-overload]
        total = int(running.stdout.readline())
        assert total > 20
        for _ in range(10):
            assert running.stdout.readline()
            if output.exists():
                assert verify_exported(output).max_model_len in (32, 64)
            else:  # between two renames
                assert verify_exported(tmp_path / ".out.replaced").max_model_len in (32, 64)
            partial = tmp_path / "out.partial"
            try:
                left = load_model(partial, max_model_len=32) if partial.exists() else None
            except PenstockError:
                left = None
            assert left is None or same(weights_of(left.model), want)
            running.stdin.write("\n")
            running.stdin.flush()
        assert running.wait() == 0
    done = export_model(tiny_folder, output, force=True)
    assert read_exported(output) == done.manifest
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("output", [".", ".."])
def test_into_the_folder_where_one_stands(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine").write_text("")
    monkeypatch.chdir(tmp_path / "deep")
    with pytest.raises(ConfigError, match="holds files that Penstock didn't write"):
        export_model(tiny_folder, Path(output))
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    with pytest.raises(ConfigError, match="lies inside /, which would be replaced"):
        export_model(tiny_folder, Path("/"))
