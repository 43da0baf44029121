"""Times the forms of a convolution's gradients on stock ONNX Runtime, at shapes of well-known networks, and fits their costs.

    python benchmarks/convolution_gradients.py --batch 1 4 16       a table: each form, the best, the one that is chosen
    python benchmarks/convolution_gradients.py --batch 4 --only depthwise,stem
    python benchmarks/convolution_gradients.py --threads 1 --fit    the numbers of operators/convolution_forms.py

For each shape it gives milliseconds of every form that applies, of PyTorch's own gradient, and what the chosen form takes as a
multiple of the fastest. Forms take turns, round by round, and the least time of each counts; a form whose result parts from
PyTorch's is not timed. With one thread it is the time that the thread ran for: other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from burnish.graph import BURNISH_DOMAIN, Builder
from burnish.operators import Operation
from burnish.operators.convolution import weight_forms
from burnish.operators.convolution_forms import NANOSECONDS, THREADS, Convolution, Form, choose, forced_forms
from burnish.operators.convolution_input_forms import INPUT_FORMS
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators

GRADIENTS = ("ConvInputGrad", "ConvWeightGrad")
HOPELESS = 20
"""A form that takes this many times as long as another in its first run is not timed."""


@dataclass(frozen=True)
class Shape:
    """A convolution of one image [C, *sizes] with a weight [O, C / group, *kernel]."""

    name: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    pad: int | tuple[int, ...] | None = None
    dilation: int = 1
    group: int = 1

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:]

    @property
    def strides(self) -> tuple[int, ...]:
        return self.stride if isinstance(self.stride, tuple) else (self.stride,) * len(self.kernel)

    @property
    def pads(self) -> tuple[int, ...]:
        if isinstance(self.pad, tuple):
            return self.pad
        return tuple(size // 2 * self.dilation if self.pad is None else self.pad for size in self.kernel)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The spatial sizes of y."""
        reaches = [(size - 1) * self.dilation + 1 for size in self.kernel]
        parts = zip(self.x[1:], self.pads, reaches, self.strides, strict=True)
        return tuple((size + 2 * pad - reach) // stride + 1 for size, pad, reach, stride in parts)

    @property
    def attributes(self) -> dict[str, list[int] | int]:
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": [self.dilation] * len(self.kernel),
            "pads": [*self.pads, *self.pads],
            "group": self.group,
        }

    def feeds(self, batch: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        extents = {"dy": (batch, self.weight[0], *self.outputs), "x": (batch, *self.x), "w": self.weight}
        return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in extents.items()}


