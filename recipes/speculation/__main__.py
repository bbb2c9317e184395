"""`python -m recipes.speculation METHOD`: train what guesses ahead of a model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import PenstockError
from recipes.checks import check_run
from recipes.speculation.settings import Settings

if TYPE_CHECKING:  # loading torch takes seconds: what is wrong with the options is said before
    import torch

    from recipes.speculation.guesser import Guesser
    from recipes.speculation.run import Make
    from recipes.speculation.target import Target

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "speculation"
TEXTS = ROOT.parent / "shared" / "data" / "text"

Output = Annotated[Path, typer.Option(help="Folder to write.")]
Model = Annotated[str, typer.Option(help="The target: a folder, or an embedded model's name.")]
DataFile = Annotated[
    Path | None,
    typer.Option("--data", help="A text file, or .jsonl with `text`. Default: the family's."),
]
Texts = Annotated[Path, typer.Option(help="Where the default text is made from.")]
Work = Annotated[Path, typer.Option(help="Folder of checkpoints and of texts that were sampled.")]
Minutes = Annotated[float | None, typer.Option(help="Length of the run in minutes.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Or in steps.")]
Rows = Annotated[int, typer.Option(min=1, help="Rows of a step.")]
Length = Annotated[
    int | None, typer.Option(help="Tokens of a row, at most. Default: 512, or the model's.")
]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Muon = Annotated[bool, typer.Option(help="Muon for the layers' matrices; else AdamW for all.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16 or float32. Default: what is fast here.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: torch's choice.")]
Seed = Annotated[int, typer.Option(min=0)]
SaveEvery = Annotated[int | None, typer.Option(min=1, help="Steps. Default: every minute.")]
SelfDistill = Annotated[int, typer.Option(min=0, help="Texts that the target writes first.")]
Temperatures = Annotated[str, typer.Option(help="Its temperatures, in turns; 0 is greedy.")]
TextShare = Annotated[float, typer.Option(help="Share of the text's rows beside its own.")]
Evaluate = Annotated[int, typer.Option(min=1, help="Held-out beginnings to measure on.")]
SampledAt = Annotated[float, typer.Option(help="Temperature of the sampled ones.")]
Depth = Annotated[int, typer.Option(min=1, max=32, help="Guesses of a draft, as measured.")]
SelfFed = Annotated[
    int, typer.Option(min=1, help="Steps in training that read the head's own output.")
]
Inner = Annotated[int | None, typer.Option(min=1, help="Its MLP's size. Default: the target's.")]
Embedding = Annotated[bool, typer.Option(help="Save the target's embedding with it.")]


def _dtype(name: str | None, device: "torch.device") -> str:
    from recipes.throughput import multiplies_bfloat16

    if name is not None:
        return name
    return "bfloat16" if device.type == "cuda" or multiplies_bfloat16() else "float32"


def _settings(options: dict[str, Any]) -> Settings:
    """A run's settings, its numbers looked at."""
    check_run(options["steps"], options["minutes"], options["learning_rate"])
    if options["dtype"] not in (None, "bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype is bfloat16 or float32, not {options['dtype']!r}.")
    if options["minutes"] is None and options["steps"] is None:
        options["minutes"] = 10.0
    written = options["temperatures"]
    try:
        temperatures = tuple(float(part) for part in written.split(","))
    except ValueError as error:
        message = f"--temperatures takes numbers between commas, not {written!r}."
        raise typer.BadParameter(message) from error
    names = ("model", "texts", "output", "work", "length", "self_distill", "text_share",
             "evaluate", "sampled_at", "depth", "device")  # fmt: skip
    return Settings(
        data=options["data"], temperatures=temperatures, **{name: options[name] for name in names}
    )


