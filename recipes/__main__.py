"""`python -m recipes COMMAND`: each step from raw text to published models."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import PenstockError

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "recipes"
DATA = ROOT.parent / "shared" / "data"
ASSETS = ROOT / "src" / "penstock" / "assets"
Work = Annotated[Path, typer.Option(help="Folder of packs, checkpoints and models.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Length of the run in steps.")]
Minutes = Annotated[float | None, typer.Option(help="Or in minutes; steps are estimated.")]
Rows = Annotated[int, typer.Option(min=1, help="Rows of a whole context in a step.")]
MicroRows = Annotated[int | None, typer.Option(min=1, help="Of these at once. Default: all, 64.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Dropout = Annotated[float, typer.Option(min=0, max=0.9)]
Device = Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16 or float32. Default: by the device.")]
SaveEvery = Annotated[int | None, typer.Option(min=1, help="Steps. Default: every minute.")]
Compile = Annotated[bool | None, typer.Option(help="torch.compile. Default: on a GPU.")]
Size = Annotated[str, typer.Option(help="base, small, draft or tiny: a shape of recipes/model.py.")]
Muon = Annotated[bool, typer.Option(help="Muon for the layers' matrices; else AdamW for all.")]
Seed = Annotated[int, typer.Option()]
ShortLength = Annotated[
    int, typer.Option(min=0, help="Tokens of a row in the first 70% of the run; 0: the context's.")
]
Pace = Annotated[
    list[str] | None,
    typer.Option(help="SOURCE=START:END, how often it is read next to the others. Repeatable."),
]


@app.command()
def prepare(
    data: Annotated[Path, typer.Option(help="Folder with the texts.")] = DATA / "text",
    work: Work = WORK,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each source.")] = None,
    vocab_size: Annotated[int, typer.Option(min=512, max=65_536)] = 8192,
) -> None:
    """Read, deduplicate, hold out, tokenize and pack the corpus."""
    from recipes.prepare import prepare as run

    print(run(data, work, limit, vocab_size))


@app.command()
def synthesize(
    model: Annotated[Path, typer.Option(help="A model of simple stories.")] = DATA
    / "models/stories260K/hf",
    work: Work = WORK,
    stories: Annotated[int, typer.Option(min=1)] = 1000,
    seed: Seed = 0,
) -> None:
    """Write stories of another model, which `prepare` makes a stream of. Optional."""
    from recipes.synthesize import synthesize as run

    print(run(model, work / "synthetic.txt", stories, seed))


@app.command()
def pretrain(
    work: Work = WORK,
    steps: Steps = None,
    minutes: Minutes = None,
    rows: Rows = 256,
    micro_rows: MicroRows = None,
    learning_rate: Rate = 5e-3,
    dropout: Dropout = 0.0,
    short_length: ShortLength = 256,
    size: Size = "base",
    device: Device = None,
    dtype: Dtype = None,
    compile: Compile = None,  # noqa: A002 - the option's name
    save_every: SaveEvery = None,
    muon: Muon = True,
    pace: Pace = None,
    start: Annotated[
        Path | None, typer.Option(help="A model whose weights a new run begins with.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train `base` from nothing, or from another model's weights."""
    from recipes import family
    from recipes.model import shape_named

    where, config = _settings(
        device, dtype, compile, steps=steps, minutes=minutes, rows=rows, micro_rows=micro_rows,
        learning_rate=learning_rate, save_every=save_every, seed=seed, muon=muon,
        short_length=short_length or None,
    )  # fmt: skip
    paces = family.paces_with(family.PRETRAIN, pace or [])
    family.pretrain(work, config, shape_named(size), dropout, where, paces, start)


@app.command()
def finetune(
    work: Work = WORK,
    steps: Steps = None,
    minutes: Minutes = None,
    rows: Rows = 128,
    micro_rows: MicroRows = None,
    learning_rate: Rate = 1e-3,
    dropout: Dropout = 0.0,
    device: Device = None,
    dtype: Dtype = None,
    compile: Compile = None,  # noqa: A002
    save_every: SaveEvery = None,
    muon: Muon = True,
    pace: Pace = None,
    seed: Seed = 0,
) -> None:
    """Train `chat` from `base`, on replies only."""
    from recipes import family

    where, config = _settings(
        device, dtype, compile, steps=steps, minutes=minutes, rows=rows, micro_rows=micro_rows,
        learning_rate=learning_rate, save_every=save_every, seed=seed, muon=muon,
    )  # fmt: skip
    paces = family.paces_with(family.FINETUNE, pace or [])
    family.finetune(work, config, dropout, where, paces)


