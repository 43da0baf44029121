"""The graphs that programs are lowered to stay as they are: a change of the code that changes none of them says so here.

``frozen_graphs.json`` holds a hash for each of sixty programs and each way to lower it, and one for the gradients of each
operator. To see what a change did, write the graphs as text before and after it, and compare the folders::

    PYTHONPATH=src:tests python tests/test_frozen_graphs.py --text FOLDER
    PYTHONPATH=src:tests python tests/test_frozen_graphs.py --write

The second replaces the hashes; the commit explains why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish import norms
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.distributed.derivation import derive
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.onnxruntime.kernels import OPERATORS, call_kernels
from burnish.engines.reference import ReferenceEngine
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.fusion import fuse
from burnish.errors import BurnishError
from burnish.files.export import export_inference
from oracles.frozen_models import catalogue
from oracles.gradient_harness import gradient_graph
from oracles.operator_cases import CASES

HASHES = Path(__file__).parent / "frozen_graphs.json"
GRAPHS = ("step", "grad", "apply", "evaluate", "predict")
SEE = f"the docstring of {Path(__file__).name} says how to look at the graphs"
MOST_VALUES = 16
"""Values of a larger tensor of floats are left out of its text: processors round folded constants differently."""


def text_of(model: ir.Model) -> str:
    """A model as text: values are numbered in the order in which nodes give them; inputs and outputs keep their names."""
    lines = [f"opset {sorted((domain, version) for domain, version in model.opset_imports.items())}"]
    _write_graph(model.graph, lines, {}, "")
    return "\n".join(lines) + "\n"


def _write_graph(graph: ir.Graph, lines: list[str], numbers: dict[ir.Value, str], indent: str) -> None:
    for value in graph.inputs:
        numbers[value] = f"%{value.name}" if not indent else f"%{len(numbers)}"
        lines.append(f"{indent}input {numbers[value]} {_type_of(value)}")
    for value in graph.initializers.values():
        if value not in numbers:
            numbers[value] = f"%{len(numbers)}"
            lines.append(f"{indent}initializer {numbers[value]} {_tensor(value.const_value)}")
    for node in graph:
        for value in node.outputs:
            numbers[value] = f"%{len(numbers)}"
        read = ", ".join("" if value is None else numbers.get(value, f"?{value.name}") for value in node.inputs)
        attributes = sorted(node.attributes.values(), key=lambda attribute: attribute.name)
        written = " ".join(f"{one.name}={_attribute(one)}" for one in attributes if one.type != ir.AttributeType.GRAPH)
        given = ", ".join(numbers[value] for value in node.outputs)
        lines.append(f"{indent}{given} = {node.domain}:{node.op_type}({read}) {written}".rstrip())
        for one in attributes:
            if one.type == ir.AttributeType.GRAPH:
                lines.append(f"{indent}  {one.name}:")
                _write_graph(one.as_graph(), lines, numbers, indent + "    ")
    for value in graph.outputs:
        name = f"{value.name} " if not indent else ""
        lines.append(f"{indent}output {name}{numbers.get(value, f'?{value.name}')} {_type_of(value)}")


def _type_of(value: ir.Value) -> str:
    dims = "?" if value.shape is None else [extent if isinstance(extent, int) else str(extent) for extent in value.shape]
    return f"{value.dtype} {dims}"


def _attribute(attribute: ir.Attr) -> str:
    return _tensor(attribute.as_tensor()) if attribute.type == ir.AttributeType.TENSOR else repr(attribute.value)


def _tensor(tensor: ir.TensorProtocol | None) -> str:
    if tensor is None:
        return "none"
    array = tensor.numpy()
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    counts = array.dtype.kind in "iub" or array.size <= MOST_VALUES
    return f"{tensor.dtype} {list(array.shape)} {digest if counts else ''}".rstrip()


def _graphs(graphs: LoweredGraphs, rewrite: Callable[[ir.Model], object] | None = None) -> dict[str, ir.Model]:
    found = {}
    for name in GRAPHS:
        if name in graphs.signature.graphs:
            found[name] = graphs.copy_of(name)
            if rewrite is not None:
                rewrite(found[name])
    return found


def _for_torch(model: ir.Model) -> None:
    fuse(model, kernels=True, winograd=True, kernel_choice="fixed")


def _among_workers(program: burnish.Program) -> dict[str, ir.Model]:
    graphs = program.graphs.lowered_to(TorchEngine().target.among_workers())
    derived = derive(graphs, 2, norms.get("sync"), bucket_size=4096, share=True)
    return {name: derived.copy_of(name) for name in ("step", "grad")}


def _exported(program: burnish.Program) -> dict[str, ir.Model]:
    return {"exported": export_inference(program, program.initial_state(seed=0))}


WAYS: Mapping[str, Callable[[burnish.Program], dict[str, ir.Model]]] = {
    "program": lambda program: {name: model.clone() for name, model in program.graphs.items()},
    "reference": lambda program: _graphs(program.graphs.lowered_to(ReferenceEngine().target)),
    "onnxruntime": lambda program: _graphs(
        program.graphs.lowered_to(OnnxRuntimeEngine(kernels=False).target.with_kernels(operator.name for operator in OPERATORS)),
        lambda model: call_kernels(model, threads=1),
    ),
    "torch": lambda program: _graphs(program.graphs.lowered_to(TorchEngine().target), _for_torch),
    "workers": _among_workers,
    "exported": _exported,
}
"""From a program to what an engine, workers or a file make of it, on a processor that has all kernels."""


@cache
def texts(name: str) -> dict[str, str]:
    """Way to lower -> the graphs as text, or the refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = catalogue()[name]()
        return {way: _text(make, program) for way, make in WAYS.items()}