def _train(method: str, make: "Make", own: dict[str, Any], options: dict[str, Any]) -> None:
    """Split a command's options into what they are of, and run."""
    settings = _settings(options)
    import torch

    from recipes.family import device_of
    from recipes.speculation.run import train
    from recipes.train import TrainConfig

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    device = device_of(options["device"])
    at_once = options["rows"] if device.type == "cuda" else 2 - options["rows"] % 2
    names = ("steps", "minutes", "rows", "learning_rate", "muon", "seed", "save_every")
    config = TrainConfig(
        micro_rows=at_once, warm_up=0.03, weight_decay=0.01,
        evaluate_every=0.1, dtype=_dtype(options["dtype"], device),
        **{name: options[name] for name in names},
    )  # fmt: skip
    train(method, make, own, settings, config)


@app.command()
def medusa(
    output: Output,
    model: Model = "stories",
    data: DataFile = None,
    texts: Texts = TEXTS,
    work: Work = WORK,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Tokens that are guessed.")] = 4,
    blocks: Annotated[int, typer.Option(min=0, help="ResBlocks of a head.")] = 1,
    shared_head: Annotated[
        bool, typer.Option(help="Guess through the target's own head: far smaller.")
    ] = False,
    text_labels: Annotated[
        bool, typer.Option(help="Learn from the text's tokens, not the target's distributions.")
    ] = False,
    minutes: Minutes = None,
    steps: Steps = None,
    rows: Rows = 8,
    length: Length = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak. Default: 0.02 with --shared-head, else 0.002.")
    ] = None,
    muon: Muon = True,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    save_every: SaveEvery = None,
    self_distill: SelfDistill = 0,
    temperatures: Temperatures = "0,0.6,0.9",
    text_share: TextShare = 0.3,
    evaluate: Evaluate = 64,
    sampled_at: SampledAt = 0.8,
) -> None:
    """Medusa heads: each guesses another one of the next tokens, all at once."""
    if learning_rate is None:
        learning_rate = 2e-2 if shared_head else 2e-3
    options = dict(locals(), depth=heads)
    own = {"heads": heads, "blocks": blocks, "shared": shared_head, "labels": text_labels}

    def make(target: "Target", counts: "torch.Tensor") -> "Guesser":
        from recipes.speculation.medusa import Medusa

        return Medusa(
            target, heads, blocks, shared_head=shared_head, text_labels=text_labels, seed=seed
        )

    _train("medusa", make, own, options)


@app.command()
def eagle(
    output: Output,
    model: Model = "stories",
    data: DataFile = None,
    texts: Texts = TEXTS,
    work: Work = WORK,
    self_fed: SelfFed = 1,
    intermediate_size: Inner = None,
    fc_bias: Annotated[bool, typer.Option(help="A bias in fc, as the first heads had.")] = False,
    save_embedding: Embedding = False,
    minutes: Minutes = None,
    steps: Steps = None,
    rows: Rows = 8,
    length: Length = None,
    learning_rate: Rate = 1e-2,
    muon: Muon = True,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    save_every: SaveEvery = None,
    self_distill: SelfDistill = 0,
    temperatures: Temperatures = "0,0.6,0.9",
    text_share: TextShare = 0.3,
    evaluate: Evaluate = 64,
    sampled_at: SampledAt = 0.8,
    depth: Depth = 6,
) -> None:
    """An EAGLE head (1 and 2): a layer that guesses the target's next features."""
    options = dict(locals())
    own = {"self_fed": self_fed, "intermediate": intermediate_size, "bias": fc_bias}

    def make(target: "Target", counts: "torch.Tensor") -> "Guesser":
        from recipes.speculation.eagle import Eagle

        return Eagle(
            target, intermediate_size=intermediate_size, fc_bias=fc_bias, steps=self_fed,
            save_embedding=save_embedding, seed=seed,
        )  # fmt: skip

    _train("eagle", make, own, options)


