"""Write docs/operators.md: which standard operators have a gradient rule, and in which file it stands.

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
        "tensors by the time a gradient passes, as said above",
    ),
    **dict.fromkeys(
        "DequantizeLinear QLinearConv QLinearMatMul QuantizeLinear".split(), "passed straight through, as said above"
    ),
}
"""Operators that are gone before a graph is differentiated, and what they have become."""
REFUSED = {
    "BitCast": "the bits of a number have no derivative",
}
"""Operators that a gradient is refused through, by name, and why."""
DIFFERENTIABLE = onnx.defs.OpSchema.DifferentiationCategory.Differentiable

INTRODUCTION = f"""\
# Operators

Written by `docs/generate_operator_table.py` (`make docs`) from the registry of gradient rules; do not edit it by hand.

A model is brought to opset {OPSETS[0]} or newer when it is loaded. *Versions* are the versions of an operator in force from
opset {OPSETS[0]} to opset {OPSETS[-1]} that have a rule.

An operator without a rule is no obstacle where no gradient has to pass through it: before the first trained parameter, and
on integer and boolean values. Where a rule is needed and missing, `burnish.compile` raises a
[GradientError](errors.md#gradienterror) that names the node; `burnish inspect` lists such nodes beforehand.

Where the standard says what an operator means by a function of other operators, and there is no rule, it is written out in these
where a gradient has to pass, so that operators of opsets that are newer than burnish train too. So it is, in every graph, where a
runtime doesn't load the operator's opset: what a program saves for ONNX Runtime is of opset 26 at most. What opsets 27 and
28 added to older operators (`SpaceToDepth`, `Mod`, `Range`) is written in the forms of before when a model is read.

Gradients flow through `If`, `Loop` (counted and while) and `Scan`, nested and of no iteration too, to their inputs and to
what their bodies read of the graph around them: weights that a loop reads train. A loop keeps its states as each iteration began
with them, and the backward pass computes the iteration again from there. Refused, by name, is what that cannot be right for:
states that change their shape from one iteration to the next, or that are sequences, where the backward pass has to read them;
and draws of random numbers in `burnish.grad`. `burnish.compile` draws from a key, in each iteration anew. Batch normalization in
a body has to be frozen. An `If` that the model's shapes decide, or
[an input that is fixed to a value](bring-your-model.md#a-model-with-a-switch-or-with-a-state), becomes its branch when the model
is read.

Sequences whose elements are known, lists that a loop puts together one by one (`outputs.append(y)` in a scripted PyTorch
module), maps over them, and optional values that the model makes become tensors when it is read. An optional input is in every
batch of a program, and a sequence as an input is refused; outputs that are sequences are left out of predictions, with a warning.

`QuantizeLinear` and `DequantizeLinear` have no rule of their own: where a gradient is wanted, they and what stands between
them are computed in floating-point numbers, which [pass gradients straight through](trainable-weights.md#quantized-models).
`QLinearConv` and `QLinearMatMul` are written with these two around `Conv` and `MatMul` when a model is read.

## Gradients at ties, bounds and zeros

The standard does not say which subgradient an operator has. burnish takes these:

| Operator | Gradient |
|---|---|
| `ReduceMax`, `ReduceMin` | equal extremes share it evenly; of PyTorch's `max(dim)` and `min(dim)` the first has it all |
| `Max`, `Min` | equal operands share it evenly; of PyTorch's `clamp_min` and `clamp_max` the input has it all |
| `Clip` | 0 on a bound; of PyTorch's `clamp` it passes there |
| `Relu`, `Abs` | 0 at 0 |
| `ReduceL2`; `Sqrt` or `Pow` of a sum of even powers or of powers of `Abs` | 0 where the sum is 0, as of `norm` and `std` |
| `Sqrt` of a `Clip` from 0 or a `Max` with 0 | 0 at 0, as of `cdist` |
| `Pow(0, p)` | 0 by the base for p = 0 and p > 1; 0 by the exponent for p ≥ 0 |
| the bound of a length in PyTorch's `cosine_similarity` | passes below eps |

Modules (`burnish.torch.wrap`, `torch.compile`) and files of the newer exporter note the call of PyTorch with each node. The
older exporter does not, and the likelier call counts: a `Clip` is a clamp unless its bounds are 0 and 6 or it is the only
operator of its module, as of `nn.Hardtanh`; a minimum of a maximum is a clamp with bounds that are tensors; and a `ReduceMax`
along one axis is `max(dim)`, except of an `Abs`, where it is a norm. What the exporters write of `atan2`, `sinc` and
`cosine_similarity` with 0/0 in it, or with other gradients at 0, is put in PyTorch's form.
`tests/pytorch/test_subgradients.py` holds all of this to
PyTorch.

## Older opsets

An operator means what it meant in the opset of its file, from opset 7 on: an attribute that became an input is written as one,
an axis that split a matrix (`Softmax`, `LogSoftmax` and `Hardmax` before opset 13) is written with the shapes around it, and a
form that no later opset has is an [UnsupportedOperatorError](errors.md#unsupportedoperatorerror). `onnx.reference` takes no
notice of the opset in some operators, `Softmax` among them, and is no measure for files before opset 13. Where the standard's
text leaves a choice, or says otherwise than runtimes do:

- `MaxUnpool` with an output shape: indices of a `MaxPool` in the model count positions of what that layer read. Other indices
  count positions of the size that follows from the attributes, which fills the leading corner, as in the standard's test case;
  ONNX Runtime counts positions of the output shape.
- Pooling with `ceil_mode=1`: a window that would start behind the data is left out, in every opset. The standard says so since
  opset 22, and its shape inference counts such windows before.
- `ConvTranspose` before opset 11 pads as the text of opset 11 says, which corrected the formula, and as ONNX Runtime does.
- `SplitToSequence` into pieces of one, by a scalar size and with `keepdims=0`, gives them without their axis, as ONNX Runtime
  does and PyTorch's exporter means it; the standard takes no notice of `keepdims` beside a size.
- `Resize` of opset 10 with the mode `nearest` goes down where it enlarges and up where it reduces, as in ONNX Runtime.

## The domains com.microsoft and ai.onnx.ml

What ONNX Runtime's optimizers and exporters write becomes standard operators when a file is read:
[operators of runtimes](runtime-operators.md). So do scalers, linear models and what else
[classical toolkits](classical-toolkits.md) write. The others run on engines that have them, and have no gradient.

## Images read at points

- `GridSample` has gradients by the data and by the grid, those of PyTorch, whose numbers ONNX Runtime computes too.
  `onnx.reference` differs for cubic interpolation with border padding: it moves a point outside to the border, where the standard
  repeats the border's elements. By the grid the gradient is zero for `nearest`, and where border padding has moved a point.
- `Resize` has the gradient of every mode by the data; by the standard its region of interest and its scales are no variables.
  With `tf_crop_and_resize` ONNX Runtime does not crop along an axis that keeps its size; the PyTorch engine and the reference
  engine do, as the standard says. The gradient is each time that of what ran.
- `RoiAlign` has gradients by the data and by the corners of the regions, also where `sampling_ratio=0` lets a region's size
  decide how many points it is read at. With the mode `max` it takes the largest product of an element and its weight, as ONNX
  Runtime and `onnx.reference` do.
- `MaxRoiPool` has a gradient by the data; its regions are rounded to whole elements, so the one by them is zero. ONNX Runtime has
  it in float32, up to the version of opset 21.
- `DeformConv` reads as ONNX Runtime does, zeros outside of the data. On the PyTorch engine it is for images.
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
    """Return what becomes of the operators that have no rule, each with the reason."""
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
            named["no gradient to give: they take no floating-point numbers"].append(operator)
        elif not gives:
            named["zero by definition: they give integers, truth values or a choice among elements"].append(operator)
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
    return f"## Without a rule\n\n{count} operators have a rule. What becomes of the others:\n\n" + "\n".join(lines) + "\n"


def _newest_schemas() -> dict[str, onnx.defs.OpSchema]:
    """The operators of the newest opset of the page, each in the version in force there."""
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    present = {name for name in names if onnx.defs.has(name, OPSETS[-1], "")}
    schemas = {name: onnx.defs.get_schema(name, OPSETS[-1], "") for name in present}
    return {name: schema for name, schema in schemas.items() if not schema.deprecated}


if __name__ == "__main__":
    PAGE.write_text(operator_page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
