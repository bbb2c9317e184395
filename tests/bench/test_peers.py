"""`benchmarks/peers`: who runs when, what is compared with what, and the commands that are built.

No peer is run here: a fake one stands in for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.peers import __main__ as command
from benchmarks.peers import figure, home, llama_cpp, rounds, table
from benchmarks.peers.openvino_genai import OpenVino
from benchmarks.peers.penstock_peer import DEFAULT_FORMATS, Penstock, arguments
from benchmarks.peers.protocol import (
    Format,
    Found,
    Missing,
    PeerError,
    Reply,
    Settings,
    Sizes,
    Work,
)
from benchmarks.peers.transformers_peer import Transformers
from benchmarks.peers.vllm_cpu import Vllm

from penstock.hardware import Peaks

ROOT = Path(__file__).resolve().parents[2]
PEAKS = Peaks(2e10, 1e11, 1e12, 2, "2026-11-21T00:00:00+00:00")
SETTINGS = Settings(threads=2, tokens=32, seed=7, timeout_s=60)
HALF = Format("half", 16, 2.0, 2.0, "half")
BYTE = Format("byte", 8, 1.0, 1.0, "byte")
WORKS = [Work.parse(text) for text in ("decode@128", "prefill@512", "batch8")]


@dataclass
class Fake:
    """A peer that says what it is told to, one reply a run."""

    name: str
    speeds: Sequence[float]
    formats: tuple[Format, ...] = (HALF,)
    install: str = "true"
    seeds: list[int] = field(default_factory=list)

    def available(self) -> Found | Missing:
        return Found("1") if self.speeds else Missing("it isn't built.")

    def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
        return checkpoint

    def run(self, model: Path, form: Format, works: Sequence[Work], settings: Settings) -> Reply:
        self.seeds.append(settings.seed)
        value = self.speeds[len(self.seeds) - 1]
        if value < 0:
            raise PeerError("out of memory")
        return Reply({work.name: value for work in works}, weight_bytes=12)


def contender(name: str, speeds: Sequence[float], form: Format = HALF) -> rounds.Contender:
    return rounds.Contender(Fake(name, speeds), form, 100, Path())


def turns(
    contenders: Sequence[rounds.Contender], count: int, say: Callable[[str], None] = len
) -> list[dict[str, Any]]:
    """Measure; the log of the last round."""
    logs: list[tuple[int, list[dict[str, Any]]]] = []
    rounds.measure(
        contenders, WORKS, SETTINGS, rounds=count, peaks=lambda: PEAKS, say=say,
        keep=lambda done, log: logs.append((done, log)),
    )  # fmt: skip
    assert [done for done, _ in logs] == list(range(1, count + 1))
    return logs[-1][1]


def measured(*contenders: rounds.Contender, count: int) -> dict[str, Any]:
    """The JSON of a run of `contenders`."""
    runs = turns(contenders, count)
    return {
        "setup": {
            "model": "toy",
            "works": [work.name for work in WORKS],
            "rounds": count,
            "tokens": 32,
            "threads": 2,
        },
        "peers": {"a": "1"},
        "skipped": {"b": "it isn't built."},
        "contenders": [each.as_dict() for each in contenders],
        "runs": runs,
        "hardware": {"processor": "a <processor>", "cores": 2},
        "isa": "avx2",
    }


@pytest.fixture
def result() -> dict[str, Any]:
    return measured(
        contender("Penstock", [10, 20, 30]),
        contender("Penstock", [40, 50, 60], BYTE),
        contender("a", [5, 8, 60]),
        contender("b", [4, 10, 10]),
        contender("b", [30, 30, 30], BYTE),
        count=3,
    )


def test_works() -> None:
    assert Work.parse("decode@2000") == Work("decode", 1, 2000)
    assert Work.parse("prefill@512") == Work("prefill", 1, 512)
    assert Work.parse("batch8") == Work("decode", 8, 128)
    assert Work.parse("batch8@2000") == Work("decode", 8, 2000)
    for name in ("decode@128", "prefill@2048", "batch16", "batch16@2000"):
        assert Work.parse(name).name == name
    for wrong in ("decode", "decode@0", "batch", "prefill@x", "batch8@", "train@1"):
        with pytest.raises(ValueError, match="isn't a work"):
            Work.parse(wrong)


def test_the_order_rotates() -> None:
    assert [rounds.rotated("abc", i) for i in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rounds.rotated([], 2) == []


def test_medians_leave_out_what_failed() -> None:
    assert rounds.median([3.0, 1.0, 2.0]) == 2.0
    assert rounds.median([3.0, None, 1.0]) == 2.0
    assert rounds.median([None]) is None


def test_every_round_runs_every_engine_once() -> None:
    a, b = contender("a", [1, 2, 3]), contender("b", [4, -1])
    said: list[str] = []
    log = turns([a, b], 3, said.append)
    assert [(run["round"], run["contender"]) for run in log] == [
        (0, "a half"), (0, "b half"), (1, "b half"), (1, "a half"), (2, "a half"),
    ]  # fmt: skip
    assert a.samples["batch8"] == [1, 2, 3]
    assert b.samples["batch8"] == [4, None, None]  # it failed, and wasn't run again
    assert b.error == "out of memory"
    assert "    failed: out of memory" in said
    assert isinstance(a.peer, Fake) and a.peer.seeds == [7, 8, 9]
    assert a.weight_bytes == 12  # the engine's own count


def test_ratios_pair_the_rounds(result: dict[str, Any]) -> None:
    """Against the peer with the best median; the median of the rounds' ratios."""
    equal = [r for r in table.ratios(result, equal_bits=True) if r.work == "batch8"]
    assert [(table.name(r.ours), table.name(r.best), r.ratio) for r in equal] == [
        ("Penstock half", "b half", 2.5),  # 10/4, 20/10, 30/10
        ("Penstock byte", "b byte", pytest.approx(5 / 3)),
    ]
    best = [r for r in table.ratios(result, equal_bits=False) if r.work == "batch8"]
    assert [(table.name(r.best), r.ratio) for r in best] == [
        ("b byte", pytest.approx(2 / 3)),
        ("b byte", pytest.approx(5 / 3)),
    ]