def square(name: str, channels: int, size: int, outputs: int, kernel: int, stride: int = 1, **others: int) -> Shape:
    weight = (outputs, channels // others.get("group", 1), kernel, kernel)
    return Shape(f"{name} {kernel}x{kernel}", (channels, size, size), weight, stride, **others)


def depthwise(channels: int, size: int, kernel: int, stride: int = 1, **others: int) -> Shape:
    return square("depthwise", channels, size, channels, kernel, stride, group=channels, **others)


SHAPES = [
    square("stem", 3, 224, 64, 7, 2),
    square("stem", 3, 224, 32, 3, 2),
    *(square("dense", width, size, width, 3) for width, size in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *(square("dense", width, size, width, 3, 2) for width, size in ((128, 56), (256, 28), (512, 14))),
    *(square("dense", 128, size, 32, 3) for size in (28, 7)),
    square("dilated", 256, 28, 256, 3, dilation=2),
    square("dilated", 512, 16, 256, 3, dilation=12),
    *(square("pointwise", 64 << stage, 56 >> stage, 256 << stage, 1) for stage in range(4)),
    *(square("pointwise", 256 << stage, 56 >> stage, 64 << stage, 1) for stage in range(4)),
    *(square("pointwise", 256 << stage, 56 >> stage, 512 << stage, 1, 2) for stage in range(3)),
    *(square("pointwise", *sizes, 1) for sizes in ((16, 112, 96), (320, 7, 1280), (192, 28, 32), (160, 7, 960))),
    *(depthwise(channels, size, 3) for channels, size in ((32, 112), (144, 56), (192, 28), (384, 14), (960, 7))),
    *(depthwise(channels, size, 3, 2) for channels, size in ((96, 112), (144, 56), (192, 28), (576, 14))),
    *(depthwise(channels, size, 5) for channels, size in ((240, 28), (672, 14), (1152, 7))),
    *(depthwise(channels, size, 5, 2) for channels, size in ((144, 56), (672, 14))),
    *(depthwise(channels, size, 7) for channels, size in ((96, 56), (384, 14))),
    square("grouped", 128, 56, 128, 3, group=32),
    square("grouped", 256, 28, 256, 3, 2, group=32),
    square("grouped", 512, 14, 512, 3, group=32),
    Shape("signal 80", (1, 16000), (64, 1, 80), 4, 38),
    Shape("signal 3", (512, 800), (512, 512, 3), 2, 0),
    Shape("signal 9", (64, 1000), (64, 64, 9)),
    Shape("signal depthwise 31", (256, 500), (256, 1, 31), group=256),
    Shape("volume stem", (3, 16, 56, 56), (64, 3, 3, 7, 7), (1, 2, 2)),
    Shape("volume 3x3x3", (64, 8, 28, 28), (64, 64, 3, 3, 3)),
    Shape("volume 3x3x3", (64, 8, 28, 28), (128, 64, 3, 3, 3), 2),
    Shape("volume 3x3x3", (256, 2, 7, 7), (256, 256, 3, 3, 3)),
    Shape("volume 1x1x1", (64, 8, 28, 28), (128, 64, 1, 1, 1), 2),
]


@dataclass
class Measurement:
    """The least seconds of a form, and the work that it did."""

    form: str
    work: Mapping[str, float]
    seconds: float


def operation(shape: Shape, op_type: str, batch: int | str) -> Operation:
    """The semantic gradient operator of a convolution, in a graph of its own."""
    graph = ir.Graph([], [], nodes=[], name="form", opset_imports={"": 18, BURNISH_DOMAIN: 1})
    for name, array in shape.feeds(1).items():
        extents = array.shape if name == "w" else (batch, *array.shape[1:])
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(extents)))
    builder = Builder(graph)
    dy, x, w = (builder.tensor(value) for value in graph.inputs)
    operands = (dy, w, x) if op_type == "ConvInputGrad" else (dy, x, w)
    like = x if op_type == "ConvInputGrad" else w
    result = builder.op(op_type, *operands, domain=BURNISH_DOMAIN, like=like, **shape.attributes)
    result.value.name = "result"
    graph.outputs.append(result.value)
    node = result.value.producer()
    assert node is not None
    return Operation(node, builder)


def convolution_of(op: Operation) -> Convolution:
    first, second, third = (op.required(index) for index in range(3))
    is_input = op.node.op_type == "ConvInputGrad"
    return Convolution(op, first, third if is_input else second, second if is_input else third)


def possible_forms(op: Operation) -> list[Form]:
    convolution = convolution_of(op)
    forms = INPUT_FORMS if op.node.op_type == "ConvInputGrad" else weight_forms(convolution)
    return [form for form in forms if form.applies(convolution)]


def session(shape: Shape, op_type: str, form: str, batch: int | str, threads: int) -> onnxruntime.InferenceSession:
    graph = operation(shape, op_type, batch).builder.graph
    with forced_forms(form):
        model = ir.Model(graph, ir_version=10)
        lower_semantic_operators(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound_run(running: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray], expected: np.ndarray) -> Callable[[], None]:
    """A run on bound arrays, whose result was found to be the expected one."""
    binding = running.io_binding()
    for item in running.get_inputs():
        binding.bind_ortvalue_input(item.name, onnxruntime.OrtValue.ortvalue_from_numpy(feeds[item.name]))
    binding.bind_output("result")
    running.run_with_iobinding(binding)
    result = binding.copy_outputs_to_cpu()[0]
    error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    if not error < 1e-5:
        raise AssertionError(f"relative error {error:.1e}")
    return lambda: running.run_with_iobinding(binding)


def torch_gradient(shape: Shape, op_type: str, feeds: Mapping[str, np.ndarray]) -> Callable[[], torch.Tensor]:
    dy, x, w = (torch.from_numpy(feeds[name]) for name in ("dy", "x", "w"))
    wanted = op_type == "ConvWeightGrad"
    settings = (shape.strides, shape.pads, [shape.dilation] * len(shape.kernel), False, [0] * len(shape.kernel), shape.group)
    return lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *settings, [not wanted, wanted, False])[wanted]


