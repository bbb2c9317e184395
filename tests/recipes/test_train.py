"""The loop: schedules, budgets, and that a killed run ends as if nothing had happened."""

import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipes.batches import Batch, Mixture, Windows
from recipes.corpus import Stream
from recipes.family import Distillation, pretrain
from recipes.model import Llama, Shape
from recipes.prepare import prepare
from recipes.train import TrainConfig, Trainer, cross_entropy, learning_rate
from torch import nn
from torch.nn import functional as F

from penstock.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMALL = Shape(vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2,
              num_kv_heads=1, head_dim=32, context=32)  # fmt: skip


def mixture(seed: int = 0, rows: int = 4) -> Mixture:
    generator = torch.Generator().manual_seed(5)
    # every token says what the next one is: something to learn
    step = torch.randint(0, 2, (4000,), generator=generator).cumsum(0) % 64
    source = Windows(Stream(step.numpy().astype("uint16"), 4000), 32)
    return Mixture({"a": source}, {"a": (1, 1)}, rows, seed, isolate=False)


def trainer(folder: Path, config: TrainConfig, dropout: float = 0.1) -> Trainer:
    model = Llama(SMALL, dropout).initialise(0)
    held_out = {"text": mixture(seed=9).batch(0.0)}
    return Trainer(folder, model, mixture(rows=config.rows), config, held_out=held_out)


def quick(**changed: object) -> TrainConfig:
    chosen = {"steps": 40, "rows": 4, "micro_rows": 2, "learning_rate": 3e-3, "save_every": 15}
    return TrainConfig(**chosen | changed)  # type: ignore[arg-type]


def test_the_learning_rate_warms_up_and_anneals() -> None:
    config = quick(warm_up=0.1, decay=0.4)
    rates = [learning_rate(i / 100, config) for i in range(101)]
    assert max(rates) == rates[10] == config.learning_rate
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[60] == pytest.approx(config.learning_rate)
    assert rates[70] == pytest.approx(config.learning_rate * 0.5)
    assert rates[100] == 0.0


@pytest.mark.parametrize("muon", [True, False])
def test_the_loss_falls_and_is_logged(tmp_path: Path, muon: bool) -> None:
    progress = trainer(tmp_path, quick(muon=muon), dropout=0.0).run()
    first, last = progress.history[0]["text"], progress.history[-1]["text"]
    assert first > 3.0
    assert last < first - 0.5
    assert progress.tokens == 40 * 4 * 32
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == progress.history
    assert (tmp_path / "loss.svg").read_text().count("<polyline") == 2


def test_micro_batches_add_up_to_the_whole_step(tmp_path: Path) -> None:
    found = []
    for micro_rows in (4, 1):
        run = trainer(tmp_path / str(micro_rows), quick(micro_rows=micro_rows, steps=1), dropout=0)
        run.run()
        found.append(run.model.model.layers[0].mlp.up_proj.weight.detach().clone())
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-4)


def test_rows_are_short_at_first(tmp_path: Path) -> None:
    run = trainer(tmp_path, quick(steps=10, short_length=8, short_until=0.5), dropout=0.0)
    lengths = []
    run.model.register_forward_pre_hook(lambda _, given: lengths.append(tuple(given[0].shape)))
    progress = run.run()
    # two micro-batches of two rows a step, and what is scored after each, at the same length
    assert lengths == [(8, 8)] * 18 + [(2, 32)] * 22
    assert progress.tokens == 10 * 4 * 32


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", quick())
    whole.run()
    first = trainer(tmp_path / "parts", quick())
    steps = iter(range(25))
    original = first._step

    def stop_at_25() -> torch.Tensor:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return original()

    first._step = stop_at_25  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = trainer(tmp_path / "parts", quick())
    assert second.progress.step == 15  # the last multiple of save_every
    second.run()
    for name, weight in whole.model.state_dict().items():
        assert weight.equal(second.model.state_dict()[name]), name
    times = ("elapsed_s",)
    for a, b in zip(whole.progress.history, second.progress.history, strict=True):
        assert {k: v for k, v in a.items() if k not in (*times, "train_loss")} == {
            k: v for k, v in b.items() if k not in (*times, "train_loss")
        }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"learning_rate": 0.9}, "learning_rate 0.003 → 0.9"),
        ({"rows": 8}, "rows 4 → 8"),
        ({"seed": 7, "muon": False}, "muon True → False, seed 0 → 7"),
        ({"short_length": 16}, "short_length None → 16"),
    ],
)
def test_a_run_does_not_go_on_as_another(
    tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    trainer(tmp_path, quick(steps=3)).run()
    with pytest.raises(ConfigError, match=f"{words}.*or delete the folder"):
        trainer(tmp_path, quick(steps=3, **changed))
    trainer(tmp_path, quick(steps=5, save_every=2)).run()  # longer, and saved more often


def test_a_checkpoint_that_is_none_or_of_another_shape(tmp_path: Path) -> None:
    trainer(tmp_path, quick(steps=3)).run()
    wide = Llama(replace(SMALL, intermediate_size=128)).initialise(0)
    with pytest.raises(ConfigError, match="a model of another shape"):
        Trainer(tmp_path, wide, mixture(), quick(steps=3))
    (tmp_path / "checkpoint.pt").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="is damaged, or no checkpoint"):
        trainer(tmp_path, quick(steps=3))