@app.command()
def distill(
    work: Work = WORK,
    steps: Steps = None,
    minutes: Minutes = None,
    rows: Rows = 128,
    micro_rows: MicroRows = None,
    learning_rate: Rate = 5e-3,
    size: Size = "draft",
    device: Device = None,
    dtype: Dtype = None,
    compile: Compile = None,  # noqa: A002
    save_every: SaveEvery = None,
    muon: Muon = True,
    seed: Seed = 0,
) -> None:
    """Train `draft` to predict what `chat` would say."""
    from recipes import family
    from recipes.model import shape_named

    where, config = _settings(
        device, dtype, compile, steps=steps, minutes=minutes, rows=rows, micro_rows=micro_rows,
        learning_rate=learning_rate, save_every=save_every, seed=seed, muon=muon,
    )  # fmt: skip
    family.distill(work, config, shape_named(size), where)


@app.command()
def adapt(
    style: Annotated[str, typer.Argument(help="shakespeare or verse")],
    work: Work = WORK,
    steps: Steps = None,
    minutes: Minutes = None,
    rows: Rows = 32,
    micro_rows: MicroRows = None,
    learning_rate: Rate = 2e-3,
    rank: Annotated[int, typer.Option(min=1, max=256)] = 16,
    device: Device = None,
    dtype: Dtype = None,
    compile: Compile = None,  # noqa: A002
    save_every: SaveEvery = None,
    seed: Seed = 0,
) -> None:
    """Train an adapter of `base` on one style."""
    from recipes import family
    from recipes.lora import LoraConfig

    where, config = _settings(
        device, dtype, compile, steps=steps, minutes=minutes, rows=rows, micro_rows=micro_rows,
        learning_rate=learning_rate, save_every=save_every, seed=seed,
    )  # fmt: skip
    config = replace(config, muon=False, weight_decay=0.0)
    family.adapt(work, style, config, LoraConfig(rank, 2 * rank), where)


@app.command()
def evaluate(
    work: Work = WORK,
    max_bytes: Annotated[int, typer.Option(help="Of each held-out text.")] = 200_000,
    max_dialogues: Annotated[int, typer.Option(min=1)] = 60,
    compare: Annotated[Path | None, typer.Option(help="A model to beat on TinyStories.")] = DATA
    / "models/stories260K/hf",
) -> None:
    """Score every model there is, against what is asked of it; write the model cards."""
    from recipes.evaluate import evaluate as run

    print(run(work, max_bytes, max_dialogues, compare))


@app.command()
def ship(
    work: Work = WORK,
    assets: Annotated[Path, typer.Option(help="Where the package keeps its models.")] = ASSETS,
) -> None:
    """Put the trained and evaluated members into the package, at most 40 MB in all."""
    from recipes.ship import ship as run

    print(run(work, assets))


@app.command()
def split(
    out: Annotated[Path, typer.Argument(help="Folder for the parts.")],
    names: Annotated[list[str], typer.Argument(help="Members, as in: base chat draft")],
    work: Work = WORK,
) -> None:
    """Write models as parts of at most 15 MiB, to be moved from machine to machine."""
    from recipes.transport import split as run

    for part in run(work, names, out):
        print(part)


@app.command()
def join(
    parts: Annotated[Path, typer.Argument(help="Folder with the parts.")], work: Work = WORK
) -> None:
    """Put together what `split` wrote."""
    from recipes.transport import join as run

    for name in run(parts, work):
        print(name)


def _settings(device: str | None, dtype: str | None, compiled: bool | None, **chosen: Any) -> Any:
    """(The device, a TrainConfig), with defaults that depend on the device."""
    from recipes.family import device_of
    from recipes.throughput import keep_memory, multiplies_bfloat16
    from recipes.train import TrainConfig

    where = device_of(device)
    on_gpu = where.type == "cuda"
    chosen["micro_rows"] = chosen["micro_rows"] or min(64 if on_gpu else 8, chosen["rows"])
    if not on_gpu:
        keep_memory()
    return where, TrainConfig(
        dtype=dtype or ("bfloat16" if on_gpu or multiplies_bfloat16() else "float32"),
        compile=on_gpu if compiled is None else compiled,
        **chosen,
    )


def main() -> None:
    """Run a command; an error made on purpose is one line."""
    try:
        app()
    except PenstockError as error:
        sys.exit(f"error: {error}")
    except FileNotFoundError as error:
        sys.exit(f"error: there is no {error.filename}. Give the folder of texts by --data.")


if __name__ == "__main__":
    main()
