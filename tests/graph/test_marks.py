"""What nodes say of their quantization and pruning, read from files that may come from anywhere."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from burnish.errors import ModelError
from burnish.graph import pruning_mark
from burnish.graph.pruning_mark import PruningMark
from burnish.quantization import graph as quantization_mark
from burnish.quantization.graph import QuantizationMark

KINDS = {quantization_mark.KEY: QuantizationMark, pruning_mark.KEY: PruningMark}


@pytest.mark.parametrize("text", ["", "[", "[]", "3", '{"role": "weight"}', '{"unknown": 1}', "[" * 100_000])
@pytest.mark.parametrize("key", KINDS)
def test_what_cannot_be_read_is_refused_by_the_node(key, text):
    node = ir.Node("", "Mul", [], name="masked")
    node.metadata_props[key] = text
    with pytest.raises(ModelError, match=f"^Mul 'masked' has an entry '{key}' in its metadata that this burnish cannot read"):
        KINDS[key].of(node)
    del node.metadata_props[key]
    assert KINDS[key].of(node) is None


def test_what_is_written_is_read():
    node, mark = ir.Node("", "QuantizeLinear", []), QuantizationMark("activation", "observed", 255, momentum=0.9, settled=0.01)
    mark.put(node)
    assert QuantizationMark.of(node) == mark