def _text(make: Callable[[burnish.Program], dict[str, ir.Model]], program: burnish.Program) -> str:
    try:
        models = make(program)
    except BurnishError as error:
        return f"{type(error).__name__}: {error}\n"
    return "".join(f"# {name}\n{text_of(model)}" for name, model in models.items())


def gradient_texts() -> dict[str, str]:
    """Operator -> the graphs of its samples with their gradients, lowered, as text."""
    found: dict[str, list[str]] = defaultdict(list)
    for label, case in CASES.items():
        graph = gradient_graph(case.spec, case.sample, case.widest)
        found[case.spec.op_type].append(f"# {label}\n{text_of(graph.model)}")
    return {name: "".join(parts) for name, parts in sorted(found.items())}


def _hashes(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def _frozen() -> Any:
    return json.loads(HASHES.read_text())


@pytest.mark.parametrize("name", catalogue())
def test_graphs_are_as_they_were(name: str) -> None:
    assert _hashes(texts(name)) == _frozen()["programs"][name], SEE


def test_gradients_of_operators_are_as_they_were() -> None:
    assert _hashes(gradient_texts()) == _frozen()["gradients"], SEE


def test_every_program_is_frozen() -> None:
    assert list(catalogue()) == list(_frozen()["programs"])
    assert len(catalogue()) == 60


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the hashes of lowered graphs, or the graphs as text")
    parser.add_argument("--write", action="store_true", help="write the hashes")
    parser.add_argument("--text", type=Path, metavar="FOLDER", help="write each graph to this folder")
    options = parser.parse_args()
    if options.write:
        hashes = {"programs": {name: _hashes(texts(name)) for name in catalogue()}, "gradients": _hashes(gradient_texts())}
        HASHES.write_text(json.dumps(hashes, indent=1) + "\n")
    if options.text is not None:
        options.text.mkdir(parents=True, exist_ok=True)
        for name in catalogue():
            for way, text in texts(name).items():
                (options.text / f"{name}.{way}.txt").write_text(text)
        for name, text in gradient_texts().items():
            (options.text / f"gradients.{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
