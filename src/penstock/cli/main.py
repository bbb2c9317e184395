"""The `penstock` command: its commands, and what becomes of an error in one of them.

Exit codes: 0 done, 1 an error that Penstock explains, 2 a command line that can't be read,
130 stopped by Ctrl-C, 143 by SIGTERM. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import (
    bench,
    build,
    chat,
    console,
    doctor,
    drift,
    evaluate,
    export,
    fleet,
    generate,
    plan,
    profile,
    prune,
    rank,
    serve,
    tune,
)
from penstock.cli import run as batch
from penstock.cli.ending import Terminated, heeding_sigterm, terminated_first
from penstock.cli.loading import collect_rarely
from penstock.cli.whole import import_whole
from penstock.errors import PenstockError

_LOAD_A_MODEL = ("chat", "eval", "generate", "profile", "run", "serve", "tune")
"""By `cli.loading` or as it does: the rest may make garbage that holds large tensors."""

_LEAVE_IN_ORDER = ("build", "export", "prune", "run")
"""Asked to end, they remove what is half written, or say how to go on with it."""

_RANKS = ("-tp", "-pp", "-cp")

INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141

WELCOME = """\
[bold]Penstock {version}[/bold] runs language models on this machine, and says how full the
pipe runs: the speed it reaches over what the hardware allows.

Try:
  [green]penstock generate -p "Once upon a time"[/green]   a story, by the small model inside
  [green]penstock chat[/green]                             talk with it
  [green]penstock serve[/green]                            an OpenAI-compatible server
  [green]penstock doctor[/green]                           what this machine has and runs

Each takes a model: a Hugging Face folder, a .gguf file, or a hub id.
  [green]penstock generate Qwen/Qwen2.5-0.5B-Instruct -p "Hello"[/green]

[dim]penstock --help lists the commands; penstock generate --help its options.[/dim]"""


class _Program(TyperGroup):
    """Turns what a command raises into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with terminated_first():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            asked = isinstance(interrupt, Terminated)
            raise typer.Exit(TERMINATED if asked else INTERRUPTED) from interrupt
        except BrokenPipeError as broken:  # the reader of our output has gone: nothing to add
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from broken
        except (PenstockError, OSError) as failure:
            if console.debugging():
                raise
            console.error(failure)
            raise typer.Exit(1) from failure
        except (MemoryError, RuntimeError) as failure:
            if console.debugging() or not _is_out_of_memory(failure):
                raise
            console.error(
                f"Out of memory: {failure}. End other programs, lower --max-model-len, or take "
                "a smaller model."
            )
            raise typer.Exit(1) from failure

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        try:
            code = super().main(
                args=args,
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except Exception as failure:
            explain = getattr(failure, "format_message", None)  # what a wrong command line raises
            if explain is None or console.debugging():
                raise
            given = sys.argv[1:] if args is None else args
            _usage_error(failure, _unknown_ranks(self, failure, given) or explain())
        if code in (INTERRUPTED, TERMINATED):  # the former also while arguments are read
            if console.is_terminal():
                typer.echo(err=True)  # below what was being shown
            console.note("Stopped.")
        sys.exit(code if isinstance(code, int) else 0)


def _is_out_of_memory(failure: Exception) -> bool:
    """torch's allocator raises a plain RuntimeError."""
    return isinstance(failure, MemoryError) or "can't allocate memory" in str(failure)


def _unknown_ranks(program: Any, failure: Exception, words: Sequence[str]) -> str | None:
    """Which commands have `-cp` and its like, where this one doesn't; None: that isn't it.

    The parser takes `-cp` for `-c` and `-p`, and names only the first.
    """
    letters: str = getattr(failure, "option_name", "")
    for word in words:
        name = word.partition("=")[0]
        if name in _RANKS and letters in (name, name[:2]):
            having = ", ".join(sorted(_having(program, name)))
            return f"No such option: {name}. These have it: {having}"
    return None


def _having(command: Any, option: str, path: str = "") -> list[str]:
    if any(option in parameter.opts for parameter in command.params):
        return [path]
    inner = getattr(command, "commands", {})
    return [x for n, one in inner.items() for x in _having(one, option, f"{path} {n}".strip())]


def _usage_error(failure: Exception, message: str) -> NoReturn:
    context = getattr(failure, "ctx", None)
    path = getattr(context, "command_path", "penstock")
    if message.strip():  # else its help was shown already
        end = "" if message.rstrip().endswith("?") else "."
        console.error(f"{message.rstrip('. ')}{end} See {path} --help.")
    sys.exit(getattr(failure, "exit_code", 2))


app = typer.Typer(
    name="penstock",
    cls=_Program,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="An LLM inference engine that knows its floor.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """An LLM inference engine that knows its floor."""
    console.show_logs()
    if context.invoked_subcommand in _LOAD_A_MODEL:
        collect_rarely()
    if context.invoked_subcommand in _LEAVE_IN_ORDER:
        context.with_resource(heeding_sigterm())
    if context.invoked_subcommand is None:
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(WELCOME.format(version=__version__))


app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(fleet.fleet)
app.command()(rank.rank)
app.command()(export.export)
app.command()(prune.prune)
app.command()(build.build)
app.command()(batch.run)
app.command()(doctor.doctor)
app.command()(plan.plan)
app.command()(tune.tune)
app.command()(profile.profile)
app.command("eval")(evaluate.evaluate)
app.command()(drift.drift)
app.add_typer(bench.app, name="bench")


def run() -> None:
    """The `penstock` command."""
    import_whole()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't show a character
    app(prog_name="penstock")


if __name__ == "__main__":
    run()
