"""Times forms of a convolution's gradients on stock ONNX Runtime, at shapes of ResNet-50 and MobileNetV2.

    python benchmarks/convolution_gradients.py [--threads 2] [--batch 16] [--rounds 5] [--only depthwise]

For each shape it prints, in GFLOP/s (2 operations per multiplication) and as a multiple of the fastest, the form that burnish
lowers to, the alternatives, ONNX Runtime's forward and PyTorch's own gradient. Forms take turns, round by round, and the least
time of each counts; results are compared with PyTorch's, and a form that is wrong is not timed. The rules in
``burnish.ops.convolution_lowering`` rest on this.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from burnish.graph import BURNISH_DOMAIN, Builder, Tensor
from burnish.lowering import lower_semantic_operators


@dataclass(frozen=True)
class Shape:
    """A square two-dimensional convolution."""

    network: str
    channels: int
    size: int
    outputs: int
    kernel: int
    stride: int
    group: int = 1

    @property
    def pad(self) -> int:
        return self.kernel // 2

    @property
    def out_size(self) -> int:
        return (self.size + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def attributes(self) -> dict[str, list[int] | int]:
        return {
            "kernel_shape": [self.kernel] * 2,
            "strides": [self.stride] * 2,
            "dilations": [1, 1],
            "pads": [self.pad] * 4,
            "group": self.group,
        }

    @property
    def kind(self) -> str:
        return "depthwise" if self.group > 1 else "pointwise" if self.kernel == 1 else "dense"

    def operations(self, batch: int) -> int:
        return 2 * batch * self.outputs * self.channels // self.group * self.kernel**2 * self.out_size**2


SHAPES = [
    Shape("ResNet-50", 3, 224, 64, 7, 2),
    *(Shape("ResNet-50", width, size, width, 3, 1) for width, size in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *(Shape("ResNet-50", width, size, width, 3, 2) for width, size in ((128, 56), (256, 28), (512, 14))),
    *(Shape("ResNet-50", 64 << stage, 56 >> stage, 256 << stage, 1, 1) for stage in range(4)),
    *(Shape("ResNet-50", 256 << stage, 56 >> stage, 64 << stage, 1, 1) for stage in range(4)),
    *(Shape("ResNet-50", 256 << stage, 56 >> stage, 512 << stage, 1, 2) for stage in range(3)),
    Shape("MobileNetV2", 320, 7, 1280, 1, 1),
    *(Shape("MobileNetV2", c, size, c, 3, 1, c) for c, size in ((32, 112), (144, 56), (192, 28), (384, 14), (960, 7))),
    *(Shape("MobileNetV2", c, size, c, 3, 2, c) for c, size in ((96, 112), (144, 56), (192, 28), (576, 14))),
]

Form = Callable[[Builder, Shape, Tensor, Tensor, Tensor], Tensor]


def forward(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return b.op("Conv", x, w, **shape.attributes)


def burnish_input_gradient(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return b.op("ConvInputGrad", dy, w, x, domain=BURNISH_DOMAIN, like=x, **shape.attributes)


def burnish_weight_gradient(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return b.op("ConvWeightGrad", dy, x, w, domain=BURNISH_DOMAIN, like=w, **shape.attributes)


def transposed_convolution(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    leftover = (shape.size + 2 * shape.pad - shape.kernel) % shape.stride
    return b.op("ConvTranspose", dy, w, output_padding=[leftover] * 2, **shape.attributes)


def zeros_between_then_convolution(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """dy with zeros between its entries, convolved at stride 1 with the reversed weight."""
    channels, size, stride = shape.outputs, shape.out_size, shape.stride
    reach = (size - 1) * stride + 1 + (shape.size + 2 * shape.pad - shape.kernel) % stride
    apart = b.op("Reshape", dy, b.integers([0, channels, size, 1, size, 1]))
    apart = b.op("Pad", apart, b.integers([0] * 9 + [stride - 1, 0, stride - 1]))
    apart = b.op("Reshape", apart, b.integers([0, channels, size * stride, size * stride]))
    apart = b.op("Slice", apart, b.integers([0, 0]), b.integers([reach] * 2), b.integers([2, 3]))
    if shape.group == 1:
        w = b.op("Transpose", w, perm=[1, 0, 2, 3])
    axes = b.integers([2, 3])
    w = b.op("Slice", w, b.integers([-1, -1]), b.integers([-(2**31)] * 2), axes, b.integers([-1, -1]))
    return b.op("Conv", apart, w, pads=[shape.kernel - 1 - shape.pad] * 4, group=shape.group)


def _shifted(b: Builder, shape: Shape, x: Tensor) -> list[Tensor]:
    """For each tap the entries of x that it meets, [N, C, Ho, Wo]."""
    if shape.pad:
        x = b.op("Pad", x, b.integers([0, 0, shape.pad, shape.pad] * 2))
    span = (shape.out_size - 1) * shape.stride + 1
    taps = [(row, column) for row in range(shape.kernel) for column in range(shape.kernel)]
    axes, steps = b.integers([2, 3]), b.integers([shape.stride] * 2)
    return [b.op("Slice", x, b.integers(tap), b.integers([start + span for start in tap]), axes, steps) for tap in taps]


def product_per_tap(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """For each tap a matrix product per image, summed over the images."""
    rows = b.op("Reshape", dy, b.integers([0, 0, -1]))
    sums = []
    for taken in _shifted(b, shape, x):
        columns = b.op("Transpose", b.op("Reshape", taken, b.integers([0, 0, -1])), perm=[0, 2, 1])
        total = b.op("ReduceSum", b.op("MatMul", rows, columns), b.integers([0]), keepdims=0)
        sums.append(b.op("Unsqueeze", total, b.integers([2])))
    return b.op("Reshape", b.op("Concat", *sums, axis=2), b.integers([shape.outputs, shape.channels, *[shape.kernel] * 2]))


def one_product(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Pointwise: one matrix product over the pixels of all images."""
    (taken,) = _shifted(b, shape, x)
    rows = b.op("Transpose", b.op("Reshape", dy, b.integers([0, 0, -1])), perm=[1, 0, 2])
    columns = b.op("Transpose", b.op("Reshape", taken, b.integers([0, 0, -1])), perm=[0, 2, 1])
    rows = b.op("Reshape", rows, b.integers([shape.outputs, -1]))
    product = b.op("MatMul", rows, b.op("Reshape", columns, b.integers([-1, shape.channels])))
    return b.op("Reshape", product, b.integers([shape.outputs, shape.channels, 1, 1]))


