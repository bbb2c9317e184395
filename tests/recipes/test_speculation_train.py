"""The runs: losses, that a killed run ends as if nothing had happened, the commands."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.speculation.__main__ import main
from recipes.speculation.card import card
from recipes.speculation.default_text import SOURCES, TOPICS, default_text
from recipes.speculation.draft import KL_SHARE, Draft
from recipes.speculation.eagle import TOKEN_SHARE, Eagle
from recipes.speculation.eagle3 import Eagle3
from recipes.speculation.guesser import Guesser, distribution_loss
from recipes.speculation.load import load_guesser
from recipes.speculation.medusa import Medusa
from recipes.speculation.run import REPORT, HeadTrainer, measure_again, train
from recipes.speculation.settings import Settings
from recipes.speculation.target import Target
from recipes.speculation.text import read_documents
from recipes.train import TrainConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from penstock.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TEXT = torch.tensor([[5, 9, 2, 33, 17, 60, 8, 41], [7, 7, 3, 1, 90, 2, 0, 0]])
WEIGHTS = torch.tensor([[0.0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])

MAKE: dict[str, Callable[[Target, Tensor], Guesser]] = {
    "medusa": lambda target, counts: Medusa(target, 2, 1, shared_head=True),
    "eagle": lambda target, counts: Eagle(target, steps=2),
    "eagle3": lambda target, counts: Eagle3(target, counts, draft_vocab_size=30, steps=2),
    "draft": lambda target, counts: Draft(target, hidden_size=16, num_layers=1,
                                          intermediate_size=24),
}  # fmt: skip


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs: what the target wrote for one is there for the others."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def settings(
    target_folder: Path, tmp_path: Path, work: Path, request: pytest.FixtureRequest
) -> Callable[..., Settings]:
    """A run on the alphabet, told again and again from another letter on."""
    letters = "abcdefghijklmnopqrstuvwxyz" * 3
    entries = [{"text": letters[i : i + 30], "held_out": i % 6 == 0} for i in range(26)]
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def make(output: str = "out", **changed: Any) -> Settings:
        chosen = {"length": 32, "evaluate": 2, "depth": 2} | changed
        name = f"{request.node.name}-{output}"
        return Settings(str(target_folder), data, tmp_path, tmp_path / name, work, **chosen)

    return make


def quick(**changed: Any) -> TrainConfig:
    chosen = {"steps": 10, "rows": 4, "micro_rows": 2, "learning_rate": 5e-3, "save_every": 4}
    return TrainConfig(**chosen | changed)


@torch.no_grad()
@pytest.mark.parametrize("text_labels", [True, False])
def test_medusas_loss(target: Target, text_labels: bool) -> None:
    heads = Medusa(target, 2, 1, text_labels=text_labels)
    seen = target.look(TEXT)
    expected = 0.0
    for row in range(2):
        for k, logits in enumerate(heads.guesses(seen, 2)):
            for t in range(TEXT.shape[1] - 2 - k):
                wanted = seen.logits[row, t + 1 + k].softmax(-1)
                if text_labels:
                    wanted = F.one_hot(TEXT[row, t + 2 + k], 96).float()
                loss = F.cross_entropy(logits[row, t], wanted)
                expected += 0.8**k * float(loss * WEIGHTS[row, t + 1 + k])
    assert float(heads.loss(seen, WEIGHTS)) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_eagles_loss(target: Target) -> None:
    head = Eagle(target).eval()  # without noise
    seen = target.look(TEXT)
    (found,) = head.features(seen, 1)
    expected = 0.0
    for row in range(2):
        for t in range(TEXT.shape[1] - 1):
            true = seen.features[row, t + 1]
            loss = F.smooth_l1_loss(found[row, t], true)
            guess = found[row, t] @ target.head.T
            loss = loss + TOKEN_SHARE * F.cross_entropy(guess, seen.logits[row, t + 1].softmax(-1))
            expected += float(loss * WEIGHTS[row, t])
    assert float(head.loss(seen, WEIGHTS)) == pytest.approx(expected, rel=1e-5)
    torch.manual_seed(0)
    noisy = float(head.train().loss(seen, WEIGHTS))
    assert noisy != pytest.approx(expected, rel=1e-6)
    assert noisy == pytest.approx(expected, rel=0.2)


@torch.no_grad()
def test_eagle3s_loss_leaves_out_what_it_cant_guess(target: Target) -> None:
    head = Eagle3(target, torch.arange(96), draft_vocab_size=48, steps=3)
    assert head.kept.tolist() == list(range(48, 96))
    seen = target.look(TEXT, head.stream_ids)
    expected, left_out = 0.0, 0
    for row in range(2):
        for d, logits in enumerate(head.rows(seen, 3)):
            for t in range(TEXT.shape[1] - 1 - d):
                true = seen.logits[row, t + 1 + d]
                if true.argmax() < 48:
                    left_out += 1
                    continue
                loss = F.cross_entropy(logits[row, t], true[48:].softmax(-1))
                expected += 0.8**d * float(loss * WEIGHTS[row, t + d])
    assert left_out > 5
    assert float(head.loss(seen, WEIGHTS)) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_a_drafts_loss_is_kl_and_cross_entropy(target: Target) -> None:
    draft = MAKE["draft"](target, TEXT)
    assert isinstance(draft, Draft)
    seen = target.look(TEXT)
    found = draft.logits(TEXT)[:, :-1].log_softmax(-1)
    true = seen.logits[:, :-1]
    kl = F.kl_div(found, true.softmax(-1), reduction="none").sum(-1)
    own = F.cross_entropy(found.mT, TEXT[:, 1:], reduction="none")
    expected = ((KL_SHARE * kl + (1 - KL_SHARE) * own) * WEIGHTS).sum()
    torch.testing.assert_close(draft.loss(seen, WEIGHTS), expected)


@pytest.mark.parametrize("kind", MAKE)
def test_training_lowers_the_loss_and_leaves_the_target_as_it_is(
    settings: Callable[..., Settings], target: Target, kind: str
) -> None:
    chosen = settings(self_distill=10)
    found = train(kind, MAKE[kind], {}, chosen, quick(steps=16, evaluate_every=0.5))
    log = chosen.work / f"{chosen.output.name}.training" / "log.jsonl"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert entries[-1]["text"] < entries[0]["text"]
    report = json.loads((chosen.output / "acceptance.json").read_text())
    assert report["method"] == kind
    assert report["steps"] == 16
    assert report["acceptance"]["greedy"]["right"] == found["greedy"].right
    assert set(found) == {"greedy", "sampled", "text"}
    assert found["greedy"].places > 20
    stored = load_file(target.folder / "model.safetensors")
    again = Target(target.folder).model.state_dict()
    assert all(again[name].equal(tensor.float()) for name, tensor in stored.items())


@pytest.mark.parametrize("kind", MAKE)
def test_a_run_that_was_interrupted_ends_with_the_same_bits(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole, parts = settings("whole"), settings("parts")
    train(kind, MAKE[kind], {}, whole, quick())
    steps, original = iter(range(6)), HeadTrainer._step

    def stop_at_6(self: HeadTrainer) -> Tensor:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "_step", stop_at_6)
        with pytest.raises(KeyboardInterrupt):
            train(kind, MAKE[kind], {}, parts, quick())
    assert not parts.output.exists()
    state = torch.load(
        parts.work / f"{parts.output.name}.training" / "checkpoint.pt", weights_only=True
    )
    assert state["progress"]["step"] == 4
    train(kind, MAKE[kind], {}, parts, quick())
    (file,) = (path.name for path in whole.output.glob("*.safetensors"))
    assert (whole.output / file).read_bytes() == (parts.output / file).read_bytes()
    reports = [json.loads((s.output / "acceptance.json").read_text()) for s in (whole, parts)]
    assert reports[0]["acceptance"] == reports[1]["acceptance"]


def test_another_run_isnt_gone_on_with(settings: Callable[..., Settings]) -> None:
    train("medusa", MAKE["medusa"], {"heads": 2}, settings(), quick(steps=2))
    train("medusa", MAKE["medusa"], {"heads": 2}, settings(), quick(steps=3))  # longer is the same
    for changed in (
        lambda: train("medusa", MAKE["medusa"], {"heads": 3}, settings(), quick()),
        lambda: train("eagle", MAKE["eagle"], {}, settings(), quick()),
        lambda: train("medusa", MAKE["medusa"], {"heads": 2}, settings(length=30), quick()),
    ):
        with pytest.raises(ConfigError, match="holds a run with other settings"):
            changed()


def test_changed_text_isnt_gone_on_with(settings: Callable[..., Settings], tmp_path: Path) -> None:
    chosen = settings()
    assert chosen.data is not None
    train("medusa", MAKE["medusa"], {}, chosen, quick(steps=2))
    moved = chosen.data.rename(tmp_path / "moved.jsonl")
    train("medusa", MAKE["medusa"], {}, replace(chosen, data=moved), quick(steps=2))
    text = moved.read_text()
    chosen.data.write_text(text.replace("xyz", "zyx"))
    with pytest.raises(ConfigError, match=r"other settings \(text 1,\d+ bytes with sha256 .* → "):
        train("medusa", MAKE["medusa"], {}, chosen, quick(steps=2))


@pytest.mark.parametrize("kind", MAKE)
def test_what_was_saved_is_measured(
    settings: Callable[..., Settings], target: Target, kind: str
) -> None:
    chosen = settings()
    found = train(kind, MAKE[kind], {}, chosen, quick(steps=2))
    stored = load_guesser(chosen.output, target)
    (file,) = chosen.output.glob("*.safetensors")
    sizes = sum(t.numel() for t in load_file(file).values() if t.is_floating_point())
    assert stored.num_weights() == sizes
    assert measure_again(chosen, seed=0) == found
    first = json.loads((chosen.output / REPORT).read_text())
    measure_again(replace(chosen, sampled_at=0.5), seed=0, keep=True)
    second = json.loads((chosen.output / REPORT).read_text())
    assert second["sampled_at"] == 0.5
    assert {**second, "sampled_at": 0.8, "acceptance": 0} == {**first, "acceptance": 0}
    (chosen.output / REPORT).unlink()
    measure_again(chosen, seed=0, keep=True)
    third = json.loads((chosen.output / REPORT).read_text())
    assert third == {key: first[key] for key in third}
    assert set(first) - set(third) == {"text", "steps", "tokens", "elapsed_s", "epochs"}


def test_the_card_says_what_is_accepted_and_whence(settings: Callable[..., Settings]) -> None:
    chosen = settings()
    found = train("medusa", MAKE["medusa"], {}, chosen, quick(steps=2))
    words = (chosen.output / "README.md").read_text()
    assert chosen.data is not None
    assert f"Medusa heads for `{Path(chosen.model).name}`" in words
    assert f"tokens of {chosen.data.name} and of what the target wrote" in words
    assert "licence" not in words
    row = next(line for line in words.splitlines() if "says, greedily" in line)
    shares = [f"{share:.2f}" for share in found["greedy"].chains[1]]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == [*shares, f"{found['greedy'].tokens():.2f}"]
    report = json.loads((chosen.output / REPORT).read_text())
    assert "CC BY-SA 4.0" in card("heads", "stories", report, None)


def test_a_folder_of_another_model_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_guesser(tmp_path, target)
    Eagle(target).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ConfigError, match="doesn't hold what guesses for"):
        load_guesser(tmp_path, target)


def test_texts_of_which_nothing_is_held_out_are_refused(settings: Callable[..., Settings]) -> None:
    chosen = settings()
    assert chosen.data is not None
    chosen.data.write_text('{"text": "abc", "held_out": false}\n')
    with pytest.raises(ConfigError, match=r"None of the 1 documents .* is held out"):
        train("medusa", MAKE["medusa"], {}, chosen, quick())
    with pytest.raises(ConfigError, match="--length must be at least 16"):
        settings(length=8)


def test_the_default_text_is_what_the_embedded_models_learn_from(
    made_up_data: Path, tmp_path: Path
) -> None:
    documents = read_documents(default_text(made_up_data, tmp_path))
    asked = [document for document in documents if document.prompt is not None]
    assert 20 < len(documents) - len(asked) <= 90  # the stories themselves
    for document in asked:
        assert document.prompt is not None
        assert document.prompt.endswith("<|im_start|>assistant\n")
        assert document.text.startswith(document.prompt)
    prompts = "".join(document.prompt or "" for document in asked)
    assert "Tools:" in prompts
    assert "Tell me a story" in prompts
    assert "Hello" in prompts
    assert {document.held_out for document in documents} == {True, False}
    assert {document.held_out for document in asked} == {True, False}


def test_the_default_text_is_written_for_each_state_of_its_sources(
    made_up_data: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    topics = [name for name in TOPICS if (made_up_data / name).exists()]
    assert topics
    for name in (*SOURCES, *topics):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_bytes((made_up_data / name).read_bytes())
    first = default_text(texts, tmp_path)
    before = first.stat().st_mtime_ns
    assert default_text(made_up_data, tmp_path) == first  # the same text elsewhere
    assert first.stat().st_mtime_ns == before
    stories = texts / SOURCES[0]
    stories.write_text(stories.read_text().replace("Anna", "Zora"))
    second = default_text(texts, tmp_path)
    assert second != first
    assert "Zora" in second.read_text()
    assert "Zora" not in first.read_text()
    (texts / topics[0]).unlink()
    assert default_text(texts, tmp_path) not in (first, second)
    stories.unlink()
    with pytest.raises(ConfigError, match=r"The default text isn't in .*train_2M\.txt"):
        default_text(texts, tmp_path)


def command(method: str, chosen: Settings, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "recipes.speculation", method, "--model", chosen.model,
        "--data", str(chosen.data), "--output", str(chosen.output), "--work", str(chosen.work),
        "--length", "32", "--evaluate", "2", "--rows", "4", "--save-every", "2",
        "--device", "cpu", "--dtype", "float32", "--threads", "1", *options,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3"])
def test_a_killed_process_is_resumed_to_the_same_weights(
    settings: Callable[..., Settings], method: str
) -> None:
    chosen = [settings("whole"), settings("killed")]
    options = ["--steps", "60"]
    if method == "draft":
        options += ["--hidden-size", "16", "--intermediate-size", "24"]

    def run(one: Settings) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command(method, one, *options), cwd=ROOT, env=environment)

    assert run(chosen[0]).wait(300) == 0
    process = run(chosen[1])
    checkpoint = chosen[1].work / f"{chosen[1].output.name}.training" / "checkpoint.pt"
    deadline = time.monotonic() + 300
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert not list(chosen[1].output.glob("*.safetensors"))
    assert run(chosen[1]).wait(300) == 0
    first, second = (next(one.output.glob("*.safetensors")).read_bytes() for one in chosen)
    assert first == second


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "draft"])
def test_the_commands_train(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    chosen = settings()
    own = {
        "medusa": ["--heads", "2", "--shared-head"],
        "eagle": ["--fc-bias", "--depth", "2"],
        "eagle3": ["--draft-vocab", "30", "--layers", "0,1,3", "--depth", "2"],
        "draft": ["--hidden-size", "16", "--intermediate-size", "24", "--depth", "2"],
    }[method]
    monkeypatch.setattr(sys, "argv", command(method, chosen, "--steps", "2", *own)[2:])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    config = json.loads((chosen.output / "config.json").read_text())
    said = {
        "medusa": ("medusa_num_heads", 2),
        "eagle": ("bias", True),
        "eagle3": ("draft_vocab_size", 30),
        "draft": ("intermediate_size", 24),
    }
    name, value = said[method]
    assert config[name] == value
    report = json.loads((chosen.output / "acceptance.json").read_text())
    assert report["steps"] == 2
    assert len(report["acceptance"]["sampled"]["right"]) == 2


def test_a_command_says_what_is_wrong_in_one_line(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings()
    assert chosen.data is not None
    chosen.data.unlink()
    monkeypatch.setattr(sys, "argv", command("medusa", chosen, "--steps", "2")[2:])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        f"error: There is no file {chosen.data}: --data takes a text file or JSON lines."
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--minutes", "0"], "--minutes must be a number above 0, not 0."),
        (["--minutes", "-1"], "--minutes must be a number above 0, not -1."),
        (["--minutes", "inf"], "--minutes must be a number above 0, not inf."),
        (["--learning-rate", "nan"], "--learning-rate must be a number above 0, not nan."),
        (["--learning-rate", "0"], "--learning-rate must be a number above 0, not 0."),
        (["--learning-rate", "-1"], "--learning-rate must be a number above 0, not -1."),
        (["--length", "65"], "--length 65 is more than the 64 positions"),
        (["--length", "15"], "--length must be at least 16 tokens"),
        (["--text-share", "1"], "--text-share must be at least 0 and below 1, not 1.0."),
        (["--sampled-at", "nan"], "--sampled-at must be 0 or more, not nan."),
        (["--temperatures", "0,-1"], "--temperatures must be 0 or more, not 0.0, -1.0."),
    ],
)
def test_bad_numbers_are_refused_before_anything_is_done(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, options: list[str],
    said: str,
) -> None:  # fmt: skip
    chosen = settings()
    if "--minutes" not in options:
        options = ["--steps", "2", *options]
    monkeypatch.setattr("recipes.speculation.run.Target", None)
    monkeypatch.setattr(sys, "argv", command("medusa", chosen, *options)[2:])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, str)
    assert ended.value.code.startswith(f"error: {said}")
    assert "\n" not in ended.value.code
    assert not chosen.output.exists()


def test_bad_numbers_are_said_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from recipes.speculation.__main__ import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    options = ["eagle", "--minutes", "0", "--output", str(tmp_path / "out")]
    line = [sys.executable, "-c", code, *options]
    ended = subprocess.run(line, check=False, cwd=ROOT, capture_output=True, text=True)
    assert ended.stderr == "error: --minutes must be a number above 0, not 0.\n"
    assert ended.stdout == "False\n"
    assert ended.returncode == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "0"],
        ["--self-distill", "-1"],
        ["--seed", "-1"],
        ["--dtype", "int8"],
        ["--learning-rate", "fast"],
    ],
)
def test_bad_options_are_named(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], options: list[str],
) -> None:  # fmt: skip
    line = command("medusa", settings(), "--steps", "2", *options)[2:]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_row_is_as_long_as_the_target_allows(settings: Callable[..., Settings]) -> None:
    unsaid = settings(length=None)
    assert unsaid.for_positions(64).length == 64
    assert unsaid.for_positions(2048).length == 512
    assert settings(length=64).for_positions(64).length == 64


def test_measure_prints_its_table(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    chosen = settings()
    found = train("eagle", MAKE["eagle"], {}, chosen, quick(steps=2))
    capsys.readouterr()
    line = [
        "recipes.speculation", "measure", str(chosen.output), "--model", chosen.model,
        "--data", str(chosen.data), "--work", str(chosen.work), "--length", "32",
        "--evaluate", "2", "--depth", "2", "--device", "cpu",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in printed.splitlines()]
    for name in ("greedy", "sampled", "text"):
        (row,) = (cells for cells in rows if cells[:2] == [name, "1"])
        assert row[2:4] == [f"{share:.3f}" for share in found[name].chains[1]]
        assert row[-1] == str(found[name].places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_with_a_distribution_is_torchs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 5, 11, generator=generator)).to(dtype)
    wanted = torch.randn(3, 5, 11, generator=generator).softmax(-1)
    weights = torch.randn(3, 5, generator=generator)
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = distribution_loss(one, wanted)
    rows = F.cross_entropy(other.float().flatten(0, 1), wanted.flatten(0, 1), reduction="none")
    torch.testing.assert_close(found, rows.view(3, 5))
    (found * weights).sum().backward()
    (rows.view(3, 5) * weights).sum().backward()
    assert one.grad is not None and other.grad is not None
    assert one.grad.dtype == dtype
    torch.testing.assert_close(one.grad, other.grad)
