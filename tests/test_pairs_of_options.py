"""Pairs of options: each optimizer with each kind of parameter, precision, engine and number of workers, beside the reference.

What comes out is *right* where it is, up to the rounding of the precision, what the reference engine makes of the same program in
float32 with one worker; *refused* where an error of burnish's says why; and *wrong* where it is anything else, or where an option
changes no bit within four steps and nothing says so. ``python tests/test_pairs_of_options.py --minutes 10`` prints all three.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import burnish
from burnish import optim, surgery
from burnish.distributed import ArrayCommunicator
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import BurnishError
from burnish.optim import schedules
from oracles import layers_in_bodies
from oracles.combinations import covering
from oracles.several_workers import in_threads, part_of

STEPS, SAMPLES, RATE = 4, 12, 0.1
SPLITS = [[7, 5], [5, 7], [11, 1], [6, 6]]
State = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """A model with a kind of parameter in it.

    Attributes:
        source: makes the model, of numbers of a dtype.
        options: of ``burnish.compile``.
        kind_of_data: ``x``, ``ids``, or one of ``layers_in_bodies``.
        is_rounded: whether a number that is rounded may fall on either side.
    """

    source: Callable[[type], Any]
    options: Mapping[str, Any]
    kind_of_data: str = "x"
    is_rounded: bool = False


def parsed(text: str, dtype: type, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """A model whose weights are drawn; of a batch normalization's statistics, ones and zeros."""
    text = text if dtype is np.float32 else re.sub(r"\bfloat\b", "double", text)
    model, rng = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}'), np.random.default_rng(0)
    for name, shape in shapes.items():
        if name in ("gain", "var", "mean"):
            array = np.full(shape, name != "mean")
        else:
            array = rng.normal(size=shape) * (0.1 if len(shape) == 1 else 0.4)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), name))
    return model


def dense(dtype: type) -> onnx.ModelProto:
    return parsed(
        """g (float[N, 8] x) => (float[N, 4] logits) {
            h = Gemm <transB = 1> (x, w1, b1) t = Tanh (h) u = Gemm <transB = 1> (t, w2, b2) v = Tanh (u)
            logits = Gemm <transB = 1> (v, w3, b3)
        }""",
        dtype,
        w1=(8, 8), b1=(8,), w2=(8, 8), b2=(8,), w3=(4, 8), b3=(4,),
    )  # fmt: skip


def dropping(dtype: type) -> onnx.ModelProto:
    return parsed(
        """g (float[N, 8] x) => (float[N, 4] logits) <float ratio = {0.25}> {
            h = Gemm <transB = 1> (x, w1, b1) t = Tanh (h) d = Dropout (t, ratio) logits = Gemm <transB = 1> (d, w3, b3)
        }""",
        dtype,
        w1=(8, 8), b1=(8,), w3=(4, 8), b3=(4,),
    )  # fmt: skip


def convolutional(dtype: type) -> onnx.ModelProto:
    return parsed(
        """g (float[N, 8] x) => (float[N, 4] logits) <int64[4] image = {0, 2, 2, 2}> {
            i = Reshape (x, image) c = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (i, kernel)
            n = BatchNormalization (c, gain, shift, mean, var) r = Tanh (n) f = Flatten (r) logits = MatMul (f, head)
        }""",
        dtype,
        kernel=(4, 2, 3, 3), gain=(4,), shift=(4,), mean=(4,), var=(4,), head=(16, 4),
    )  # fmt: skip


def recurrent(dtype: type) -> onnx.ModelProto:
    return parsed(
        """g (float[N, 8] x) => (float[N, 4] logits) <int64[3] steps = {0, 4, 2}, int64[1] first = {0}> {
            i = Reshape (x, steps) s = Transpose <perm = [1, 0, 2]> (i)
            y, last = LSTM <hidden_size = 4> (s, input, hidden, bias) h = Squeeze (last, first) logits = MatMul (h, head)
        }""",
        dtype,
        input=(1, 16, 2), hidden=(1, 16, 4), bias=(1, 32), head=(4, 4),
    )  # fmt: skip


