"""Real signals without an axis of real and imaginary parts get one.

The standard wants a signal of STFT as [batch, length, 1 or 2]. ONNX Runtime takes [batch, length] too, and exporters write that.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder


def give_signals_parts(model: ir.Model) -> bool:
    """Unsqueeze, in place, the signals of two axes that an STFT reads; return whether there were any."""
    changed = False
    for node in list(model.graph.all_nodes()):
        signal = node.inputs[0] if node.op_type == "STFT" and node.domain == "" else None
        if signal is None or signal.shape is None or len(signal.shape) != 2:
            continue
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        graph.opset_imports.update(model.graph.opset_imports)
        builder = Builder(graph, before=node)
        node.replace_input_with(0, builder.op("Unsqueeze", builder.tensor(signal), builder.integers([-1])).value)
        changed = True
    return changed
