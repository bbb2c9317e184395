"""`penstock drift`: how far one way of running a model lies from another, on a text."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import console
from penstock.cli.loading import load
from penstock.cli.options import JsonFile
from penstock.cli.outputs import checked, keep, keep_json
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from penstock.bench.drift import Drift, Worst
    from penstock.bench.reader import About, Reader
    from penstock.bench.texts import Text
    from penstock.bench.variant import Variant

WINDOW = 512
_WIDTH = 112
"""Of the tables: a narrower terminal wraps their lines rather than lose figures."""

FEW = 100
"""Positions below which a P99 is no more than the worst of them."""


def drift(
    a: Annotated[
        str,
        typer.Argument(
            help="What B is held against: MODEL[:OPTION,…]. Options: a --quantization, dtype=, "
            "kv=, isa=, kernels=reference, eager, graph, compiled."
        ),
    ],
    b: Annotated[str, typer.Argument(help="The same; without a model (:w4a8), A's is meant.")],
    text: Annotated[
        list[Path],
        typer.Option(help="A text file; documents are parted by <|endoftext|>. May be repeated."),
    ],
    window: Annotated[
        int | None,
        typer.Option(min=2, help=f"Tokens read at once. Default: {WINDOW}, or what both have."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Of these, new ones; the rest is context. Default: half."),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="Read no more of each text than this.")
    ] = None,
    worst: Annotated[
        int, typer.Option(min=0, help="Show so many of the positions that differ most.")
    ] = 5,
    layers: Annotated[
        bool, typer.Option(help="Measure the residual stream after each layer.")
    ] = True,
    json_file: JsonFile = None,
    svg: Annotated[
        Path | None, typer.Option(callback=checked, help="Write a plot to this file.")
    ] = None,
) -> None:
    """Hold B's next-token distributions against A's: KL, agreement, perplexity, error per layer."""
    from penstock.bench.texts import check_window, read_documents
    from penstock.bench.variant import Variant

    one = Variant.parse(a)
    other = Variant.parse(b, one.model)
    documents = {file: read_documents(file, max_bytes) for file in text}
    window = _window(one, other, window)
    stride = stride or max(1, window // 2)
    check_window(window, stride)
    found = _compare((one, other), documents, window, stride, worst, layers)
    _print(found)
    if json_file is not None:
        _write_json(json_file, found)
    if svg is not None:
        _write_svg(svg, found)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Two variants on texts, and what came of it."""

    names: tuple[str, str]
    abouts: tuple[About, About]
    pieces: Sequence[bytes]  # of every token
    texts: Sequence[Text]
    window: int
    stride: int
    drift: Drift

    @property
    def where(self) -> str:
        """What was read, and how."""
        from penstock.bench.report import count

        files = ", ".join(text.name for text in self.texts)
        documents = sum(len(text.documents) for text in self.texts)
        return (
            f"{files}: {count(documents, 'document')}, "
            f"{count(self.drift.positions, 'position')}, windows of {self.window} tokens, "
            f"{self.stride} of them new"
        )


def _compare(
    variants: tuple[Variant, Variant],
    documents: dict[Path, list[str]],
    window: int,
    stride: int,
    worst: int,
    layers: bool,
) -> _Comparison:
    from penstock.bench.drift import measure_drift
    from penstock.bench.reader import open_reader

    names = _names(*variants)
    with ExitStack() as stack:
        a, b = (stack.enter_context(open_reader(x, window, load)) for x in variants)
        texts, remarks = _encode(a, b, documents, names)
        found = measure_drift(a, b, texts, window, stride, names=names, worst=worst, layers=layers)
        found = replace(found, remarks=(*found.remarks, *remarks))
        return _Comparison(names, (a.about, b.about), a.pieces(), texts, window, stride, found)


def _names(one: Variant, other: Variant) -> tuple[str, str]:
    """What both are called; two of one name are told apart."""
    names = console.one_line(one), console.one_line(other)
    return names if names[0] != names[1] else (f"{names[0]} (A)", f"{names[1]} (B)")


def _window(one: Variant, other: Variant, asked: int | None) -> int:
    from penstock.bench.workload import longest

    lengths = {str(v.model): longest(str(v.model)) for v in (one, other)}
    if asked is None:
        return min(WINDOW, *lengths.values())
    for model, most in lengths.items():
        if asked > most:
            raise ConfigError(
                f"A window of {asked:,} tokens is larger than the {most:,} positions of {model}. "
                f"Lower --window to {min(lengths.values())}."
            )
    return asked


def _encode(
    a: Reader, b: Reader, documents: dict[Path, list[str]], names: tuple[str, str]
) -> tuple[list[Text], list[str]]:
    """The texts in tokens that both have, and remarks on how."""
    from penstock.bench.texts import text_of
    from penstock.bench.vocabularies import check_vocabularies, encode_for_both

    check_vocabularies(a, b, names)
    found, remarks = [], []
    for file, parts in documents.items():
        encoded, remark = encode_for_both(file.name, parts, a, b, names)
        found.append(text_of(file, encoded))
        remarks += [remark] if remark else []
    return found, remarks


def _write_json(file: Path, found: _Comparison) -> None:
    from penstock.bench.environment import environment
    from penstock.hardware import detect

    drift, pieces = found.drift, found.pieces
    whole = {
        "benchmark": "drift",
        "a": {"variant": found.names[0], **asdict(found.abouts[0])},
        "b": {"variant": found.names[1], **asdict(found.abouts[1])},
        "texts": [text.name for text in found.texts],
        "window": found.window,
        "stride": found.stride,
        **drift.as_dict(),
        "layers": [asdict(layer) for layer in drift.layers],
        "worst": [
            {
                **asdict(w),
                "context": _decode(w.context, pieces),
                "token": _decode([w.token], pieces),
                "likeliest": [_decode([i], pieces) for i in w.likeliest],
            }
            for w in drift.worst
        ],
        "remarks": list(drift.remarks),
        **environment(detect()),
    }
    keep_json(file, whole)


