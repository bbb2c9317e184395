"""Tests of whole engines over Triton's kernels, interpreted.

The kernels are chosen when penstock is imported, so these run in a process of their own:
`tests/engine/test_interpreted.py` starts it. Elsewhere they aren't collected.
"""

from __future__ import annotations

import os

if os.environ.get("PENSTOCK_KERNELS") == "triton":
    from penstock.kernels.triton import linear_tiles

    # what is interpreted takes as long for a tile of 256 features as for one of 64
    wide = {bucket: (256, *tile[1:]) for bucket, tile in linear_tiles._table.items()}
    linear_tiles.override(wide)

collect_ignore_glob = [] if os.environ.get("PENSTOCK_KERNELS") == "triton" else ["test_*.py"]