def embedded(dtype: type, tied: bool) -> onnx.ModelProto:
    end = "t = Transpose <perm = [1, 0]> (table) logits = MatMul (m, t)" if tied else "logits = MatMul (m, head)"
    shapes = {"table": (9, 8), "middle": (8, 8)} | ({} if tied else {"head": (8, 9)})
    return parsed(
        f"""g (int64[N, 3] ids) => (float[N, 9] logits) <int64[1] one = {{1}}> {{
            e = Gather (table, ids) s = ReduceMean <keepdims = 0> (e, one) k = MatMul (s, middle) m = Tanh (k) {end}
        }}""",
        dtype,
        **shapes,
    )


def calibration() -> list[dict[str, np.ndarray]]:
    return [batch("x", 0)]


KINDS: dict[str, Kind] = {
    "dense": Kind(dense, {}),
    "some trained": Kind(dense, {"trainable": ["w2", "w3", "b3"]}),
    "cached features": Kind(dense, {"trainable": ["w2", "b2", "w3", "b3"], "cached_features": "auto"}),
    "masked": Kind(lambda dtype: surgery.prune(dense(dtype), 0.5), {}),
    "masked by a schedule": Kind(lambda dtype: surgery.prune(dense(dtype), 0.5, end=3), {}, is_rounded=True),
    "lora": Kind(lambda dtype: surgery.lora(dense(dtype), rank=2, alpha=6, seed=1), {}),
    "dora": Kind(lambda dtype: surgery.lora(dense(dtype), rank=2, variant="dora", seed=1), {}),
    "ia3": Kind(lambda dtype: surgery.lora(dense(dtype), variant="ia3"), {}),
    "weights quantized": Kind(lambda dtype: surgery.quantize(dense(dtype), activations=None), {}, is_rounded=True),
    "all quantized": Kind(lambda dtype: surgery.quantize(dense(dtype), calibration=calibration()), {}, is_rounded=True),
    "observed ranges": Kind(
        lambda dtype: surgery.quantize(dense(dtype), calibration=calibration(), scales="observed"), {}, is_rounded=True
    ),
    "direction and length": Kind(lambda dtype: surgery.weight_normalize(dense(dtype)), {}),
    "tied": Kind(lambda dtype: embedded(dtype, True), {}, "ids"),
    "sparse rows": Kind(lambda dtype: embedded(dtype, False), {"sparse": ["table"]}, "ids"),
    "held rows": Kind(lambda dtype: embedded(dtype, False), {"hold_rows": {"table": [0]}}, "ids"),
    "dropout": Kind(dropping, {}),
    "batch normalization": Kind(convolutional, {}),
    "frozen normalization": Kind(convolutional, {"norm": "frozen"}),
    "recurrent": Kind(recurrent, {}),
    "in branches": Kind(lambda dtype: layers_in_bodies.model("branches", dtype), {}, "branches"),
    "in a scan": Kind(lambda dtype: layers_in_bodies.model("scanned", dtype), {}, "scanned"),
    "quantized in branches": Kind(
        lambda dtype: surgery.quantize(layers_in_bodies.model("branches", dtype), activations=None),
        {},
        "branches",
        is_rounded=True,
    ),
    "masked in a scan": Kind(lambda dtype: surgery.prune(layers_in_bodies.model("scanned", dtype), 0.5), {}, "scanned"),
    "lora in a scan": Kind(lambda dtype: surgery.lora(layers_in_bodies.model("scanned", dtype), rank=2, seed=1), {}, "scanned"),
}

