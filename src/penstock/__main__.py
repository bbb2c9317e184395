"""The `penstock` command, also as `python -m penstock`."""

import sys


def run() -> None:
    """Entry point: Ctrl-C ends it without a traceback while its modules are imported, too."""
    try:
        from penstock.cli.main import run as program

        program()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")  # as `main` says it of a command that runs
        sys.exit(130)


if __name__ == "__main__":
    run()
