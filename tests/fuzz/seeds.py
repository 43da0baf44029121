"""The models that are broken: small ones, of every kind of structure that ONNX has."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

import burnish

MODEL = "model.onnx"
"""The file of a seed that is loaded; others lie beside it."""
PROGRAM = "program"
"""The seed that is a saved program in place of a model."""

CONVOLUTIONAL = """
<ir_version: 9, opset_import: ["" : 18], producer_name: "pytorch">
convolutional (float[batch,2,6,6] x) => (float[batch,3] logits) {
  convolved = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, kernel, bias)
  normalized = BatchNormalization <epsilon = 0.001> (convolved, scale, shift, mean, variance)
  active = Relu (normalized)
  pooled = MaxPool <kernel_shape = [2,2], strides = [2,2]> (active)
  padded = Pad (pooled, pads)
  ratio = Constant <value_float = 0.25> ()
  dropped = Dropout (padded, ratio)
  average = GlobalAveragePool (dropped)
  flat = Flatten (average)
  logits = Gemm <transB = 1> (flat, weight, offset)
}
"""

TRANSFORMER = """
<ir_version: 10, opset_import: ["" : 20]>
transformer (int64[batch,4] tokens) => (float[batch,4,5] logits) {
  embedded = Gather (table, tokens)
  placed = Add (embedded, position)
  inner = LayerNormalization <axis = -1> (placed, scale, shift)
  query = MatMul (inner, w_query)
  key = MatMul (inner, w_key)
  turned = Transpose <perm = [0,2,1]> (key)
  scores = MatMul (query, turned)
  root = Constant <value_float = 0.5> ()
  scaled = Mul (scores, root)
  attention = Softmax <axis = -1> (scaled)
  mixed = MatMul (attention, inner)
  joined = Add (mixed, placed)
  active = Gelu (joined)
  logits = MatMul (active, w_head)
}
"""

RECURRENT = """
<ir_version: 8, opset_import: ["" : 17]>
recurrent (float[3,batch,2] x, int32[batch] lengths) => (float[batch,3] logits) {
  sequence, last, cell = LSTM <hidden_size = 2, direction = "bidirectional"> (x, w, r, b, lengths)
  turned = Transpose <perm = [0,2,1,3]> (sequence)
  joined = Reshape (turned, extents)
  next, final = GRU <hidden_size = 2, linear_before_reset = 1> (joined, gru_w, gru_r, gru_b, lengths)
  state = Squeeze (final, zero)
  logits = MatMul (state, head)
}
"""

CONTROL_FLOW = """
<ir_version: 9, opset_import: ["" : 18]>
control_flow (float[batch,3] x, int64 count) => (float[batch,3] logits) {
  start = Constant <value = float[3] {0,0,0}> ()
  summed, rows = Scan <num_scan_inputs = 1, body = add (float[3] before, float[3] row) => (float[3] after, float[3] copy) {
    after = Add (before, row)
    copy = Identity (after)
  }> (start, x)
  total = ReduceSum <keepdims = 0> (x)
  none = Constant <value_float = 0.0> ()
  positive = Greater (total, none)
  chosen = If (positive) <
    then_branch = yes () => (float[batch,3] taken) { taken = MatMul (rows, w_yes) },
    else_branch = no () => (float[batch,3] other) { inner = MatMul (x, w_no) other = Tanh (inner) }
  >
  go = Constant <value = bool {1}> ()
  looped, steps = Loop (count, go, chosen) <
    body = turn (int64 i, bool go_in, float[batch,3] carried) => (bool go_out, float[batch,3] following, float[batch,3] kept) {
      go_out = Identity (go_in)
      product = MatMul (carried, w_loop)
      following = Sigmoid (product)
      kept = Mul (following, following)
    }
  >
  last = ReduceMax <keepdims = 0> (steps, first_axis)
  joined = Add (looped, last)
  logits = Mul (joined, w_last)
}
"""

FUNCTIONS = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
functions (float[batch,3] x) => (float[batch,2] logits) {
  hidden = local.dense <slope = 0.1> (x, w_first, b_first)
  deep = local.block (hidden, w_second, b_second)
  logits = local.dense (deep, w_third, b_third)
}
<domain: "local", opset_import: ["" : 18, "local" : 1]>
dense <slope: float = 0.01> (input, weight, bias) => (result) {
  product = MatMul (input, weight)
  moved = Add (product, bias)
  result = LeakyRelu <alpha: float = @slope> (moved)
}
<domain: "local", opset_import: ["" : 18, "local" : 1]>
block (input, weight, bias) => (result) {
  once = local.dense <slope = 0.2> (input, weight, bias)
  twice = local.twice <alpha = 0.5> (once)
  result = Add (twice, input)
}
<domain: "local", opset_import: ["" : 18, "local" : 1]>
twice <alpha> (input) => (result) {
  factor = Constant <value_float: float = @alpha> ()
  result = Mul (input, factor)
}
"""

