"""A training program written by hand: logistic regression on centred inputs, SGD with momentum.

It has one state entry of each role and is independent of ``burnish.compile``: its gradients are the closed form.
``numpy_step`` is the same step in numpy.

    training: z = scale * (x - mean over the batch) @ weight + bias, evaluation: the running mean in place of the batch's
    loss = mean(-log softmax(z)[label]),  dz = (softmax(z) - onehot(label)) / N
    velocity' = momentum * velocity + gradient,  parameter' = parameter - lr * velocity'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.graph import Builder, Tensor
from burnish.program import Entry, GraphSignature, Program, Role, Signature

FEATURES, CLASSES = 4, 3
MOMENTUM, RETENTION, LR = 0.9, 0.8, 0.1
TRAINED = ("weight", "bias")

Outputs = dict[str, tuple[Tensor, Role, str | None]]


def tiny_program(dtype: ir.DataType = ir.DataType.FLOAT, seed: int = 3) -> Program:
    """Build the program; ``dtype`` is that of every floating-point value."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (FEATURES, CLASSES), "bias": (CLASSES,)}
    data = Entry("x", Role.DATA, dtype, ("batch", FEATURES))
    label = Entry("labels", Role.LABEL, ir.DataType.INT64, ("batch",), minimum=0, maximum=CLASSES - 1)
    parameters = [Entry(f"param/{name}", Role.PARAMETER, dtype, shapes[name]) for name in TRAINED]
    scale = Entry("param/scale", Role.PARAMETER, dtype, (FEATURES,))
    mean = Entry("stat/mean", Role.STATISTIC, dtype, (FEATURES,))
    slots = [Entry(f"opt/momentum/{name}", Role.OPTIMIZER, dtype, shapes[name]) for name in TRAINED]
    key = Entry("rng/key", Role.KEY, ir.DataType.INT64, (2,))
    step = Entry("step", Role.STEP, ir.DataType.INT64, ())
    rate = Entry("lr", Role.HYPERPARAMETER, dtype, (), default=LR)
    gradients = [Entry(f"grad:{name}", Role.GRADIENT, dtype, shapes[name]) for name in TRAINED]

    def init(b: Builder, v: dict[str, Tensor]) -> Outputs:
        outputs: Outputs = {
            slot.name: (b.op("Mul", v[parameter.name], 0.0), slot.role, slot.name)
            for slot, parameter in zip(slots, parameters, strict=True)
        }
        halves = b.op("Concat", b.op("Unsqueeze", v["seed"], b.integers([0])), b.integers([0]), axis=0)
        outputs["rng/key"] = (halves, Role.KEY, "rng/key")
        outputs["step"] = (b.constant(np.asarray(0, np.int64)), Role.STEP, "step")
        return outputs

    def losses(b: Builder, v: dict[str, Tensor], centred: Tensor) -> dict[str, Tensor]:
        logits = b.op("Add", b.op("MatMul", centred * v["param/scale"], v["param/weight"]), v["param/bias"])
        log_probabilities = b.op("LogSoftmax", logits, axis=1)
        is_class = b.op("Equal", b.op("Unsqueeze", v["labels"], b.integers([1])), b.integers(range(CLASSES)))
        hot = b.op("Cast", is_class, to=int(dtype), dtype=dtype)
        losses = -b.op("ReduceSum", log_probabilities * hot, b.integers([1]), keepdims=0)
        right = b.op("Equal", b.op("ArgMax", logits, axis=1, keepdims=0), v["labels"])
        return {
            "logits": logits,
            "probabilities": b.op("Exp", log_probabilities),
            "hot": hot,
            "losses": losses,
            "right": b.op("Cast", right, to=int(dtype), dtype=dtype),
        }

    def mean_of(b: Builder, tensor: Tensor) -> Tensor:
        return b.op("ReduceMean", tensor, keepdims=0, dtype=dtype)

    def grad(b: Builder, v: dict[str, Tensor]) -> Outputs:
        batch_mean = b.op("ReduceMean", v["x"], b.integers([0]), keepdims=0, dtype=dtype, shape=(FEATURES,))
        centred = v["x"] - batch_mean
        t = losses(b, v, centred)
        count = b.op("Cast", b.op("Size", v["labels"]), to=int(dtype), dtype=dtype)
        dz = (t["probabilities"] - t["hot"]) / count
        dw = b.op("MatMul", b.op("Transpose", centred * v["param/scale"], perm=[1, 0]), dz)
        db = b.op("ReduceSum", dz, b.integers([0]), keepdims=0)
        return {
            "loss": (mean_of(b, t["losses"]), Role.LOSS, None),
            "accuracy": (mean_of(b, t["right"]), Role.METRIC, None),
            "next:stat/mean": (v["stat/mean"] * RETENTION + batch_mean * (1 - RETENTION), Role.STATISTIC, "stat/mean"),
            "next:rng/key": (v["rng/key"] + 1, Role.KEY, "rng/key"),
            "grad:weight": (dw, Role.GRADIENT, None),
            "grad:bias": (db, Role.GRADIENT, None),
        }

    def update(b: Builder, v: dict[str, Tensor], flowing: dict[str, Tensor]) -> Outputs:
        outputs: Outputs = {}
        for name in TRAINED:
            velocity = v[f"opt/momentum/{name}"] * MOMENTUM + flowing[name]
            outputs[f"next:param/{name}"] = (v[f"param/{name}"] - v["lr"] * velocity, Role.PARAMETER, f"param/{name}")
            outputs[f"next:opt/momentum/{name}"] = (velocity, Role.OPTIMIZER, f"opt/momentum/{name}")
        outputs["next:step"] = (v["step"] + 1, Role.STEP, "step")
        return outputs

    def whole_step(b: Builder, v: dict[str, Tensor]) -> Outputs:
        outputs = grad(b, v)
        flowing = {name: outputs.pop(f"grad:{name}")[0] for name in TRAINED}
        return {**outputs, **update(b, v, flowing)}

    def apply(b: Builder, v: dict[str, Tensor]) -> Outputs:
        return update(b, v, {name: v[f"grad:{name}"] for name in TRAINED})

    def evaluate(b: Builder, v: dict[str, Tensor]) -> Outputs:
        t = losses(b, v, v["x"] - v["stat/mean"])
        count = b.op("Cast", b.op("Size", v["labels"]), to=int(dtype), dtype=dtype)
        outputs: Outputs = {
            "loss": (mean_of(b, t["losses"]), Role.LOSS, None),
            "accuracy": (mean_of(b, t["right"]), Role.METRIC, None),
        }
        for name, samples in (("loss", t["losses"]), ("accuracy", t["right"])):
            outputs[f"sum:{name}"] = (b.op("ReduceSum", samples, keepdims=0, dtype=dtype), Role.METRIC, None)
            outputs[f"count:{name}"] = (b.op("Identity", count), Role.METRIC, None)
        return outputs

    def predict(b: Builder, v: dict[str, Tensor]) -> Outputs:
        centred = (v["x"] - v["stat/mean"]) * v["param/scale"]
        logits = b.op("Add", b.op("MatMul", centred, v["param/weight"]), v["param/bias"])
        return {"logits": (logits, Role.OUTPUT, None)}

    model = [data, *parameters, scale, mean]
    plans: dict[str, tuple[Sequence[Entry], Callable[[Builder, dict[str, Tensor]], Outputs]]] = {
        "init": ([Entry("seed", Role.SEED, ir.DataType.INT64, ()), *parameters], init),
        "step": ([*model, label, key, *slots, step, rate], whole_step),
        "grad": ([*model, label, key], grad),
        "apply": ([*parameters, *gradients, *slots, step, rate], apply),
        "evaluate": ([*model, label], evaluate),
        "predict": (model, predict),
    }
    models, signatures = {}, {}
    for name, (inputs, build) in plans.items():
        models[name], signatures[name] = _graph(name, inputs, build)
    rng = np.random.default_rng(seed)
    weights = {
        "param/weight": rng.normal(size=shapes["weight"]).astype(dtype.numpy()),
        "param/bias": rng.normal(size=shapes["bias"]).astype(dtype.numpy()),
        "param/scale": rng.uniform(0.5, 1.5, FEATURES).astype(dtype.numpy()),
        "stat/mean": np.zeros(FEATURES, dtype.numpy()),
    }
    options = {"loss": "cross_entropy", "lr": LR}
    return Program(LoweredGraphs.read(models, Signature(signatures), options), weights)


