"""Write docs/operators.md: the standard operators with a gradient rule, and the file of each rule.

Run it with ``make docs`` after adding an operator; a test compares the file with what this writes.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from pathlib import Path

import onnx
import onnx_ir as ir

from burnish.graph.function_bodies import has_function
from burnish.operators import find_gradient, find_training_form
from burnish.targets import OLDEST_OPSET, TARGETS

PAGE = Path(__file__).with_name("operators.md")
# A fixed range, so that a newer release of the standard does not put the page out of date.
OPSETS = range(OLDEST_OPSET, TARGETS["onnxruntime"].newest_opset + 1)
FLOATS = frozenset({"tensor(float)", "tensor(double)"})
HANDLED = {
    **dict.fromkeys(
        "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt SequenceConstruct SequenceEmpty "
        "SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence".split(),
        "tensors before a gradient passes, as above",
    ),
    **dict.fromkeys("DequantizeLinear QLinearConv QLinearMatMul QuantizeLinear".split(), "passed straight through, as above"),
}
"""Operators that other operators replace before a graph is differentiated, and the replacement."""
REFUSED = {
    "BitCast": "the bits of a number have no derivative",
}
"""Operators that a gradient is refused through, by name, and why."""
DIFFERENTIABLE = onnx.defs.OpSchema.DifferentiationCategory.Differentiable

INTRODUCTION = f"""\
# Operators

`make docs` writes this page (`docs/generate_operator_table.py`) from the registry of gradient rules; do not edit it by hand.

On loading, burnish brings a model to opset {OPSETS[0]} or newer. *Versions* are the operator versions with a rule, among the
versions in force from opset {OPSETS[0]} to opset {OPSETS[-1]}.

