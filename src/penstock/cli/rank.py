"""`penstock rank`: a stage of a model whose first stage is on another machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Annotated

import typer

from penstock.cli import console
from penstock.cli.options import Model
from penstock.errors import ConfigError

_RUN = "from penstock.runtime.rank import run_away; run_away()"


def rank(
    model: Model,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the first stage finds this one (--stage there). PENSTOCK_RANK_KEY must be "
            "the same on both: who knows it can run code here.",
        ),
    ] = "127.0.0.1:7433",
) -> None:
    """Compute some layers of a model that other machines have the rest of (docs/parallel.md)."""
    from penstock.models.hub import resolve
    from penstock.runtime import away
    from penstock.runtime.engine_folder import is_engine

    away.key()
    folder = resolve(model)
    if is_engine(folder):
        raise ConfigError(
            f"{folder} was built for one process: give the model or export that it was built from."
        )
    with away.listen(listen) as waiting:
        console.note(f"A stage of {folder} waits at {listen}. Ctrl-C ends it.")
        more = [str(os.getpid()), str(folder), str(waiting.fileno())]
        while True:  # a session is a process: its memory is free for the next one
            begun = time.monotonic()
            ended = subprocess.run(
                [sys.executable, "-P", "-c", _RUN, *more],
                stdin=subprocess.DEVNULL,
                pass_fds=[waiting.fileno()],
                check=False,
            )
            console.note("Waits again.")
            if ended.returncode and time.monotonic() < begun + 1:  # again and again, perhaps
                time.sleep(1)