def _graph(
    name: str, inputs: Sequence[Entry], build: Callable[[Builder, dict[str, Tensor]], Outputs]
) -> tuple[ir.Model, GraphSignature]:
    values = [ir.Value(name=entry.name, type=ir.TensorType(entry.dtype), shape=ir.Shape(entry.shape)) for entry in inputs]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name=name)
    builder = Builder(graph)
    outputs = build(builder, {entry.name: builder.tensor(value) for entry, value in zip(inputs, values, strict=True)})
    entries = []
    for output, (tensor, role, updates) in outputs.items():
        tensor.value.name = output
        graph.outputs.append(tensor.value)
        dims = () if tensor.shape is None else tensor.shape.dims
        shape = tuple(extent if isinstance(extent, int) else extent.value for extent in dims)
        entries.append(Entry(output, role, tensor.dtype, shape, updates=updates))
    return ir.Model(graph, ir_version=10), GraphSignature(tuple(inputs), tuple(entries))


def tiny_batch(size: int = 8, seed: int = 0, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Samples of three overlapping clusters."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size)
    centres = np.random.default_rng(99).normal(size=(CLASSES, FEATURES))
    return {"x": (centres[labels] + rng.normal(size=(size, FEATURES))).astype(dtype), "labels": labels.astype(np.int64)}


def numpy_step(state: dict[str, np.ndarray], batch: dict[str, np.ndarray], lr: float = LR) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the next state, in float64."""
    s = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in state.items()}
    x, labels = batch["x"].astype(np.float64), batch["labels"]
    centred = (x - x.mean(0)) * s["param/scale"]
    z = centred @ s["param/weight"] + s["param/bias"]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dz = (p - np.eye(CLASSES)[labels]) / len(labels)
    following = dict(s)
    for name, gradient in (("weight", centred.T @ dz), ("bias", dz.sum(0))):
        following[f"opt/momentum/{name}"] = MOMENTUM * s[f"opt/momentum/{name}"] + gradient
        following[f"param/{name}"] = s[f"param/{name}"] - lr * following[f"opt/momentum/{name}"]
    following["stat/mean"] = RETENTION * s["stat/mean"] + (1 - RETENTION) * x.mean(0)
    following["rng/key"] = s["rng/key"] + 1
    following["step"] = s["step"] + 1
    return float(-np.log(p[np.arange(len(labels)), labels]).mean()), following