An operator needs a rule only if a gradient has to pass through it: not before the first trained parameter, and not for
integer and boolean values. If a rule is missing, `burnish.compile` raises a [GradientError](errors.md#gradienterror) that
names the node; `burnish inspect` lists such nodes in advance.

If the standard defines an operator as a function of other operators, and burnish has no rule for it, burnish writes it out in
these operators wherever a gradient has to pass. Operators of opsets newer than burnish therefore train too. If a runtime does
not load the operator's opset, burnish writes it out in every graph: a program saved for ONNX Runtime has opset 26 at most.
When reading a model, burnish expresses the additions of opsets 27 and 28 to older operators (`SpaceToDepth`, `Mod`, `Range`)
in the older forms.

Gradients flow through `If`, `Loop` (counted and while) and `Scan`, also nested and without iterations, to their inputs and to
the outer values that their bodies read, so weights read in a loop train. A loop keeps its states from the start of each
iteration, and the backward pass computes the iteration again from there. Three cases cannot be right that way, and are
refused by name: states that change their shape between iterations, states that are sequences (both if the backward pass has
to read them), and random numbers in `burnish.grad`. `burnish.compile` draws random numbers from a key, new in each iteration.
Batch normalization in a body has to be frozen. An `If` that depends on the model's shapes, or on [an input that you fix to a
value](bring-your-model.md#a-model-with-a-switch-or-with-a-state), is replaced by its branch on reading.

On reading, burnish turns these into tensors: sequences with known elements, lists that a loop builds one by one
(`outputs.append(y)` in a scripted PyTorch module), maps over them, and optional values from the model. A program expects an
optional input in every batch, and refuses a sequence as an input. Predictions leave out outputs that are sequences, with a
warning.

`QuantizeLinear` and `DequantizeLinear` have no rule. For a gradient, burnish computes them and the nodes between them in
floating-point numbers, which [pass gradients straight through](trainable-weights.md#quantized-models). On reading,
`QLinearConv` and `QLinearMatMul` become `Conv` and `MatMul` between these two operators.

## Gradients at ties, bounds and zeros

The standard does not define subgradients. burnish uses these:

| Operator | Gradient |
|---|---|
| `ReduceMax`, `ReduceMin` | equal extremes share it evenly; for PyTorch's `max(dim)` and `min(dim)` the first gets all of it |
| `Max`, `Min` | equal operands share it evenly; for PyTorch's `clamp_min` and `clamp_max` the input gets all of it |
| `Clip` | 0 on a bound; for PyTorch's `clamp` it passes there |
| `Relu`, `Abs` | 0 at 0 |
| `ReduceL2`; `Sqrt` or `Pow` of a sum of even powers or of powers of `Abs` | 0 if the sum is 0, as for `norm` and `std` |
| `Sqrt` of a `Clip` from 0 or a `Max` with 0 | 0 at 0, as for `cdist` |
| `Pow(0, p)` | for the base, 0 for p = 0 and p > 1; for the exponent, 0 for p ≥ 0 |
| the bound of a length in PyTorch's `cosine_similarity` | passes below eps |

Modules (`burnish.torch.wrap`, `torch.compile`) and files from PyTorch's newer exporter record the PyTorch call of each node.
The older exporter does not, so burnish assumes the likelier call: a `Clip` is a clamp unless its bounds are 0 and 6 or it is
the only operator of its module, like `nn.Hardtanh`; a minimum of a maximum is a clamp with tensor bounds; and a `ReduceMax`
along one axis is `max(dim)`, but a norm if it follows an `Abs`. If the exporters' forms of `atan2`, `sinc` and
`cosine_similarity` contain 0/0, or have other gradients at 0, burnish rewrites them in PyTorch's form.
`tests/pytorch/test_subgradients.py` compares all of this with PyTorch.

## Older opsets

From opset 7 on, an operator has its meaning in the opset of its file. An attribute that became an input is written as one, an
axis that split a matrix (`Softmax`, `LogSoftmax` and `Hardmax` before opset 13) gets reshapes around it, and a form without a
newer equivalent is an [UnsupportedOperatorError](errors.md#unsupportedoperatorerror). `onnx.reference` ignores the opset of
some operators, including `Softmax`: do not compare files before opset 13 with it. If the standard's text is ambiguous, or
differs from runtimes:

- `MaxUnpool` with an output shape: indices from a `MaxPool` in the model count positions in that layer's input. Other indices
  count positions in the size that follows from the attributes, which fills the leading corner, as in the standard's test
  case; ONNX Runtime counts positions in the output shape.
- Pooling with `ceil_mode=1` leaves out a window that would start after the data, in every opset. The standard has said so
  since opset 22; before, its shape inference counts such windows.
- `ConvTranspose` before opset 11 pads like the corrected formula of opset 11 and like ONNX Runtime.
- `SplitToSequence` into pieces of one, by a scalar size and with `keepdims=0`, removes their axis, like ONNX Runtime and as
  PyTorch's exporter intends; the standard ignores `keepdims` if a size is given.
- `Resize` of opset 10 with the mode `nearest` rounds down to enlarge and up to reduce, like ONNX Runtime.

## The domains com.microsoft and ai.onnx.ml

On reading, burnish turns operators from ONNX Runtime's optimizers and exporters into [standard
operators](runtime-operators.md), and the scalers, linear models and other operators of [classical
toolkits](classical-toolkits.md) too. All others run on engines that have them, without a gradient.

## Images read at points

- `GridSample` has gradients for the data and the grid, equal to PyTorch's; ONNX Runtime computes the same numbers.
  `onnx.reference` differs for cubic interpolation with border padding: it moves an outside point to the border, but the
  standard repeats the border's elements. The gradient for the grid is zero for `nearest`, and for points moved by border
  padding.
- `Resize` has a gradient for the data in every mode; in the standard its region of interest and its scales are not variables.
  With `tf_crop_and_resize`, ONNX Runtime does not crop along an axis that keeps its size; the PyTorch and reference engines
  do, like the standard. The gradient always matches the engine.
- `RoiAlign` has gradients for the data and the corners of the regions, even if `sampling_ratio=0` lets a region's size set
  its number of points. With the mode `max` it takes the largest product of an element and its weight, like ONNX Runtime and
  `onnx.reference`.
- `MaxRoiPool` has a gradient for the data. Its regions are rounded to whole elements, so their gradient is zero. ONNX Runtime
  has it in float32, up to the version of opset 21.
- `DeformConv` reads zeros outside the data, like ONNX Runtime. On the PyTorch engine it supports only images.
"""


def schemas_by_operator() -> dict[str, dict[int, onnx.defs.OpSchema]]:
    """Return, for every standard operator, its versions in force in ``OPSETS``, each with its schema."""
    schemas: dict[str, dict[int, onnx.defs.OpSchema]] = defaultdict(dict)
    for name in sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}):
        for opset in OPSETS:
            try:
                schema = onnx.defs.get_schema(name, opset, "")
            except onnx.defs.SchemaError:
                continue
            if not schema.deprecated:
                schemas[name][schema.since_version] = schema
    return schemas


def operator_page() -> str:
    """Return the whole page."""
    rows: dict[str, list[str]] = defaultdict(list)
    missing: list[str] = []
    by_function: list[str] = []
    for operator, schemas in schemas_by_operator().items():
        nodes = {version: ir.node(operator, []) for version in schemas}
        found = {version: find_gradient(node, version) or find_training_form(node, version) for version, node in nodes.items()}
        rules = {version: rule for version, rule in found.items() if rule is not None}
        if rules:
            module = rules[max(rules)].__module__
            rows[module].append(f"| {operator} | {', '.join(str(version) for version in sorted(rules))} |")
        elif any(formal.differentiation_category == DIFFERENTIABLE for schema in schemas.values() for formal in schema.inputs):
            (by_function if has_function(operator, OPSETS[-1]) else missing).append(operator)
    sections = [INTRODUCTION]
    for module, lines in sorted(rows.items()):
        path = f"src/{module.replace('.', '/')}.py"
        name = module.rpartition(".")[2].replace("_", " ")
        heading = name.upper() if f"| {name.upper()} |" in lines[0] else name.capitalize()
        table = "\n".join(["| Operator | Versions |", "|---|---|", *lines])
        sections.append(f"## {heading}\n\nRules in [{path}](../{path}).\n\n{table}\n")
    sections.append(_without_a_rule(sum(len(lines) for lines in rows.values()), missing, by_function))
    return "\n".join(sections)


def _without_a_rule(count: int, missing: list[str], by_function: list[str]) -> str:
    """Return the section on operators without a rule, each with the reason."""
    newest = OPSETS[-1]
    named: dict[str, list[str]] = defaultdict(list)
    for operator, schema in sorted(_newest_schemas().items()):
        node = ir.node(operator, [])
        if find_gradient(node, newest) or find_training_form(node, newest) or operator in by_function:
            continue
        takes, gives = (any(FLOATS & set(formal.types) for formal in formals) for formals in (schema.inputs, schema.outputs))
        if operator in HANDLED:
            named[HANDLED[operator]].append(operator)
        elif operator in REFUSED:
            named[f"refused, as {REFUSED[operator]}"].append(operator)
        elif not takes:
            named["no gradient: they take no floating-point numbers"].append(operator)
        elif not gives:
            named["zero by definition: their outputs are integers, truth values or a choice among elements"].append(operator)
        elif has_function(operator, newest):
            named["written out by their function"].append(operator)
        else:
            missing.append(operator)
    if missing:
        named["refused: no rule has been written"] = sorted(set(missing))
    lines = [
        textwrap.fill(f"- {reason[0].upper()}{reason[1:]}: {', '.join(names)}.", width=130, subsequent_indent="  ")
        for reason, names in named.items()
    ]
    return f"## Without a rule\n\n{count} operators have a rule. The others:\n\n" + "\n".join(lines) + "\n"


def _newest_schemas() -> dict[str, onnx.defs.OpSchema]:
    """The operators of the newest opset of the page, each in the version in force there."""
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    present = {name for name in names if onnx.defs.has(name, OPSETS[-1], "")}
    schemas = {name: onnx.defs.get_schema(name, OPSETS[-1], "") for name in present}
    return {name: schema for name, schema in schemas.items() if not schema.deprecated}


if __name__ == "__main__":
    PAGE.write_text(operator_page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
