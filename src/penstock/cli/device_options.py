"""Options that say where a model runs, and how its steps are put together there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.options import given
from penstock.errors import ConfigError

_PANEL = "Device"

Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda|cuda:N",
        help="auto: a GPU where one can be used, else the CPU.",
        rich_help_panel=_PANEL,
    ),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="On a GPU: one order of additions, whatever else is in a batch. "
        "--no-deterministic: whatever is fastest. A CPU is always deterministic.",
        rich_help_panel=_PANEL,
    ),
]
EnforceEager = Annotated[
    bool,
    typer.Option("--enforce-eager", help="Call the operators one by one.", rich_help_panel=_PANEL),
]
Compilation = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='Of a GPU\'s steps: \'{"cudagraph_mode": "none"}\', \'{"mode": "compile"}\', '
        "'{\"cudagraph_capture_sizes\": [1, 8, 64]}' (docs/gpu.md).",
        rich_help_panel=_PANEL,
    ),
]
LoadFormat = Annotated[
    str,
    typer.Option(
        metavar="auto|dummy",
        help="dummy: random weights of the shape that config.json has, which is all it reads.",
        rich_help_panel=_PANEL,
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="On a GPU: begin a step while the one before still runs.",
        rich_help_panel=_PANEL,
    ),
]
Nvtx = Annotated[
    bool,
    typer.Option(
        "--nvtx",
        help="On a GPU: names on its timeline, for Nsight Systems.",
        rich_help_panel=_PANEL,
    ),
]


TensorParallelSize = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        help="On a CPU: N processes share the model, each with its part of every matrix and of the "
        "cache (docs/parallel.md). Default: 1.",
        rich_help_panel=_PANEL,
    ),
]
PipelineParallelSize = Annotated[
    int | None,
    typer.Option(
        "--pipeline-parallel-size",
        "-pp",
        metavar="N",
        help="N stages of so many processes each, which have some of the layers. Default: 1.",
        rich_help_panel=_PANEL,
    ),
]
ContextParallelSize = Annotated[
    int | None,
    typer.Option(
        "--context-parallel-size",
        "-cp",
        metavar="N",
        help="On a CPU: N processes have all weights each, and some tokens of every sequence, for "
        "long prompts (docs/parallel.md). Default: 1.",
        rich_help_panel=_PANEL,
    ),
]
StageAddresses = Annotated[
    list[str] | None,
    typer.Option(
        "--stage",
        metavar="HOST:PORT",
        help="A machine where penstock rank has the next layers; again for another. The first "
        "stage is here.",
        rich_help_panel=_PANEL,
    ),
]
EnableExpertParallel = Annotated[
    bool,
    typer.Option(
        "--enable-expert-parallel",
        help="Of a mixture each of them has some experts, instead of a part of all.",
        rich_help_panel=_PANEL,
    ),
]
MmProcessor = Annotated[
    str | None,
    typer.Option(
        "--mm-processor-kwargs",
        metavar="JSON",
        help="How pictures are cut, instead of what the model's processor says: "
        "'{\"max_pixels\": 401408}'.",
        rich_help_panel=_PANEL,
    ),
]
Mmproj = Annotated[
    str | None,
    typer.Option(
        "--mmproj",
        "-mm",
        metavar="FILE",
        help="The projector that a .gguf model sees pictures through (mmproj-*.gguf). Default: the "
        "only mmproj*.gguf in the model's folder.",
        rich_help_panel=_PANEL,
    ),
]
NoMmproj = Annotated[
    bool,
    typer.Option(
        "--no-mmproj",
        help="None, whatever lies in the model's folder.",
        rich_help_panel=_PANEL,
    ),
]


def through(mmproj: str | None, no_mmproj: bool) -> dict[str, Any]:
    """What a model sees through, as arguments of the engine. Raises ConfigError for both."""
    if no_mmproj and mmproj is not None:
        raise ConfigError("--mmproj names a projector, and --no-mmproj asks for none. Leave one.")
    return {"mmproj": False} if no_mmproj else given(mmproj=mmproj)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a model runs."""

    device: Device = "auto"
    deterministic: Deterministic = None
    enforce_eager: EnforceEager = False
    compilation_config: Compilation = None
    load_format: LoadFormat = "auto"
    async_scheduling: AsyncScheduling = None
    nvtx: Nvtx = False
    tensor_parallel_size: TensorParallelSize = None
    pipeline_parallel_size: PipelineParallelSize = None
    context_parallel_size: ContextParallelSize = None
    stage_addresses: StageAddresses = None
    enable_expert_parallel: EnableExpertParallel = False

    @property
    def has_stages(self) -> bool:
        """Whether several processes have some layers each."""
        return (self.pipeline_parallel_size or 1) > 1 or bool(self.stage_addresses)

    @property
    def is_divided(self) -> bool:
        """Whether several processes share the model."""
        return (self.tensor_parallel_size or 1) > 1 or self.has_stages or self.shares_context

    @property
    def shares_context(self) -> bool:
        """Whether several processes have some tokens each."""
        return (self.context_parallel_size or 1) > 1

    @property
    def among(self) -> str:
        """The options that say among whom, for a command line; none of one process."""
        found = "" if self.tensor_parallel_size is None else f" -tp {self.tensor_parallel_size}"
        if self.pipeline_parallel_size is not None:
            found += f" -pp {self.pipeline_parallel_size}"
        if self.context_parallel_size is not None:
            found += f" -cp {self.context_parallel_size}"
        if self.enable_expert_parallel:
            found += " --enable-expert-parallel"
        return found + "".join(f" --stage {address}" for address in self.stage_addresses or ())

    def chosen(self) -> dict[str, Any]:
        """As arguments of an engine. Raises ConfigError for what isn't a JSON object."""
        return given(
            device=None if self.device == "auto" else self.device,
            deterministic=self.deterministic,
            enforce_eager=self.enforce_eager or None,
            async_scheduling=self.async_scheduling,
            nvtx=self.nvtx or None,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            context_parallel_size=self.context_parallel_size,
            stage_addresses=self.stage_addresses or None,
            enable_expert_parallel=self.enable_expert_parallel or None,
            load_format=None if self.load_format == "auto" else self.load_format,
            compilation_config=json_object(
                self.compilation_config, "--compilation-config", '{"cudagraph_mode": "none"}'
            ),
        )


PLACED = Placed()


def json_object(text: str | None, option: str, such: str) -> dict[str, Any] | None:
    """What an option says. Raises ConfigError for what isn't an object; such: one that is."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} isn't JSON: {error}. An object such as {such} is.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option} must be an object such as {such}, not {text!r}.")
    return found


def how_to_cut(text: str | None) -> dict[str, Any] | None:
    """What --mm-processor-kwargs says. Raises ConfigError for what isn't an object."""
    return json_object(text, "--mm-processor-kwargs", '{"max_pixels": 401408}')