TRANSFORMS: dict[str, Callable[[Sequence[str]], optim.Optimizer]] = {
    "sgd": lambda names: optim.sgd(lr=RATE),
    "momentum": lambda names: optim.sgd(lr=RATE, momentum=0.9, nesterov=True),
    "adam": lambda names: optim.adam(lr=RATE / 10, eps=1e-3),
    "no decay of biases": lambda names: optim.groups(optim.sgd(lr=RATE, weight_decay=0.1), decay="weights"),
    "muon": lambda names: optim.muon(lr=RATE / 10),
    "lars": lambda names: optim.lars(lr=RATE),
    "centralize": lambda names: optim.chain(optim.centralize(), optim.sgd(lr=RATE)),
    "clip by global norm": lambda names: optim.chain(optim.clip_by_global_norm(0.05), optim.sgd(lr=RATE)),
    "clip by norm": lambda names: optim.chain(optim.clip_by_norm(0.01), optim.sgd(lr=RATE)),
    "clip by value": lambda names: optim.chain(optim.clip_by_value(0.005), optim.sgd(lr=RATE)),
    "decayed weights": lambda names: optim.chain(optim.add_decayed_weights(0.1), optim.sgd(lr=RATE)),
    "accumulate": lambda names: optim.accumulate(optim.sgd(lr=RATE), 2),
    "clipped and accumulated": lambda names: optim.chain(
        optim.clip_by_global_norm(0.05), optim.accumulate(optim.sgd(lr=RATE), 2)
    ),
    "ema": lambda names: optim.ema(optim.sgd(lr=RATE / 2), 0.9),
    "rate of a group": lambda names: optim.groups(optim.sgd(lr=RATE), {names[0]: {"lr": RATE / 4}}),
    "frozen group": lambda names: optim.groups(optim.sgd(lr=RATE), {names[0]: "frozen"}),
    "layerwise decay": lambda names: optim.layerwise_decay(optim.sgd(lr=RATE), 0.5),
    "cosine": lambda names: optim.sgd(lr=schedules.cosine(RATE, 2 * STEPS)),
    "plateau": lambda names: optim.sgd(lr=schedules.plateau(RATE, factor=0.5, patience=0, threshold=0.0, mode="max")),
}
PRECISIONS: dict[str, Any] = {  # float64 is of a file in it, whatever it is compiled for
    "float32": "float32",
    "float64": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float16, fixed scale": burnish.MixedPrecision("float16", loss_scale=64.0),
}
ENGINES: dict[str, Callable[[], Any]] = {
    "kernels": lambda: "onnxruntime",
    "onnxruntime": lambda: OnnxRuntimeEngine(kernels=False),
    "torch": lambda: "torch",
    "reference": lambda: "reference",
}
TOLERANCES = {"float32": 2e-3, "float64": 2e-3, "bfloat16": 0.25, "float16": 0.05, "float16, fixed scale": 0.05}
"""Of what the steps change, in all parameters together."""
ROUNDED = 0.25
"""The same where numbers are rounded on the way, and one that falls on the other side changes what comes after it."""
Row = tuple[str, str, str, str, int]