@app.command()
def eagle3(
    output: Output,
    model: Model = "stories",
    data: DataFile = None,
    texts: Texts = TEXTS,
    work: Work = WORK,
    self_fed: SelfFed = 4,
    intermediate_size: Inner = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Most frequent tokens that are guessed. Default: all.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Three layers whose inputs are read, as in 2,16,29.")
    ] = None,
    save_embedding: Embedding = False,
    minutes: Minutes = None,
    steps: Steps = None,
    rows: Rows = 8,
    length: Length = None,
    learning_rate: Rate = 1e-2,
    muon: Muon = True,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    save_every: SaveEvery = None,
    self_distill: SelfDistill = 0,
    temperatures: Temperatures = "0,0.6,0.9",
    text_share: TextShare = 0.3,
    evaluate: Evaluate = 64,
    sampled_at: SampledAt = 0.8,
    depth: Depth = 6,
) -> None:
    """An EAGLE-3 head: a layer over features of three layers, with a head of its own."""
    options = dict(locals())
    try:
        chosen = None if layers is None else [int(part) for part in layers.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--layers takes three numbers, not {layers!r}.") from error
    own = {"self_fed": self_fed, "intermediate": intermediate_size, "vocab": draft_vocab,
           "layers": layers}  # fmt: skip

    def make(target: "Target", counts: "torch.Tensor") -> "Guesser":
        from recipes.speculation.eagle3 import Eagle3

        return Eagle3(
            target, counts, draft_vocab_size=draft_vocab, layers=chosen,
            intermediate_size=intermediate_size, steps=self_fed, save_embedding=save_embedding,
            seed=seed,
        )  # fmt: skip

    _train("eagle3", make, own, options)


@app.command()
def draft(
    output: Output,
    model: Model = "stories",
    data: DataFile = None,
    texts: Texts = TEXTS,
    work: Work = WORK,
    hidden_size: Annotated[int, typer.Option(min=8)] = 128,
    num_layers: Annotated[int, typer.Option(min=1)] = 2,
    num_heads: Annotated[int, typer.Option(min=1)] = 4,
    num_kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    intermediate_size: Annotated[int, typer.Option(min=8)] = 256,
    minutes: Minutes = None,
    steps: Steps = None,
    rows: Rows = 8,
    length: Length = None,
    learning_rate: Rate = 8e-3,
    muon: Muon = True,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    save_every: SaveEvery = None,
    self_distill: SelfDistill = 0,
    temperatures: Temperatures = "0,0.6,0.9",
    text_share: TextShare = 0.3,
    evaluate: Evaluate = 64,
    sampled_at: SampledAt = 0.8,
    depth: Depth = 6,
) -> None:
    """A small model of the target's family that learns its distributions."""
    options = dict(locals())
    shape = {
        "hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads,
        "num_kv_heads": num_kv_heads, "intermediate_size": intermediate_size,
    }  # fmt: skip

    def make(target: "Target", counts: "torch.Tensor") -> "Guesser":
        from recipes.speculation.draft import Draft

        return Draft(target, **shape, seed=seed)

    _train("draft", make, shape, options)


@app.command(name="measure")
def measure_folder(
    folder: Annotated[Path, typer.Argument(help="What was trained.")],
    model: Model = "stories",
    data: DataFile = None,
    texts: Texts = TEXTS,
    work: Work = WORK,
    length: Length = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    evaluate: Evaluate = 64,
    sampled_at: SampledAt = 0.8,
    depth: Depth = 6,
    keep: Annotated[bool, typer.Option(help="Write it to the folder's acceptance.json.")] = False,
) -> None:
    """What is accepted of a folder's guesses, along what the target says after held-out texts."""
    settings = Settings(
        model, data, texts, folder, work, length=length, evaluate=evaluate,
        sampled_at=sampled_at, depth=depth, device=device,
    )  # fmt: skip
    import torch

    from recipes.speculation.run import measure_again

    if threads:
        torch.set_num_threads(threads)
    measure_again(settings, seed, keep)


def main() -> None:
    """Run a command; an error made on purpose is one line."""
    try:
        app()
    except PenstockError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
