from __future__ import annotations

import pytest

pytest.importorskip("gguf", reason="the gguf package, which writes the files that are read, is missing")