@pytest.mark.parametrize(
    "changed",
    [{"steps": None, "minutes": float("nan")}, {"steps": None, "minutes": -1.0},
     {"learning_rate": float("nan")}, {"learning_rate": 0.0}],
)  # fmt: skip
def test_numbers_that_no_run_can_have(changed: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0"):
        quick(**changed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pretrain", "--size", "huge", "--steps", "1"), "--size huge isn't a shape: choose"),
        (("pretrain", "--steps", "1", "--device", "cuda"), "finds no GPU"),
        (("pretrain", "--size", "tiny", "--steps", "1"), "finetune.zip is no pack"),
        (("prepare", "--data", "/no/such"), "there is no /no/such"),
    ],
)
def test_a_command_that_cannot_run_says_so_in_a_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in ("pretrain.zip", "finetune.zip"):
        (tmp_path / name).write_bytes(b"garbage")
    found = subprocess.run(
        [sys.executable, "-m", "recipes", *words, "--work", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert found.returncode == 1
    assert said in found.stderr.replace("pretrain.zip", "finetune.zip")
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1


def test_a_run_that_is_lengthened_goes_on_being_looked_at(tmp_path: Path) -> None:
    trainer(tmp_path, quick(steps=20)).run()
    longer = trainer(tmp_path, quick(steps=40))
    assert longer.progress.step == 20
    progress = longer.run()
    looked_at = [entry["step"] for entry in progress.history]
    assert 20 in looked_at
    assert looked_at[-1] == 40
    assert sum(20 < step < 40 for step in looked_at) >= 5


def test_a_run_ends_with_the_weights_that_did_best(tmp_path: Path) -> None:
    run = trainer(tmp_path, quick(steps=60))
    steps, original = iter(range(30)), run._step

    def spoil_after_30() -> torch.Tensor:
        if next(steps, None) is None:
            with torch.no_grad():
                run.model.model.layers[0].mlp.up_proj.weight.normal_(std=10.0)
        return original()

    run._step = spoil_after_30  # type: ignore[method-assign]
    progress = run.run()
    losses = [entry["text"] for entry in progress.history]
    assert min(losses) < losses[-1] - 0.1
    run._evaluate(0.0)
    assert progress.history[-1]["text"] == pytest.approx(min(losses), abs=1e-3)


def test_a_run_by_the_clock_ends_in_time_with_its_rate_annealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.05 * next(ticks))
    monkeypatch.setattr("recipes.train.time", clock)
    run = trainer(tmp_path, quick(steps=None, minutes=0.05, save_every=None))
    progress = run.run()  # each look at the clock is 50 ms after the one before
    assert 2.8 <= progress.elapsed_s <= 3.0  # another step would have been too long
    assert progress.step == 29
    assert run.optimizers[0].param_groups[0]["lr"] < 0.2 * run.config.learning_rate
    assert progress.total_steps is not None


def test_steps_or_minutes_but_not_both() -> None:
    for steps, minutes in ((None, None), (5, 1.0)):
        with pytest.raises(ConfigError, match="--steps or --minutes"):
            TrainConfig(steps=steps, minutes=minutes)
    with pytest.raises(ConfigError, match="micro-batches of 3"):
        quick(micro_rows=3)


def test_a_run_may_begin_with_another_models_weights(made_up_data: Path, tmp_path: Path) -> None:
    prepare(made_up_data, tmp_path, vocab_size=512)
    shape = Shape(vocab_size=512, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2,
                  num_kv_heads=1, head_dim=32, context=64)  # fmt: skip
    cpu = torch.device("cpu")
    run = quick(steps=8, short_length=16)
    pretrain(tmp_path, run, shape, 0.0, cpu)
    first = (tmp_path / "base").rename(tmp_path / "first")
    (tmp_path / "base.training").rename(tmp_path / "before")
    history = pretrain(tmp_path, run, shape, 0.0, cpu, start=first).history
    before = json.loads((tmp_path / "before" / "log.jsonl").read_text().splitlines()[-1])
    assert history[0]["dialogues"] == pytest.approx(before["dialogues"], abs=0.1)
    wider = Shape(vocab_size=512, hidden_size=128, context=64)
    with pytest.raises(
        ConfigError, match=r"--start .* is Shape\(.*hidden_size=64.* this run trains"
    ):
        pretrain(tmp_path, run, wider, 0.0, cpu, start=first)
    with pytest.raises(ConfigError, match=r"there is no model\.safetensors"):
        pretrain(tmp_path, run, shape, 0.0, cpu, start=tmp_path)
    with pytest.raises(ConfigError, match="Rows of 64 tokens can't be cut into ones of 24"):
        pretrain(tmp_path, quick(short_length=24), shape, 0.0, cpu)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    run = trainer(tmp_path, quick())
    with torch.no_grad():
        run.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="lower --learning-rate"):
        run.run()
    assert not (tmp_path / "checkpoint.pt").exists()