def test_no_ratio_without_a_rival() -> None:
    result = measured(contender("Penstock", [1]), contender("a", [-1]), count=1)
    assert table.ratios(result, equal_bits=False) == []
    report = table.report(result)
    assert "a half failed: out of memory" in report
    assert "No peer has a figure" in report
    assert "medians of 1 round," in report


def test_the_report(result: dict[str, Any]) -> None:
    report = table.report(result)
    assert "| Penstock half | half | 0 | 20.0 (0%) | 20.0 | 20.0 |" in report
    assert "| Penstock half | equal bits | 2.50× b half | 2.50× b half | 2.50× b half |" in report
    assert "b skipped: it isn't built." in report
    assert "20.0 GB/s" in report


def test_the_figure_has_a_bar_for_each_engine(result: dict[str, Any]) -> None:
    drawn = ElementTree.fromstring(figure.svg(result))
    space = "{http://www.w3.org/2000/svg}"
    rects = drawn.findall(f".//{space}rect")
    # each work: three engines at 16 bits, two at 8
    assert [r.get("class") for r in rects] == ["us", "them", "them", "us", "them"] * 3
    widths = [float(r.get("width") or 0) for r in rects[:3]]
    assert widths[1] == pytest.approx(widths[0] / 20 * 9, rel=0.2)  # medians 20, 10 and 8
    texts = [text.text for text in drawn.findall(f".//{space}text")]
    for word in ("16 bits a weight", "8 bits a weight", "batch8", "Penstock", "a", "b", "50.0"):
        assert word in texts
    assert any("a <processor>" in (text or "") for text in texts)
    one = ElementTree.fromstring(figure.svg(result, ["batch8"]))
    assert len(one.findall(f".//{space}rect")) == 5