def product_and_sum_per_tap(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Depthwise: for each tap a product entry by entry and a sum over images and pixels."""
    axes = b.integers([0, 2, 3])
    sums = [b.op("ReduceSum", taken * dy, axes, keepdims=0) for taken in _shifted(b, shape, x)]
    joined = b.op("Concat", *(b.op("Unsqueeze", total, b.integers([1])) for total in sums), axis=1)
    return b.op("Reshape", joined, b.integers([shape.outputs, 1, shape.kernel, shape.kernel]))


def exchanged_convolution(b: Builder, shape: Shape, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A convolution with batch and channels exchanged: strides become dilations, dy the kernel."""
    leftover = (shape.size + 2 * shape.pad - shape.kernel) % shape.stride
    end = shape.pad - leftover
    data = b.op("Transpose", x, perm=[1, 0, 2, 3])
    if shape.group > 1:
        data = b.op("Reshape", data, b.integers([1, -1, shape.size, shape.size]))
    weight = b.op("Transpose", dy, perm=[1, 0, 2, 3])
    pads = [shape.pad, shape.pad, end, end]
    dw = b.op("Conv", data, weight, dilations=[shape.stride] * 2, pads=pads, group=shape.group)
    if shape.group > 1:
        return b.op("Reshape", dw, b.integers([shape.outputs, 1, shape.kernel, shape.kernel]))
    return b.op("Transpose", dw, perm=[1, 0, 2, 3])


def input_gradient_forms(shape: Shape) -> dict[str, Form]:
    forms: dict[str, Form] = {"burnish": burnish_input_gradient, "forward": forward}
    if shape.stride == 1:
        forms["ConvTranspose"] = transposed_convolution
    else:
        forms["zeros between, Conv"] = zeros_between_then_convolution
    return forms


def weight_gradient_forms(shape: Shape) -> dict[str, Form]:
    forms: dict[str, Form] = {"burnish": burnish_weight_gradient}
    if shape.kind == "depthwise":
        return forms | {"product and sum per tap": product_and_sum_per_tap, "exchanged Conv": exchanged_convolution}
    if shape.kind == "pointwise":
        return forms | {"product per image": product_per_tap, "one product": one_product}
    return forms | {"product per tap": product_per_tap, "exchanged Conv": exchanged_convolution}


def session(form: Form, shape: Shape, threads: int) -> onnxruntime.InferenceSession:
    """A model of one form, batch symbolic."""
    graph = ir.Graph([], [], nodes=[], name="form", opset_imports={"": 18, BURNISH_DOMAIN: 1})
    extents = {
        "dy": ["batch", shape.outputs, shape.out_size, shape.out_size],
        "x": ["batch", shape.channels, shape.size, shape.size],
        "w": [shape.outputs, shape.channels // shape.group, shape.kernel, shape.kernel],
    }
    for name, dimensions in extents.items():
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dimensions)))
    builder = Builder(graph)
    result = form(builder, shape, *(builder.tensor(value) for value in graph.inputs))
    result.value.name = "result"
    graph.outputs.append(result.value)
    model = lower_semantic_operators(ir.Model(graph, ir_version=10))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def compare(title: str, shape: Shape, forms: dict[str, Form], peer: Callable[[], torch.Tensor], arguments: argparse.Namespace,
            feeds: dict[str, np.ndarray]) -> None:  # fmt: skip
    """Time the forms and the peer in turns and print a line for each."""
    expected = peer().numpy()
    runs: dict[str, Callable[[], object]] = {"PyTorch": peer}
    for name, form in forms.items():
        running = session(form, shape, arguments.threads)
        binding = running.io_binding()
        for item in running.get_inputs():
            binding.bind_ortvalue_input(item.name, onnxruntime.OrtValue.ortvalue_from_numpy(feeds[item.name]))
        binding.bind_output("result")
        running.run_with_iobinding(binding)
        result = binding.copy_outputs_to_cpu()[0]
        error = np.linalg.norm(result - expected) / np.linalg.norm(expected) if result.shape == expected.shape else np.inf
        if name != "forward" and error > 1e-5:
            print(f"    {name}: relative error {error:.1e}, not timed")
            continue
        runs[name] = lambda running=running, binding=binding: running.run_with_iobinding(binding)
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - start)
    fastest = min(seconds for name, seconds in least.items() if name != "forward")
    print(f"  {title}")
    for name, seconds in least.items():
        speed = shape.operations(arguments.batch) / seconds / 1e9
        print(f"    {name:<26}{seconds * 1e3:9.2f} ms {speed:8.1f} GFLOP/s {seconds / fastest:6.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["dense", "pointwise", "depthwise"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        if arguments.only not in (None, shape.kind):
            continue
        print(f"{shape.network}: {shape}")
        feeds = {
            "dy": rng.standard_normal((arguments.batch, shape.outputs, shape.out_size, shape.out_size), dtype=np.float32),
            "x": rng.standard_normal((arguments.batch, shape.channels, shape.size, shape.size), dtype=np.float32),
            "w": rng.standard_normal((shape.outputs, shape.channels // shape.group, *[shape.kernel] * 2), dtype=np.float32),
        }
        tensors = [torch.from_numpy(feeds[name]) for name in ("dy", "x", "w")]

        def peer(index: int, tensors: list[torch.Tensor] = tensors, shape: Shape = shape) -> torch.Tensor:
            mask = [position == index for position in range(3)]
            return torch.ops.aten.convolution_backward(
                *tensors, None, [shape.stride] * 2, [shape.pad] * 2, [1, 1], False, [0, 0], shape.group, mask
            )[index]

        compare("input gradient", shape, input_gradient_forms(shape), lambda: peer(0), arguments, feeds)
        compare("weight gradient", shape, weight_gradient_forms(shape), lambda: peer(1), arguments, feeds)


if __name__ == "__main__":
    main()
