"""Export → build → run: what is prepared once, so that nothing is at run time."""