def test_the_figure_is_written(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(json.dumps(result))
    words = [sys.executable, "-m", "benchmarks.peers.figure", "out.svg", "in.json"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


def test_bytes_of_a_format(tiny: Path) -> None:
    """2 layers of hidden 64, 128 inside, 4 heads and 2 for keys; 512 words, tied."""
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64
    sizes = home.sizes(tiny)
    assert sizes == Sizes(2 * layer, 512 * 64)
    assert llama_cpp.Q4_0.weight_bytes(sizes) == 2 * layer * 18 // 32 + 512 * 64 * 34 // 32


def test_a_conversion_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "model").write_text("x")
        if len(made) == 1:
            raise PeerError("half-way")

    with pytest.raises(PeerError):
        home.once(tmp_path / "x", make)
    assert not (tmp_path / "x").exists()
    for _ in range(2):
        assert home.once(tmp_path / "x", make) == tmp_path / "x"
    assert len(made) == 2
    assert (tmp_path / "x" / "model").read_text() == "x"


def test_equal_checkpoints_have_one_digest(
    make_checkpoint: Any, tiny: Path, tmp_path: Path
) -> None:
    make_checkpoint.write_checkpoint("tiny", tmp_path / "same")
    make_checkpoint.write_checkpoint("tiny", tmp_path / "other", seed=1)
    assert home.digest(tmp_path / "same") == home.digest(tiny) != home.digest(tmp_path / "other")


def test_absent_peers_say_why_and_how(tmp_path: Path) -> None:
    peers = [kind(tmp_path) for kind in command.PEERS.values()]
    found, skipped = command.look_for([Penstock(tmp_path), *peers])
    assert list(found) == ["Penstock"]
    assert list(skipped) == ["llama.cpp", "OpenVINO", "transformers", "vLLM"]
    for name, reason in zip(command.PEERS, skipped.values(), strict=True):
        assert str(tmp_path) in reason
        assert reason.endswith(f"Install it: python -m benchmarks.peers --install {name}")


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"'llama': choose from llama\.cpp, openvino"):
        command.chosen_peers("llama,openvino", tmp_path)
    assert [peer.name for peer in command.chosen_peers("vllm,openvino", tmp_path)] == [
        "vLLM",
        "OpenVINO",
    ]


def test_rivals_run_one_after_another(tiny: Path, tmp_path: Path) -> None:
    peers = [Penstock(tmp_path), Fake("a", [1], (HALF, BYTE))]
    found = command.line_up(peers, tiny, tmp_path, [16, 8], ["bfloat16", "w8a8", "w4a8"])
    assert [each.label for each in found] == [
        "Penstock bfloat16",
        "a half",
        "Penstock w8a8",
        "a byte",
    ]
    assert found[-1].weight_bytes == sum(astuple(home.sizes(tiny)))


def test_a_failed_conversion_is_kept(tiny: Path, tmp_path: Path) -> None:
    class Broken(Fake):
        def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
            raise PeerError("no such architecture")

    (found,) = command.line_up([Broken("a", [1])], tiny, tmp_path, [16], [])
    assert found.error == "no such architecture"


@pytest.mark.parametrize(
    "kind", [llama_cpp.LlamaCpp, OpenVino, Transformers, Vllm], ids=lambda kind: kind.__name__
)
def test_install_is_bash(kind: Any) -> None:
    script = kind(Path()).install
    assert "venv/bin/pip" in script
    subprocess.run(["bash", "-n", "-c", script], check=True)


def test_commands_of_llama_cpp() -> None:
    tool, model = Path("tool"), Path("m.gguf")
    works = [Work.parse(w) for w in command.WORKS.split(",")] + [Work.parse("batch4@2000")]
    shared = ["tool", "-m", "m.gguf", "-t", "2"]
    assert llama_cpp.bench_commands(tool, model, works, SETTINGS) == [
        [*shared, "-r", "1", "-o", "json", "-p", "0", "-n", "32", "-d", "128,2000"],
        [*shared, "-r", "1", "-o", "json", "-p", "512,2048", "-n", "0"],
    ]
    batched = llama_cpp.batched_commands(tool, model, works, SETTINGS)
    assert [words[words.index("-npl") + 1] for words in batched] == ["8,16", "4"]
    assert [words[words.index("-npp") + 1] for words in batched] == ["128", "2000"]
    assert [words[words.index("-c") + 1] for words in batched] == ["2560", "8128"]
    assert llama_cpp.bench_commands(tool, model, [Work.parse("batch8")], SETTINGS) == []
    quantize = llama_cpp.quantize_command(tool, Path("a"), Path("b"), llama_cpp.Q4_0)
    assert quantize == [
        "tool", "--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0", "a", "b", "Q4_0",
    ]  # fmt: skip


