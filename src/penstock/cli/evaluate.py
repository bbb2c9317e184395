"""`penstock eval`: what a model makes of texts and dialogues it hasn't seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.device_options import Device
from penstock.cli.loading import load
from penstock.cli.options import (
    MODEL,
    Dtype,
    JsonFile,
    KvCacheDtype,
    Model,
    Quantization,
)
from penstock.cli.outputs import keep_json
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.dialogue import DialogueScore
    from penstock.bench.evaluate import Text, TextScore
    from penstock.bench.reader import Reader
    from penstock.bench.reference_run import ReferenceRun, RunWriter
    from penstock.bench.variant import Variant
    from penstock.config import EngineConfig
    from penstock.runtime import Runtime

DIALOGUES_AT_ONCE = 16


def evaluate(
    model: Model = MODEL,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A text file; documents are parted by <|endoftext|>. May be repeated."),
    ] = None,
    dialogues: Annotated[
        Path | None,
        typer.Option(help="A JSON-lines file of conversations: messages, and perhaps tools."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Print the drift of another form, in the words of `penstock drift`: w4a8, "
            "float32, kv=int8, isa=avx2, several joined by commas; a model, or MODEL:OPTIONS."
        ),
    ] = None,
    save_run: Annotated[
        Path | None, typer.Option(help="Keep every distribution in this folder (large).")
    ] = None,
    reference_run: Annotated[
        Path | None, typer.Option(help="Print the drift from a run that was kept.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens read at once. Default: 1024, or what the model has."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Of these, new ones; the rest is context. Default: half."),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="Read no more of each text than this.")
    ] = None,
    max_dialogues: Annotated[
        int | None, typer.Option(min=1, help="Read no more conversations than this.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each reply in a dialogue.")] = 128,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Score held-out texts (perplexity, bits per byte, accuracy) and dialogues (format, tools)."""
    from penstock.bench.dialogue import read_conversations, score_dialogues
    from penstock.bench.evaluate import check_window, read_text
    from penstock.bench.reference_run import ReferenceRun

    _check_options(text, dialogues, against, save_run, reference_run)
    chosen = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    if device != "auto":
        chosen["device"] = device
    other_form = _against(against, model, chosen)
    window = _window({model, *([] if other_form is None else [str(other_form.model)])}, window)
    stride = stride or max(1, window // 2)
    check_window(window, stride)
    # what can be refused before a model is loaded
    talks = None if dialogues is None else read_conversations(dialogues, max_dialogues)
    reference = None if reference_run is None else ReferenceRun(reference_run)
    length = None if talks else window
    config = _config(model, length, chosen)
    runtime = load(config)
    assert runtime.tokenizer is not None
    texts = [read_text(file, runtime.tokenizer, max_bytes) for file in text or []]
    with _opened(other_form, length) as other:
        _check_together(runtime, other, reference, window, stride)
        save = None
        if save_run is not None:
            save = _writer(save_run, runtime, model, texts, window, stride)
        scores = _score(runtime, texts, window, stride, other, reference, save)
    replies = None
    if talks and dialogues is not None:
        replies = score_dialogues(config, runtime, dialogues.name, talks, max_tokens)
    _print(runtime, scores, replies, against, reference)
    if json_file is not None:
        about = {"model": str(model), **chosen, "window": window, "stride": stride}
        _write(json_file, about, against or reference_run, scores, replies)


def _check_options(
    text: list[Path] | None,
    dialogues: Path | None,
    against: str | None,
    save_run: Path | None,
    reference_run: Path | None,
) -> None:
    if not text and dialogues is None:
        raise ConfigError("There is nothing to score: give --text FILE or --dialogues FILE.")
    if against is not None and reference_run is not None:
        raise ConfigError("--against and --reference-run both name a reference. Give one of them.")
    if not text and (against or save_run or reference_run):
        raise ConfigError("--against, --save-run and --reference-run compare texts: give --text.")


def _window(models: set[str], asked: int | None) -> int:
    """Raises ConfigError for one that is longer than any of the models can read."""
    from penstock.bench.workload import longest

    most, model = min((longest(model), model) for model in models)
    if asked is None:
        return min(1024, most)
    if asked > most:
        raise ConfigError(
            f"A window of {asked:,} tokens is larger than the {most:,} positions of {model}. "
            f"Lower --window to {most}."
        )
    return asked


def _config(model: str, length: int | None, chosen: dict[str, Any]) -> EngineConfig:
    from penstock.config import EngineConfig

    config = EngineConfig.of(model=model, max_model_len=length, **chosen)
    return config.suggesting(max_num_seqs=DIALOGUES_AT_ONCE)


@contextmanager
def _opened(variant: Variant | None, length: int | None) -> Iterator[Reader | None]:
    """What `--against` names, loaded."""
    from penstock.bench.reader import open_reader

    if variant is None:
        yield None
        return
    with open_reader(variant, length, load) as reader:
        yield reader


def _against(words: str | None, model: str, options: dict[str, Any]) -> Variant | None:
    """Options that replace those chosen, or another model with its own."""
    from penstock.bench.variant import Variant
    from penstock.models.hub import NAMED

    if words is None:
        return None
    chosen = Variant(model=model, **options)
    if ":" in words or words in NAMED or Path(words).exists():
        return chosen.parse(words, chosen.model)
    return chosen.with_options(words)


def _check_together(
    runtime: Runtime,
    other: Reader | None,
    reference: ReferenceRun | None,
    window: int,
    stride: int,
) -> None:
    """What is compared must have one vocabulary, and have been read alike."""
    from penstock.bench.reader import LocalReader
    from penstock.bench.vocabularies import Shared, check_vocabularies

    if reference is not None:
        _check_whole(runtime)
        reference.check(window, stride, runtime.vocab_size)
    if other is None:
        return
    mine = LocalReader(runtime)
    check_vocabularies(mine, other, ("The model", "the other one"))
    shared = Shared.of(mine, other)
    if shared is not None and len(shared.only[0]):
        raise ConfigError(
            f"--against lacks {len(shared.only[0]):,} tokens of the model, which the text may "
            "need. Hold one against the other by penstock drift, or score the reduced model "
            "--against the whole one."
        )


def _check_whole(runtime: Runtime) -> None:
    if runtime.vocab_map is not None:
        raise ConfigError(
            f"The model has a reduced vocabulary, {len(runtime.vocab_map):,} of "
            f"{runtime.vocab_size:,} tokens, and a run on disk is of all of them. Compare it by "
            "penstock drift, or --against a whole model."
        )


def _writer(
    folder: Path, runtime: Runtime, model: str, texts: list[Text], window: int, stride: int
) -> RunWriter:
    import shutil

    from penstock.bench.reference_run import RunWriter

    _check_whole(runtime)
    positions = sum(len(ids) - 1 for text in texts for ids in text.documents)
    vocabulary = runtime.model.spec.decoder.vocab_size
    parent = next(p for p in folder.absolute().parents if p.exists())
    need, free = 2 * positions * vocabulary, shutil.disk_usage(parent).free
    if need > free:
        raise ConfigError(
            f"--save-run needs {need / 1e9:.1f} GB for {positions:,} positions of {vocabulary:,} "
            f"tokens, but {free / 1e9:.1f} GB are free. Score less with --max-bytes."
        )
    about = {
        "model": str(model),
        "weights": runtime.model.model.formats.name,
        "window": window,
        "stride": stride,
    }
    return RunWriter(folder, positions, vocabulary, about)


def _score(
    runtime: Runtime,
    texts: list[Text],
    window: int,
    stride: int,
    other: Reader | None,
    reference: ReferenceRun | None,
    save: RunWriter | None,
) -> list[TextScore]:
    from penstock.bench.evaluate import evaluate

    scores = [
        evaluate(
            runtime, text, window, stride,
            against=other, reference=reference, save=save,
        )
        for text in texts
    ]  # fmt: skip
    if save is not None:
        save.close()
    return scores


def _write(
    file: Path,
    about: dict[str, Any],
    against: str | Path | None,
    scores: list[TextScore],
    replies: DialogueScore | None,
) -> None:
    from penstock.bench.environment import environment
    from penstock.hardware import detect

    found = {
        "benchmark": "eval",
        "setup": about,
        "against": None if against is None else str(against),
        "texts": [score.as_dict() for score in scores],
        "dialogues": None if replies is None else replies.as_dict(),
        **environment(detect()),
    }
    keep_json(file, found)


def _print(
    runtime: Runtime,
    scores: list[TextScore],
    replies: DialogueScore | None,
    against: str | None,
    reference: ReferenceRun | None,
) -> None:
    from rich.console import Console

    from penstock.bench.report import percent

    console = Console(highlight=False, soft_wrap=True)
    what = f"{runtime.model.spec.family}, {runtime.model.model.formats.name} weights"
    if scores:
        console.print(
            _table(
                f"Texts: {what}",
                ("text", "documents", "tokens", "bytes", "perplexity", "bits/byte", "accuracy"),
                [
                    (
                        s.name, f"{s.documents:,}", f"{s.tokens:,}", f"{s.bytes:,}",
                        f"{s.perplexity:.3f}", f"{s.bits_per_byte:.4f}" if s.bytes else "–",
                        percent(s.accuracy),
                    )
                    for s in scores
                ],
            )
        )  # fmt: skip
    drifted = [(s.name, s.drift) for s in scores if s.drift is not None]
    if drifted:
        source = f"of {against}" if reference is None else f"from {reference.about['weights']}"
        console.print(
            _table(
                f"Drift {source}",
                ("text", "KL (nats)", "99% below", "same likeliest token", "perplexity"),
                [
                    (
                        name, f"{d.kl:.5f}", f"{d.kl_p99:.4f}", percent(d.agreement),
                        f"{d.reference_perplexity:.3f} → {d.perplexity:.3f}",
                    )
                    for name, d in drifted
                ],
            )
        )  # fmt: skip
        for remark in dict.fromkeys(remark for _, d in drifted for remark in d.remarks):
            console.print(remark, style="dim", markup=False)
    if replies is not None:
        console.print(_dialogue_table(replies, what))


def _dialogue_table(found: DialogueScore, what: str) -> Any:
    from penstock.bench.report import percent

    def share(part: int, whole: int) -> str:
        return f"{part:,} of {whole:,}" + (f" ({percent(part / whole)})" if whole else "")

    return _table(
        f"Dialogues: {what}",
        (found.name, f"{found.conversations:,} conversations"),
        [
            *(
                [("replies left out: too long for the model", f"{found.left_out:,}")]
                if found.left_out
                else []
            ),
            ("replies that end by themselves", share(found.ended, found.replies)),
            ("in the right format", share(found.valid, found.replies)),
            ("tool calls, exactly the same", share(found.exact, found.calling)),
            ("tool calls, the same names", share(found.named, found.calling)),
            (
                "calls where there are none",
                share(found.uncalled_for, found.replies - found.calling),
            ),
        ],
    )


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Any:
    from rich.table import Table

    table = Table(
        title=title, title_style="bold", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