def test_weights_of_zero_do_not_count() -> None:
    model = Llama(SMALL).initialise(0)
    tokens = torch.arange(33)[None] % 64
    weights = torch.zeros(1, 32)
    weights[0, 7] = 1.0
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits[0, 7:8], tokens[0, 8:9])
    torch.testing.assert_close(cross_entropy(model, Batch(tokens, weights, None)), expected)


class Fixed(nn.Module):
    """Logits that are what they are."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        return self.logits


def test_distillation_is_kl_and_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(1, 5, 9, generator=generator) for _ in "ab")
    tokens = torch.randint(0, 9, (1, 6), generator=generator)
    weights = torch.tensor([[1.0, 0, 1, 1, 0]])
    batch = Batch(tokens, weights, None)
    found = Distillation(Fixed(teacher))(Fixed(student), batch)
    kl = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    ce = F.cross_entropy(student[0], tokens[0, 1:], reduction="none")
    torch.testing.assert_close(found, ((0.7 * kl + 0.3 * ce) * weights).sum())
    # a student that is its teacher has no divergence left
    same = Distillation(Fixed(teacher))(Fixed(teacher), batch)
    own = F.cross_entropy(teacher[0], tokens[0, 1:], reduction="none")
    torch.testing.assert_close(same, 0.3 * (own * weights).sum())


def command(work: Path) -> list[str]:
    options = "--size tiny --steps 12 --rows 2 --save-every 2 --dropout 0.1 --device cpu"
    return [sys.executable, "-m", "recipes", "pretrain", "--work", str(work), *options.split()]


@pytest.mark.slow
def test_a_killed_process_is_resumed_to_the_same_weights(
    made_up_data: Path, tmp_path: Path
) -> None:
    works = [tmp_path / "whole", tmp_path / "killed"]
    for work in works:
        prepare(made_up_data, work, vocab_size=512)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(work: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(work), cwd=ROOT, env=environment)

    assert run(works[0]).wait(300) == 0
    process = run(works[1])
    checkpoint = works[1] / "base.training" / "checkpoint.pt"
    deadline = time.monotonic() + 300
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert not (works[1] / "base" / "model.safetensors").exists()
    assert run(works[1]).wait(300) == 0
    weights = [(work / "base" / "model.safetensors").read_bytes() for work in works]
    assert weights[0] == weights[1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an allocator of another kind")
def test_freed_memory_is_kept() -> None:
    """A large block has the pages of one before. In a process of its own: the setting stays."""
    program = (
        "import resource, torch\n"
        "from recipes.throughput import keep_memory\n"
        "assert keep_memory()\n"
        "def faults():\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def make(times):\n"
        "    for _ in range(times):\n"
        "        torch.ones(64 << 20, dtype=torch.uint8)\n"
        "make(20)\n"
        "before = faults()\n"
        "make(20)\n"
        "assert faults() - before < (64 << 20) // 4096, faults() - before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