def _write_svg(file: Path, found: _Comparison) -> None:
    from penstock.bench.drift_plot import drift_svg

    title = f"Drift of {found.names[1]} from {found.names[0]}"
    keep(file, drift_svg(found.drift, title, found.where))


def _decode(ids: Sequence[int], pieces: Sequence[bytes]) -> str:
    return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")


def _print(comparison: _Comparison) -> None:
    from rich.console import Console

    found, names, abouts = comparison.drift, comparison.names, comparison.abouts
    out = Console(highlight=False, soft_wrap=True)
    out.width = max(out.width, _WIDTH)
    out.print(f"Drift of {names[1]} from {names[0]}", style="bold", markup=False)
    out.print(comparison.where, style="dim", markup=False)
    out.print()
    out.print(_models(found, names, abouts))
    out.print()
    tokens = found.shared_tokens or abouts[0].vocab_size
    logits = f"{found.positions:,} × {tokens:,} logits"
    if found.equal:
        out.print(f"Equal: all {logits} are ==.", style="bold green", markup=False)
    if not found.equal or found.outside is not None:
        out.print(_figures(found))
    for words in _outside(found, names):
        out.print(words, markup=False)
    if found.layers:
        out.print()
        if any(layer.largest for layer in found.layers):
            out.print(_layers(found))
        else:
            out.print(f"Equal after all {len(found.layers) - 1} layers, too.", style="green")
    if found.worst:
        out.print()
        out.print(_worst(found.worst, comparison.pieces))
    for remark in _remarks(found):
        out.print(remark, style="dim", markup=False)


def _outside(found: Drift, names: tuple[str, str]) -> list[str]:
    """What either gives to tokens that the other lacks."""
    return [
        f"{names[i]} gives {one.mean:.3%} on average, {one.largest:.2%} at most, to the "
        f"{one.tokens:,} tokens that {names[1 - i]} lacks. KL is of the {found.shared_tokens:,} "
        "that both have."
        for i, one in enumerate(found.outside or ())
        if one.tokens
    ]


def _remarks(found: Drift) -> list[str]:
    remarks = list(found.remarks)
    if found.positions < FEW:
        remarks.append(
            f"{found.positions} positions are few: take {FEW} at least for a P99, and thousands "
            "for figures that hold for another text."
        )
    return remarks


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _models(found: Drift, names: tuple[str, str], abouts: Sequence[About]) -> Table:
    from rich.markup import escape

    table = _table("", *(f"{x}: {escape(n)}" for x, n in zip("AB", names, strict=True)))
    for label, field in (("weights", "weights"), ("cache", "cache"), ("kernels", "kernels")):
        table.add_row(label, *(str(getattr(about, field)) for about in abouts))
    table.add_row("a step", *(about.calls for about in abouts))
    if any(about.kept_tokens is not None for about in abouts):
        table.add_row("vocabulary", *(_tokens(about) for about in abouts))
    table.add_row("perplexity", f"{found.reference_perplexity:.4f}", f"{found.perplexity:.4f}")
    return table


def _tokens(about: About) -> str:
    kept, whole = about.kept_tokens, about.vocab_size
    return f"{whole:,} tokens" if kept is None else f"{kept:,} of {whole:,} tokens"


def _figures(found: Drift) -> Table:
    from penstock.bench.report import percent

    table = _table("KL(A ‖ B), mean", "99% below", "most", "same likeliest token", "perplexity")
    for column in table.columns:
        column.justify = "left"
    change = found.perplexity / found.reference_perplexity - 1
    table.add_row(
        f"{found.kl:.3g} nats", f"{found.kl_p99:.3g}", f"{found.kl_max:.3g}",
        f"{found.agreement:.2%}", f"{'+' if change >= 0 else '−'}{percent(abs(change))}",
    )  # fmt: skip
    return table


def _layers(found: Drift) -> Table:
    table = _table("error after", "mean", "99% below", "most")
    for i, layer in enumerate(found.layers):
        name = "the embedding" if i == 0 else f"layer {i - 1}"
        table.add_row(name, *(f"{x:.3g}" for x in (layer.mean, layer.p99, layer.largest)))
    return table


def _worst(worst: Sequence[Worst], pieces: Sequence[bytes]) -> Table:
    """The positions that differ most; what came stands after the bar."""
    from rich.text import Text as Cell

    def words(ids: Sequence[int], most: int = 24) -> str:
        shown = console.printable(_decode(ids, pieces).replace("\n", "⏎"))
        return shown if len(shown) <= most else f"{shown[: most - 1]}…"

    table = _table("KL", "text ¦ what came", "A’s likeliest", "B’s likeliest")
    for column in table.columns[1:]:
        column.justify = "left"
    for w in worst:
        before = console.printable(_decode(w.context, pieces).replace("\n", "⏎"))[-44:]
        context = Cell(f"…{before}", style="dim").append("¦", "bold").append(words([w.token]))
        likeliest: list[Any] = [
            Cell(f"{words([i])!r} {p:.0%}")
            for i, p in zip(w.likeliest, w.likeliest_probability, strict=True)
        ]
        table.add_row(f"{w.kl:.3g}", context, *likeliest)
    return table
