"""Writing an ONNX graph: nodes, constants and weights under names of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

OPSET = 18
IR_VERSION = 10


class GraphWriter:
    """Collects the nodes of a graph; every call returns the name of a value."""

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._helper: Any = helper
        self._numpy: Any = numpy_helper
        self._nodes: list[Any] = []
        self._stored: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self.weight_bytes = 0

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """An input of the graph; names in `shape` are open dimensions."""
        self._inputs.append(self._info(name, dtype, shape))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str], at: int) -> None:
        """Make `value` the float32 output `name`, the `at`-th of them."""
        self._nodes.append(self._helper.make_node("Identity", [value], [name]))
        self._outputs.insert(at, self._info(name, "FLOAT", shape))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The first output of an operator; an empty input is left out."""
        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(self._helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def split(self, value: str, sizes: Sequence[int]) -> list[str]:
        """Parts of the last dimension."""
        names = [f"split_{len(self._nodes)}_{i}" for i in range(len(sizes))]
        at = self.ints(*sizes)
        self._nodes.append(self._helper.make_node("Split", [value, at], names, axis=-1))
        return names

    def ints(self, *values: int) -> str:
        """A constant vector."""
        return self._constant("i_" + "_".join(map(str, values)), np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """A constant scalar."""
        return self._constant(f"i0_{value}", np.array(value, np.int64))

    def real(self, value: float) -> str:
        """A constant scalar."""
        return self._constant(f"f_{value!r}", np.array(value, np.float32))

    def weight(self, name: str, tensor: Tensor) -> str:
        """A stored float32 tensor; the same name is stored once."""
        if name not in self._stored:
            self._constant(name, tensor.detach().float().contiguous().numpy())
            self.weight_bytes += tensor.numel() * 4
        return name

    def model(self, name: str) -> Any:
        """The finished ONNX model."""
        graph = self._helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, list(self._stored.values())
        )
        opset = self._helper.make_opsetid("", OPSET)
        return self._helper.make_model(
            graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="penstock"
        )

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        if name not in self._stored:
            self._stored[name] = self._numpy.from_array(value, name)
        return name

    def _info(self, name: str, dtype: str, shape: Sequence[int | str]) -> Any:
        from onnx import TensorProto

        return self._helper.make_tensor_value_info(name, TensorProto.DataType.Value(dtype), shape)