def test_answers_of_llama_cpp() -> None:
    tests = [
        {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ts": 100.5},
        {"n_prompt": 0, "n_gen": 32, "n_depth": 2000, "avg_ts": 9.5},
    ]
    assert llama_cpp.read_bench(json.dumps(tests)) == {"prefill@512": 100.5, "decode@2000": 9.5}
    line = json.dumps({"pp": 128, "tg": 32, "pl": 16, "speed_pp": 1.0, "speed_tg": 88.0})
    assert llama_cpp.read_batched(f"warm-up\n{line}\n\n") == {"batch16": 88.0}
    assert llama_cpp.read_batched("") == {}


def test_what_a_runner_is_told_and_says() -> None:
    told = home.job(Path("m"), [Work.parse("batch8")], SETTINGS, arguments={"quantization": "w8a8"})
    assert told == {
        "model": "m",
        "works": [{"name": "batch8", "kind": "decode", "batch": 8, "context": 128}],
        "threads": 2,
        "tokens": 32,
        "seed": 7,
        "arguments": {"quantization": "w8a8"},
    }
    reply = home.read_reply('noise\nPEERS {"speeds": {"batch8": 3.5}}\nmore noise\n')
    assert reply == Reply({"batch8": 3.5})
    with pytest.raises(PeerError, match="without a reply"):
        home.read_reply("noise")


def test_formats_of_penstock() -> None:
    forms = {form.name: form for form in Penstock(Path()).formats}
    assert arguments(forms["bfloat16"]) == {}
    assert arguments(forms["w4a8"]) == {"quantization": "w4a8"}
    assert [forms[name].bits for name in ("w8a16", "w8a8", "w4a16", "w4a8")] == [8, 8, 4, 4]
    assert set(DEFAULT_FORMATS) < set(forms) == set(command.OUR_FORMATS)


def test_a_program_that_fails_has_the_last_word() -> None:
    def words(script: str) -> list[str]:
        return [sys.executable, "-c", script]

    assert home.call(words("print('fine')"), timeout_s=60, threads=1) == "fine\n"
    with pytest.raises(PeerError, match=r"^ValueError: too few$"):
        home.call(words("raise ValueError('too few\\nmore')"), timeout_s=60, threads=1)
    with pytest.raises(PeerError, match="longer than"):
        home.call(words("import time; time.sleep(60)"), timeout_s=0.2, threads=1)
    with pytest.raises(PeerError, match="No such file"):
        home.call(["/nonexistent/tool"], timeout_s=1, threads=1)


def test_penstock_runs_the_work(tiny: Path) -> None:
    """The real runner on a tiny checkpoint: the one engine that is always here."""
    penstock = Penstock(Path())
    works = [Work.parse(text) for text in ("decode@40", "prefill@48", "batch3@16")]
    settings = Settings(threads=1, tokens=4, seed=0, timeout_s=300)
    reply = penstock.run(tiny, penstock.formats[0], works, settings)
    assert list(reply.speeds) == ["decode@40", "prefill@48", "batch3@16"]
    assert all(speed > 0 for speed in reply.speeds.values())
    assert reply.weight_bytes == penstock.formats[0].weight_bytes(home.sizes(tiny))


def test_the_clock_of_the_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(home.RUNNERS))
    import common

    # two sequences; the second's first token comes with the first's second
    times = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0]]
    assert common.speed("decode", 0, 0.0, times) == pytest.approx(4 / 2)
    assert common.speed("prefill", 100, 1.0, [[6.0]]) == pytest.approx(20.0)
    work = {"name": "batch2", "kind": "decode", "batch": 2, "context": 9}
    given = common.prompts(3, work, 50)
    assert [len(ids) for ids in given] == [9, 9]
    assert given == common.prompts(3, work, 50) != common.prompts(4, work, 50)
    asked: list[tuple[int, int]] = []

    def generate(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[float]]]:
        asked.append((len(prompts), tokens))
        return 0.0, [[1.0 + i for i in range(tokens)] for _ in prompts]

    job = {"seed": 0, "tokens": 32, "works": [work, {**work, "name": "p", "kind": "prefill"}]}
    assert common.measure(job, 50, generate) == {"batch2": 2.0, "p": 18.0}
    assert asked == [(1, 4), (2, 33), (2, 1)]  # warm-up, a token to start from, one token