EXTERNAL = """
<ir_version: 8, opset_import: ["" : 17]>
external (float[batch,4] x) => (float[batch,3] logits) {
  product = MatMul (x, first)
  moved = Add (product, bias)
  active = Tanh (moved)
  logits = Gemm (active, second, offset)
}
"""

QUANTIZED = """
<ir_version: 10, opset_import: ["" : 21]>
quantized (float[batch,4] x) => (float[batch,3] logits) {
  narrow = QuantizeLinear (x, step, zero)
  wide = DequantizeLinear (narrow, step, zero)
  weight = DequantizeLinear <axis = 1> (stored, steps)
  hidden = MatMul (wide, weight)
  active = Relu (hidden)
  half = Cast <to = 10> (active)
  back = CastLike (half, active)
  level, level_scale, level_zero = DynamicQuantizeLinear (back)
  product = MatMulInteger (level, packed, level_zero)
  float_product = Cast <to = 1> (product)
  dense = MatMul (back, head)
  logits = Add (dense, float_product)
}
"""

SEQUENCES = """
<ir_version: 8, opset_import: ["" : 17]>
sequences (float[batch,6] x) => (float[batch,2] logits) {
  parts = SplitToSequence <axis = 1> (x, three)
  one = Constant <value_int = 1> ()
  second = SequenceAt (parts, one)
  turned = MatMul (second, w)
  longer = SequenceInsert (parts, turned)
  shorter = SequenceErase (longer, one)
  joined = ConcatFromSequence <axis = 1> (shorter)
  length = SequenceLength (parts)
  factor = Cast <to = 1> (length)
  scaled = Mul (joined, factor)
  list = SequenceConstruct (x, x)
  mapped = SequenceMap (list) <body = each (float[batch,6] item) => (float[batch,6] result) { result = Tanh (item) }>
  perhaps = Optional (mapped)
  certain = OptionalGetElement (perhaps)
  first = SequenceAt (certain, one)
  sum = Add (first, scaled)
  logits = MatMul (sum, head)
}
"""

OLD = """
<ir_version: 4, opset_import: ["" : 8]>
old (float[2,2,4,4] x) => (float[2,3] probabilities) {
  convolved = Conv <kernel_shape = [3,3], auto_pad = "SAME_UPPER"> (x, kernel)
  normalized = BatchNormalization <epsilon = 0.001> (convolved, scale, shift, mean, variance)
  clipped = Clip <min = 0.0, max = 6.0> (normalized)
  larger = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 2.0]> (clipped)
  cut = Slice <starts = [0,0], ends = [4,4], axes = [2,3]> (larger)
  padded = Pad <pads = [0,0,1,1,0,0,1,1], value = 1.0> (cut)
  dropped, mask = Dropout <ratio = 0.3> (padded)
  average = ReduceMean <axes = [2,3], keepdims = 0> (dropped)
  logits = Gemm <transB = 1> (average, weight, offset)
  probabilities = Softmax (logits)
}
"""

SHAPES = """
<ir_version: 9, opset_import: ["" : 18]>
shapes (float[batch,2,4] x, int64[batch] chosen) => (float[batch,4] logits, float[best,4] highest) {
  extents = Shape (x)
  nothing = Constant <value_ints = [0]> ()
  rows = Gather (extents, nothing)
  rest = Constant <value_ints = [8]> ()
  flat_shape = Concat <axis = 0> (rows, rest)
  flat = Reshape (x, flat_shape)
  product = MatMul (flat, weight)
  two = Constant <value_ints = [2]> ()
  first, second = Split <axis = 1, num_outputs = 2> (product)
  mean = ReduceMean (first, axis)
  spread = Expand (mean, product_shape)
  product_shape = Shape (product)
  hot = OneHot (chosen, depth, values)
  picked = Mul (hot, table)
  combined = Einsum <equation = "bi,ij->bj"> (picked, mixing)
  starts = Constant <value_ints = [1]> ()
  ends = Constant <value_ints = [9223372036854775807]> ()
  later = Slice (combined, starts, ends, axis)
  widths = Constant <value_ints = [0,1,0,0]> ()
  padded = Pad (later, widths)
  logits = Add (padded, product)
  highest, places = TopK <axis = 0> (logits, two)
}
"""

NEWEST = """
<ir_version: 11, opset_import: ["" : 24]>
newest (float16[batch,2,3,4] x) => (float16[batch,6,4] logits) {
  attended = Attention <is_causal = 1> (x, x, x)
  normalized = RMSNormalization <axis = -1> (attended, scale)
  shape = Constant <value_ints = [0,-1,4]> ()
  joined = Reshape (normalized, shape)
  wide = Cast <to = 1> (joined)
  summed = CumSum (wide, axis)
  narrow = Cast <to = 10> (summed)
  moved = MatMul (narrow, weight)
  logits = Swish <alpha = 1.0> (moved)
}
"""


@dataclass(frozen=True)
class Seed:
    """Files, by their names; those of a model are ``MODEL`` and what it points to."""

    files: dict[str, bytes]

    @property
    def is_program(self) -> bool:
        return MODEL not in self.files


