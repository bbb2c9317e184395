"""Ray's own lines on stderr, where an error of ours says the same in a sentence.

Ray's library writes them before it reads what level its log shall have, so no setting keeps them
back: while they are held, what is written to file descriptor 2 goes through here.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_STDERR = 2
_PATIENCE_S = 1.0  # for what was written to have come through
_RAYS = re.compile(rb"\[\d{4}-\d\d-\d\d [\d:,.]+ [DIWE] \d+ \d+\] ")
"""How a line of Ray's library begins, but for what it ends the process with."""


@contextmanager
def without_rays_lines() -> Iterator[None]:
    """Keep back what Ray's library logs; all other lines go on to stderr as they come."""
    try:
        stderr = os.dup(_STDERR)
    except OSError:  # there is none
        yield
        return
    ours, theirs = os.pipe()
    passing = threading.Thread(target=_pass, args=(ours, stderr), daemon=True)
    with suppress(AttributeError, OSError, ValueError):  # replaced by somebody, or closed
        sys.stderr.flush()
    os.dup2(theirs, _STDERR)
    os.close(theirs)
    passing.start()
    try:
        yield
    finally:
        os.dup2(stderr, _STDERR)  # closes the pipe, unless a process that was started has it too
        passing.join(_PATIENCE_S)


def _pass(ours: int, stderr: int) -> None:
    """Until nobody has the pipe any more."""
    with open(ours, "rb") as lines, open(stderr, "wb", buffering=0) as out:
        for line in lines:
            if not _RAYS.match(line):
                with suppress(OSError):
                    out.write(line)
