"""The ONNX backend interface (``onnx.backend.base``) on stock ONNX Runtime, for inference and training operators.

``burnish.backend.BurnishBackend`` lowers models with ``burnish.lower`` and runs them. ONNX's own backend tests use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, namedtupledict

from burnish.compiler.lower_training_operators import lower
from burnish.engines.base import LoadedModel
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import EngineError, InputError
from burnish.targets import TARGETS


class PreparedModel(BackendRep):
    """A model loaded into ONNX Runtime.

    Args:
        model: the lowered, loaded model.
        inputs: input names, in the order of the source model.
        outputs: output names.
    """

    def __init__(self, model: LoadedModel, inputs: Sequence[str], outputs: Sequence[str]):
        self._model = model
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model once.

        Args:
            inputs: arrays in the order of the model's inputs, or by name; a single array for a model with one input.
            kwargs: not used.

        Returns:
            The outputs in the model's order, as a named tuple.

        Raises:
            InputError: the number or the names of the inputs do not match the model.
            EngineError: ONNX Runtime cannot run the model on them.
        """
        # ONNX Runtime refuses NumPy scalars.
        feed = {name: np.asarray(item) if isinstance(item, np.generic) else item for name, item in self._by_name(inputs).items()}
        results = self._model(feed)
        return tuple(namedtupledict("Outputs", self._outputs)(*(results[name] for name in self._outputs)))

    def _by_name(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            if set(inputs) != set(self._inputs):
                raise InputError(
                    f"the model has the inputs {_listed(self._inputs)}, and {_listed(inputs)} were given: give each by name"
                )
            return dict(inputs)
        values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if len(values) != len(self._inputs):
            raise InputError(
                f"the model has {len(self._inputs)} inputs ({_listed(self._inputs)}), and {len(values)} were given: "
                "give one array for each"
            )
        return dict(zip(self._inputs, values, strict=True))


class BurnishBackend(Backend):
    """ONNX backend that lowers models to standard operators and runs them on stock ONNX Runtime, on the CPU."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", *, seed: int = 0, **kwargs: Any) -> PreparedModel:
        """Lower and load a model.

        Args:
            model: the model; not changed.
            device: ``CPU``.
            seed: seed of the dropout masks, see ``burnish.lower``.
            kwargs: not used.

        Raises:
            EngineError: another device, or a model that ONNX Runtime cannot load.
            ModelError, GradientError, UnsupportedOperatorError: see ``burnish.lower``.
        """
        if not cls.supports_device(device):
            raise EngineError(f"The backend runs on device 'CPU' only, not on '{device}': leave device out")
        lowered = lower(model, seed=seed)
        loaded = OnnxRuntimeEngine(kernels=False).load(lowered)
        inputs, outputs = ([value.name or "" for value in values] for values in (lowered.graph.inputs, lowered.graph.outputs))
        return PreparedModel(loaded, inputs, outputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one operator.

        Args:
            node: the operator; unnamed inputs are omitted.
            inputs: arrays in the order of the inputs.
            device: ``CPU``.
            outputs_info: not used.
            kwargs: ``opset_version``, the version of the standard domain; by default the newest one.
        """
        names = [name for name in node.input if name]
        arrays = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if len(arrays) != len(names):
            raise InputError(f"the node has {len(names)} inputs, and {len(arrays)} were given: give one array for each")
        values = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, map(np.asarray, arrays), strict=True)
        ]
        results = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
        opset = kwargs.pop("opset_version", TARGETS["onnxruntime"].newest_opset)
        imports = [onnx.helper.make_opsetid("", opset)]
        if node.domain not in ("", "ai.onnx"):
            imports.append(onnx.helper.make_opsetid(node.domain, 1))
        graph = onnx.helper.make_graph([node], node.op_type, values, results)
        model = onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, opset_imports=imports))
        return cls.run_model(model, arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """True for ``CPU``."""
        return device.split(":")[0] == "CPU"


def _listed(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)