def least_seconds(runs: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The least time of each, in turns."""
    least = {}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in least and least[name] > HOPELESS * min(least.values()):
                continue
            start = clock()
            run()
            least[name] = min(least.get(name, float("inf")), clock() - start)
    return least


def compare(shape: Shape, op_type: str, batch: int, arguments: argparse.Namespace) -> list[Measurement]:
    """Print a line of the table; return what was measured."""
    feeds = shape.feeds(batch)
    peer = torch_gradient(shape, op_type, feeds)
    expected = peer().numpy()
    known = batch if arguments.static else "batch"
    op = operation(shape, op_type, known)
    forms = possible_forms(op)
    runs: dict[str, Callable[[], object]] = {
        form.name: bound_run(session(shape, op_type, form.name, known, arguments.threads), feeds, expected) for form in forms
    }
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    least = least_seconds(runs | {"PyTorch": peer}, arguments.rounds, clock)
    of_forms = {form.name: least[form.name] for form in forms}
    best = min(of_forms, key=of_forms.__getitem__)
    chosen = choose(forms, convolution_of(op)).name
    cells = " ".join(f"{name}: {seconds * 1e3:.2f}," for name, seconds in of_forms.items())
    geometry = f"{'x'.join(map(str, shape.x))} s{'x'.join(map(str, shape.strides))}"
    ratio = of_forms[chosen] / of_forms[best]
    name = "dx" if op_type == "ConvInputGrad" else "dw"
    cost = f"{least['PyTorch'] * 1e3:.2f}"
    parts = (f"{shape.name} {geometry}", batch, name, cells[:-1], best, chosen, f"{ratio:.2f}", cost)
    print(f"| {' | '.join(map(str, parts))} |", flush=True)
    convolution = convolution_of(op)
    return [Measurement(form.name, form.work(convolution, batch), least[form.name]) for form in forms]


def fitted(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Nanoseconds per unit, none negative, by least squares of the relative errors."""
    units = sorted({unit for measurement in measurements for unit in measurement.work})
    amounts = np.array([[measurement.work.get(unit, 0) / measurement.seconds for unit in units] for measurement in measurements])
    scale = np.abs(amounts).max(axis=0)
    active = list(range(len(units)))
    while active:
        solution = np.linalg.lstsq(amounts[:, active] / scale[active], np.ones(len(measurements)), rcond=None)[0]
        if (solution >= 0).all():
            break
        active.pop(int(solution.argmin()))
    times = dict.fromkeys(units, 0.0)
    times.update({units[index]: float(value / scale[index] * 1e9) for index, value in zip(active, solution, strict=True)})
    return times


def print_fit(measurements: Sequence[Measurement]) -> None:
    """The numbers of the model, and how well they foretell what was measured."""
    for form in NANOSECONDS:
        of_form = [measurement for measurement in measurements if measurement.form == form]
        if not of_form:
            continue
        times = fitted(of_form)
        ratios = [sum(times[unit] * amount for unit, amount in item.work.items()) / item.seconds / 1e9 for item in of_form]
        numbers = ", ".join(f'"{unit}": {float(f"{value:.3g}")}' for unit, value in times.items())
        print(f'        "{form}": {{{numbers}}},')
        print(
            f"        # foretold / measured: {np.percentile(ratios, 10):.2f} to {np.percentile(ratios, 90):.2f} in eight of ten"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="shapes whose names contain one of these, with commas between")
    parser.add_argument("--of", choices=GRADIENTS, help="one of the two gradients")
    parser.add_argument("--static", action="store_true", help="compile for the batch in place of a symbolic one")
    parser.add_argument("--fit", action="store_true", help="print the numbers that the choice goes by")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    parts = arguments.only.split(",")
    measurements = []
    print("| convolution | batch | of | forms, ms | best | chosen | chosen / best | PyTorch, ms |\n" + "|---" * 8 + "|")
    for shape in (shape for shape in SHAPES if any(part in shape.name for part in parts)):
        for batch in arguments.batch:
            for op_type in (arguments.of,) if arguments.of else GRADIENTS:
                measurements += compare(shape, op_type, batch, arguments)
    if arguments.fit:
        print_fit(measurements)


if __name__ == "__main__":
    main()
