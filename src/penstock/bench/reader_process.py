"""The other end of a `ProcessReader`: answers what it asks, until it closes the pipe.

python -m penstock.bench.reader_process FD
"""

from __future__ import annotations

import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from penstock.errors import PenstockError


class _Server:
    """One reader, made by the first request."""

    def __init__(self) -> None:
        self._reader: Any = None

    def answer(self, what: str, *arguments: Any) -> Any:
        if what != "load":
            return getattr(self._reader, what)(*arguments)
        # the first import of the kernels, which PENSTOCK_ISA and PENSTOCK_KERNELS choose
        from penstock.bench.reader import LocalReader
        from penstock.bench.variant import TF32, Variant
        from penstock.errors import KernelError
        from penstock.kernels import native
        from penstock.runtime import load_runtime

        options, window = arguments
        variant = Variant(**options)
        if not variant.here:
            raise KernelError(
                f"{variant} can't run here: this machine's kernels are "
                f"{native.isa or 'the reference'}{f' ({native.reason})' if native.reason else ''}."
            )
        runtime = load_runtime(variant.config(window))
        self._reader = LocalReader(runtime, variant.form, by_tf32=variant.dtype == TF32)
        return self._reader.about


def serve(pipe: Connection) -> None:
    """Answer requests until the other end closes the pipe."""
    server = _Server()
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            reply = True, server.answer(*request)
        except PenstockError as error:
            reply = False, type(error)(str(error))
        except Exception:
            reply = False, RuntimeError(traceback.format_exc())
        try:
            pipe.send_bytes(pickle.dumps(reply))  # torch would share tensors by its own means
        except BrokenPipeError:
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's; it closes the pipe
    serve(Connection(int(sys.argv[1])))