def batch(kind: str, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    if kind == "x":
        return {"x": rng.normal(size=(SAMPLES, 8)).astype(np.float32), "labels": rng.integers(0, 4, SAMPLES)}
    if kind == "ids":
        return {"ids": rng.integers(0, 9, (SAMPLES, 3)), "labels": rng.integers(0, 9, SAMPLES)}
    return {**layers_in_bodies.batch(kind, SAMPLES), "labels": rng.integers(0, 3, SAMPLES)}


def rows() -> list[Row]:
    """Every pair of values once, and no worker but one on the reference engine, which has no exchanges."""
    options = tuple(map(tuple, (TRANSFORMS, KINDS, PRECISIONS, ENGINES, (1, 2))))
    return covering(*options, together=2, where=lambda *row: row[3:] != ("reference", 2))


@functools.cache
def names_of(kind: str) -> tuple[str, ...]:
    """The parameters that train, the largest first."""
    program = compiled(kind, "sgd", "float32")
    shapes = {entry.name.removeprefix("param/"): entry.extents for entry in program.signature.state}
    return tuple(sorted(program.options["trainable"], key=lambda name: -np.prod(shapes[name])))


@functools.cache
def compiled(kind: str, transform: str, precision: str) -> burnish.Program:
    names = () if transform == "sgd" else names_of(kind)
    model = KINDS[kind]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        options = {"optimizer": TRANSFORMS[transform](names), "precision": PRECISIONS[precision], **model.options}
        program = burnish.compile(model.source(np.float64 if precision == "float64" else np.float32), **options)
    program.told = [str(warning.message) for warning in told]  # type: ignore[attr-defined]
    return program


def given_to(session: burnish.Session, kind: str, step: int, split: Sequence[int] | None, rank: int = 0) -> dict[str, Any]:
    whole = batch(KINDS[kind].kind_of_data, step)
    if split is not None:
        shared = {name: array for name, array in whole.items() if np.ndim(array) == 0}
        whole = part_of({name: array for name, array in whole.items() if name not in shared}, rank, split) | shared
    return session.features.batch(whole) if session.features.names else whole


def followed(
    session: burnish.Session, kind: str, transform: str, split: bool = False, rank: int = 0
) -> tuple[list[float], State]:
    """The losses of some steps, and the state at their end."""
    losses = []
    for step in range(STEPS):
        monitored = {"monitored": 1.0 - 0.1 * step} if transform == "plateau" else {}
        losses.append(session.step(given_to(session, kind, step, SPLITS[step] if split else None, rank), **monitored)["loss"])
    return losses, session.state()


@functools.cache
def expected(kind: str, transform: str) -> tuple[State, list[float], State]:
    """The state before the steps, the losses, and the state after them, of the reference engine in float32."""
    with burnish.Session(compiled(kind, transform, "float32"), engine="reference") as session:
        return session.state(), *followed(session, kind, transform)


def outcome(row: Row) -> tuple[list[float], State]:
    transform, kind, precision, engine, workers = row
    program = compiled(kind, transform, precision)
    if workers == 1:
        with burnish.Session(program, engine=ENGINES[engine](), threads=1) as session:
            return followed(session, kind, transform)

    def work(inside: Any) -> tuple[list[float], State]:
        def gathered(array: np.ndarray) -> np.ndarray:
            return inside.all_gather(torch.from_numpy(array.copy())).numpy()

        arrays = ArrayCommunicator(inside.rank, inside.size, lambda array: gathered(array).sum(0, dtype=array.dtype), gathered)
        parallel = burnish.DataParallel(communicator=inside if engine == "torch" else arrays)
        with burnish.Session(program, engine=ENGINES[engine](), threads=1, parallel=parallel) as session:
            return followed(session, kind, transform, split=True, rank=inside.rank)

    return in_threads(workers, work)[0]


def problem_of(row: Row, losses: Sequence[float], state: State) -> str | None:
    """What is wrong with an outcome; None where nothing is."""
    transform, kind, precision, _, _ = row
    start, wanted_losses, wanted = expected(kind, transform)
    parameters = [name for name in wanted if name.startswith("param/")]
    for name, array in wanted.items():
        if state[name].shape != array.shape:
            return f"'{name}' has shape {state[name].shape}, not {array.shape}"
    if state.get("opt/skipped_steps", 0):
        moved = state["step"] + state["opt/skipped_steps"] != STEPS
        return "steps were skipped, and the count is another" if moved else None
    tolerance = TOLERANCES[precision]
    if KINDS[kind].is_rounded:
        tolerance = max(tolerance, ROUNDED)
    if transform in ("adam", "muon", "lars") and precision not in ("float32", "float64"):
        tolerance *= 2  # they divide by the size of a gradient, however small it is
    change = np.concatenate([(wanted[name] - start[name]).reshape(-1) for name in parameters])
    error = np.concatenate([(state[name] - wanted[name]).reshape(-1) for name in parameters])
    if not np.linalg.norm(error) <= tolerance * np.linalg.norm(change):
        worst = max(parameters, key=lambda name: float(np.abs(state[name] - wanted[name]).max(initial=0)))
        return f"off by {np.linalg.norm(error) / np.linalg.norm(change):.2g} of what the steps change, most in '{worst}'"
    if not np.allclose(losses, wanted_losses, rtol=max(tolerance, 1e-3) / 2):
        return f"the losses are {losses}, not {wanted_losses}"
    return silent_option(kind, transform)


@functools.cache
def silent_option(kind: str, transform: str) -> str | None:
    """Which option changes no bit of anything, where one does not and nothing says so."""
    start, _, state = expected(kind, transform)
    told = compiled(kind, transform, "float32").told  # type: ignore[attr-defined]
    if transform == "sgd":
        return None
    _, _, plain = expected(kind, "sgd")
    trained = [f"param/{name}" for name in names_of(kind)]
    is_of_matrices = transform in ("no decay of biases", "centralize")
    applies = not is_of_matrices or any(state[name].ndim > 1 for name in trained)
    if applies and all(np.array_equal(state[name], plain[name]) for name in trained) and not told:
        return f"{transform} changes nothing"
    if transform == "frozen group" and not np.array_equal(state[trained[0]], start[trained[0]]):
        return f"'{trained[0]}' is frozen, and moved"
    reached = [name for name in trained if state[name].ndim == 2 and min(state[name].shape) > 1 and "table" not in name]
    moved = [name for name in reached if not np.array_equal(plain[name], start[name])]  # as in the branch that is taken
    same = [name for name in moved if np.array_equal(state[name], plain[name])]
    if (
        transform in ("centralize", "clip by norm", "clip by value", "decayed weights", "clip by global norm")
        and same
        and not told
    ):
        return f"{transform} leaves {', '.join(same)} as without it"
    return None


def verdict(row: Row) -> tuple[str, str]:
    """``right``, ``refused`` or ``wrong``, and why."""
    try:
        losses, state = outcome(row)
        problem = problem_of(row, losses, state)
    except BurnishError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    return ("right", "") if problem is None else ("wrong", problem)


@pytest.mark.parametrize(
    "row",
    [
        ("centralize", "masked", "float32", "onnxruntime", 1),
        ("centralize", "lora in a scan", "float32", "torch", 1),
        ("accumulate", "dense", "float16, fixed scale", "onnxruntime", 2),
        ("frozen group", "batch normalization", "float16", "kernels", 1),
        ("adam", "all quantized", "float32", "reference", 1),
        ("plateau", "cached features", "bfloat16", "torch", 1),
        ("clip by global norm", "dropout", "float32", "torch", 2),
    ],
    ids=lambda row: ", ".join(map(str, row)),
)
def test_some_of_the_pairs(row: Row) -> None:
    assert verdict(row) == ("right", "")


@pytest.mark.campaign
def test_every_pair() -> None:
    found = {row: verdict(row) for row in rows()}
    counts = Counter(kind for kind, _ in found.values())
    assert {row: why for row, (kind, why) in found.items() if kind == "wrong"} == {}
    assert counts["refused"] <= 0.1 * len(found), {row: why for row, (kind, why) in found.items() if kind == "refused"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Try every pair of options once.")
    parser.add_argument("--minutes", type=float, default=45, help="stop after this long")
    parser.add_argument("--first", type=int, default=0, help="of the rows, where to begin")
    arguments = parser.parse_args()
    begin, counts, every = time.monotonic(), Counter[str](), rows()
    warnings.simplefilter("ignore")
    for number, row in enumerate(every[arguments.first :], arguments.first):
        if time.monotonic() - begin > 60 * arguments.minutes:
            break
        kind, why = verdict(row)
        counts[kind] += 1
        if why:
            print(f"{number} {kind}: {', '.join(map(str, row))}: {why[:300]}", flush=True)
    told = ", ".join(f"{kind} {counts[kind]}" for kind in ("right", "refused", "wrong"))
    print(f"{sum(counts.values())} of {len(every)} rows in {time.monotonic() - begin:.0f} s: {told}")


if __name__ == "__main__":
    main()
