"""`python -m penstock`: the `penstock` command, by the interpreter that is asked."""

from penstock.cli.main import run

if __name__ == "__main__":
    run()