@cache
def seeds() -> dict[str, Seed]:
    """Return every seed by its name."""
    models = {
        "convolutional": _weighted(
            CONVOLUTIONAL,
            kernel=(3, 2, 3, 3),
            bias=(3,),
            scale=(3,),
            shift=(3,),
            mean=(3,),
            variance=(3,),
            pads=np.array([0, 0, 1, 0, 0, 0, 0, 1]),
            weight=(3, 3),
            offset=(3,),
        ),
        "transformer": _weighted(
            TRANSFORMER,
            table=(7, 4),
            position=(4, 4),
            scale=(4,),
            shift=(4,),
            w_query=(4, 4),
            w_key=(4, 4),
            w_head=(4, 5),
        ),
        "recurrent": _weighted(
            RECURRENT,
            w=(2, 8, 2),
            r=(2, 8, 2),
            b=(2, 16),
            gru_w=(1, 6, 4),
            gru_r=(1, 6, 2),
            gru_b=(1, 12),
            extents=np.array([3, -1, 4]),
            zero=np.array([0]),
            head=(2, 3),
        ),
        "control flow": _weighted(CONTROL_FLOW, w_yes=(3, 3), w_no=(3, 3), w_loop=(3, 3), w_last=(3,), first_axis=np.array([0])),
        "functions": _weighted(
            FUNCTIONS, w_first=(3, 4), b_first=(4,), w_second=(4, 4), b_second=(4,), w_third=(4, 2), b_third=(2,)
        ),
        "quantized": _weighted(
            QUANTIZED,
            step=np.float32(0.05),
            zero=np.uint8(128),
            stored=np.arange(-8, 8, dtype=np.int8).reshape(4, 4),
            steps=np.linspace(0.1, 0.4, 4).astype(np.float32),
            packed=np.arange(12, dtype=np.uint8).reshape(4, 3),
            head=(4, 3),
        ),
        "sequences": _weighted(SEQUENCES, three=np.array([2, 2, 2]), w=(2, 2), head=(6, 2)),
        "old": _weighted(
            OLD, kernel=(3, 2, 3, 3), scale=(3,), shift=(3,), mean=(3,), variance=(3,), weight=(3, 3), offset=(3,), inputs=True
        ),
        "shapes": _weighted(
            SHAPES,
            weight=(8, 4),
            axis=np.array([1]),
            depth=np.int64(3),
            values=np.array([0, 1], np.float32),
            table=(3,),
            mixing=(3, 4),
        ),
        "newest": _weighted(NEWEST, scale=(4,), axis=np.int64(1), weight=(4, 4), dtype=np.float16),
    }
    made = {name: Seed({MODEL: model.SerializeToString()}) for name, model in models.items()}
    made["external data"] = _external()
    program = burnish.compile(_perceptron(), optimizer="sgd:momentum=0.9", loss="mse")
    made["training information"] = Seed({MODEL: program.to_onnx().SerializeToString()})
    made[PROGRAM] = _saved(program)
    return made


def _weighted(
    text: str, dtype: type = np.float32, inputs: bool = False, **weights: tuple[int, ...] | np.ndarray | np.generic
) -> onnx.ModelProto:
    """A model from its text, with weights: drawn at random where a shape is given.

    Args:
        text: in the standard's own syntax.
        dtype: of what is drawn.
        inputs: whether initializers are inputs of the graph too, as in old files.
        weights: their shapes, or values.
    """
    model = parser.parse_model(text)
    generator = np.random.default_rng(0)
    # The parser keeps nodes in the order of the text, which may be any; files have to be sorted.
    nodes, known = list(model.graph.node), {value.name for value in model.graph.input} | set(weights) | {""}
    del model.graph.node[:]
    while nodes:
        ready = next(node for node in nodes if known.issuperset(node.input))
        nodes.remove(ready)
        model.graph.node.append(ready)
        known.update(ready.output)
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type.lower()}_{number}"
    for name, given in weights.items():
        array = generator.uniform(0.2, 1.0, given).astype(dtype) if isinstance(given, tuple) else np.asarray(given)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        if inputs:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    onnx.checker.check_model(model)
    return model


def _external() -> Seed:
    """A model whose weights lie in two files beside it."""
    model = _weighted(EXTERNAL, first=(4, 8), bias=(8,), second=(8, 3), offset=(3,))
    files = {"weights.bin": bytearray(), "more.bin": bytearray()}
    for position, tensor in enumerate(model.graph.initializer):
        location = list(files)[position // 2]
        data = files[location]
        for key, value in (("location", location), ("offset", len(data)), ("length", len(tensor.raw_data))):
            tensor.external_data.add(key=key, value=str(value))
        data += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
    return Seed({MODEL: model.SerializeToString()} | {name: bytes(data) for name, data in files.items()})


def _perceptron() -> onnx.ModelProto:
    return _weighted(EXTERNAL, first=(4, 4), bias=(4,), second=(4, 3), offset=(3,))


def _saved(program: burnish.Program) -> Seed:
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / PROGRAM)
        return Seed({path.name: path.read_bytes() for path in sorted((Path(folder) / PROGRAM).iterdir())})
