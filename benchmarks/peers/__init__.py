"""The same work done by Penstock and by other engines, in turns: `python -m benchmarks.peers`."""
