"""Gradient transforms before an optimizer, against PyTorch's clipping and closed forms."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish import optim, surgery
from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.graph import zeros_like
from burnish.optim import ParameterInfo, ParameterKind
from oracles.optimizers import (
    LR,
    SHAPES,
    STEPS,
    UpdateGraph,
    assert_same_history,
    parabola,
    random_problem,
    rosenbrock,
    run_random_problem,
)

SGD: dict[str, Any] = {"lr": LR, "momentum": 0.9}
TRANSFORMS = [
    optim.clip_by_global_norm(0.5),
    optim.clip_by_norm(0.5),
    optim.clip_by_value(0.125),
    optim.add_decayed_weights(0.05),
    optim.add_decayed_weights(0.05, on=("weight", "sc*")),
    optim.centralize(),
]
every_transform = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: str(transform.options()))


def infos(**kinds: ParameterKind) -> dict[str, ParameterInfo]:
    """What the parameters of ``random_problem`` might be."""
    known = {"weight": ParameterKind.WEIGHT, "bias": ParameterKind.BIAS, "scale": ParameterKind.NORMALIZATION} | kinds
    axes = {"weight": (0,)}
    return {
        name: ParameterInfo(name, shape, ir.DataType.DOUBLE, known[name], 1, axes.get(name, ())) for name, shape in SHAPES.items()
    }


def clip_together(parameters: list[torch.Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)


def clip_each(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        torch.nn.utils.clip_grad_norm_([parameter], 0.5)


def clip_elements(parameters: list[torch.Tensor]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 0.125)


def decay_all(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad += 0.05 * parameter.detach()


def decay_the_first(parameters: list[torch.Tensor]) -> None:
    parameters[0].grad += 0.05 * parameters[0].detach()


def centralize_the_first(parameters: list[torch.Tensor]) -> None:
    parameters[0].grad -= parameters[0].grad.mean(dim=0, keepdim=True)


def several(parameters: list[torch.Tensor]) -> None:
    clip_elements(parameters)
    decay_all(parameters)
    clip_together(parameters)


CASES: list[tuple[tuple[optim.GradientTransform, ...], Callable[[list[torch.Tensor]], None]]] = [
    ((optim.clip_by_global_norm(0.5),), clip_together),
    ((optim.clip_by_norm(0.5),), clip_each),
    ((optim.clip_by_value(0.125),), clip_elements),
    ((optim.add_decayed_weights(0.05),), decay_all),
    ((optim.add_decayed_weights(0.05, on="weights"),), decay_the_first),
    ((optim.add_decayed_weights(0.05, on=["w*"]),), decay_the_first),
    ((optim.centralize(),), centralize_the_first),
    ((optim.clip_by_value(0.125), optim.add_decayed_weights(0.05), optim.clip_by_global_norm(0.5)), several),
]


@pytest.mark.parametrize("make", ["sgd", "adamw"])
@pytest.mark.parametrize(("transforms", "by_hand"), CASES, ids=[case[1].__name__ + str(i) for i, case in enumerate(CASES)])
def test_a_chain_matches_torch_in_float64(
    transforms: tuple[optim.GradientTransform, ...], by_hand: Callable[[list[torch.Tensor]], None], make: str
) -> None:
    initial, gradients = random_problem("float64")
    theirs = {name: torch.from_numpy(array.copy()).requires_grad_() for name, array in initial.items()}
    reference = (
        torch.optim.SGD(list(theirs.values()), **SGD) if make == "sgd" else torch.optim.AdamW(list(theirs.values()), lr=LR)
    )
    expected = []
    for step_gradients in gradients:
        for name, parameter in theirs.items():
            parameter.grad = torch.from_numpy(step_gradients[name].copy())
        by_hand(list(theirs.values()))
        reference.step()
        expected.append({f"param/{name}": parameter.detach().numpy().copy() for name, parameter in theirs.items()})
    optimizer = optim.bind(optim.chain(*transforms, optim.sgd(**SGD) if make == "sgd" else optim.adamw(lr=LR)), infos())
    assert_same_history(run_random_problem(optimizer, "float64"), expected, rtol=1e-10, atol=1e-12)


@every_transform
def test_a_chain_keeps_dtypes_and_runs_in_float32(transform: optim.GradientTransform) -> None:
    optimizer = optim.bind(optim.chain(transform, optim.sgd(**SGD)), infos())
    graphs = UpdateGraph(optimizer, SHAPES, "float32", dtypes={"bias": "float64"})
    graphs.apply.check()
    for name, tensor in graphs.next_params.items():
        assert tensor.dtype.numpy() == np.dtype("float64" if name == "bias" else "float32")
        assert tensor.shape == graphs.apply[f"param/{name}"].shape
    rough = run_random_problem(optimizer, "float32")[-1]
    exact = run_random_problem(optimizer, "float64")[-1]
    for name in SHAPES:
        np.testing.assert_allclose(rough[f"param/{name}"], exact[f"param/{name}"], rtol=2e-5, atol=2e-5)


@every_transform
def test_a_chain_goes_through_its_options(transform: optim.GradientTransform) -> None:
    optimizer = optim.chain(optim.clip_by_value(1.0), transform, optim.adam(lr=optim.schedules.cosine(1e-3, 100)))
    assert optim.get(json.loads(json.dumps(optimizer.options()))) == optimizer
    assert isinstance(optimizer, optim.Optimizer)
    assert isinstance(transform, optim.GradientTransform)
    assert optimizer.hyperparameters() == {}
    assert optimizer.end == optimizer.optimizer.end


def test_a_huge_gradient_has_a_finite_norm_in_float32() -> None:
    graphs = UpdateGraph(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(lr=1.0)), {"w": (2,)}, "float32")
    result = graphs.apply.run(
        **{"param/w": np.zeros(2, "float32"), "grad:w": np.array([3e30, -4e30], "float32")}, lr=np.float32(1), step=np.int64(0)
    )
    np.testing.assert_allclose(result["next:param/w"], [-0.6, 0.8], rtol=1e-6)


@pytest.mark.slow
def test_chains_find_their_way_down() -> None:
    chains = [
        optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(lr=0.05, momentum=0.5)),
        optim.chain(optim.clip_by_value(1.0), optim.clip_by_norm(1.0), optim.adam(lr=0.1)),
    ]
    for optimizer in chains:
        np.testing.assert_allclose(parabola(optimizer, 900), 0, atol=1e-6)
    assert rosenbrock(optim.chain(optim.clip_by_global_norm(10.0), optim.adam(lr=0.02)), 4000) < 1e-4


class Counting:
    """A transform with state of both kinds: gradients and steps seen."""

    name = "counting"

    def init(self, builder, params):
        return {f"seen/{name}": zeros_like(parameter) for name, parameter in params.items()} | {
            "steps": builder.constant(np.asarray(0, np.int64))
        }

    def transform(self, inputs):
        gradients, state = inputs.gradients, inputs.state
        assert set(state) == {"steps", *(f"seen/{name}" for name in inputs.params)}
        return dict(gradients), {f"seen/{name}": state[f"seen/{name}"] + g for name, g in gradients.items()} | {
            "steps": state["steps"] + 1
        }

    def options(self):
        return {"name": self.name}


def test_parts_of_a_chain_keep_their_state_apart() -> None:
    optimizer = optim.chain(
        Counting(), optim.clip_by_value(0.5), Counting(), optim.ema(optim.chain(Counting(), optim.sgd(**SGD)))
    )
    _, gradients = random_problem("float64")
    last = run_random_problem(optimizer, "float64")[-1]
    slots = {key.removeprefix("opt/").partition("/")[0] for key in last if key.startswith("opt/")}
    counting = {f"{slot}:counting:{place}" for slot in ("seen", "steps") for place in (1, 2, 4)}
    assert slots == counting | {"momentum", "average", "average_count"}
    whole = sum(step_gradients["bias"] for step_gradients in gradients)
    clipped = sum(np.clip(step_gradients["bias"], -0.5, 0.5) for step_gradients in gradients)
    np.testing.assert_allclose(last["opt/seen:counting:2/bias"], whole, rtol=1e-12)
    for place in (1, 4):
        np.testing.assert_allclose(last[f"opt/seen:counting:{place}/bias"], clipped, rtol=1e-12)
    assert last["opt/steps:counting:4"] == STEPS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.chain(), r"^chain: the last part must be an optimizer of burnish.optim, such as burnish.optim.sgd\(\)$"),
        (lambda: optim.chain(optim.clip_by_norm(1.0)), "chain: the last part must be an optimizer .*, not ClipByNorm"),
        (lambda: optim.chain(optim.sgd(), optim.sgd()), "chain: before the optimizer come gradient transforms .* comes last"),
        (lambda: optim.chain("clip", optim.sgd()), "chain: before the optimizer .* not 'clip': such as clip_by_norm"),
        (lambda: optim.clip_by_global_norm(0.0), "clip_by_global_norm: max_norm must be a finite number above 0, not 0.0"),
        (lambda: optim.clip_by_norm(float("inf")), "clip_by_norm: max_norm must be a finite number above 0, not inf"),
        (lambda: optim.clip_by_value("1"), "clip_by_value: value must be a finite number above 0, not '1'"),
        (lambda: optim.add_decayed_weights(-1.0), "add_decayed_weights: weight_decay must be a finite number that is not"),
        (lambda: optim.add_decayed_weights(0.1, on="bias"), "on must be 'all', 'weights' or a list of patterns, not 'bias'"),
        (lambda: optim.add_decayed_weights(0.1, on=[1]), r"on must be 'all', 'weights' or a list of patterns, not \(1,\)"),
        (lambda: optim.get("chain"), r"optimizer 'chain' goes around another one: give the object, burnish.optim.chain"),
        (lambda: optim.get({"name": "chain"}), r"optimizer 'chain' needs the option 'transforms': give it"),
        (
            lambda: optim.get({"name": "chain", "transforms": [{"name": "clip"}], "optimizer": {"name": "sgd"}}),
            "there is no gradient transform 'clip'; choose among add_decayed_weights",
        ),
        (
            lambda: optim.get({"name": "chain", "transforms": [{"name": "clip_by_norm"}], "optimizer": {"name": "sgd"}}),
            "gradient transform 'clip_by_norm' needs the option 'max_norm': give it",
        ),
        (
            lambda: optim.bind(optim.chain(optim.add_decayed_weights(0.1, on=["weigth"]), optim.sgd()), infos()),
            "add_decayed_weights: the pattern 'weigth' matches no parameter that trains; did you mean 'weight'",
        ),
        (
            lambda: UpdateGraph(optim.chain(optim.centralize(), optim.sgd()), {"w": (2,)}, "float32"),
            "centralize: which axes an output sums over is not known yet: call burnish.optim.bind",
        ),
        (
            lambda: UpdateGraph(optim.chain(optim.add_decayed_weights(0.1, on="weights"), optim.sgd()), {"w": (2,)}, "float32"),
            "add_decayed_weights: what 'w' is for is not known, and decay on 'weights' goes by that: call burnish.optim.bind",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def two_layers(source: Callable[[onnx.ModelProto], Any] = lambda model: model) -> Any:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 8] x) => (float[N, 4] logits) {
            h = Gemm <transB = 1> (x, first) t = Tanh (h) logits = Gemm <transB = 1> (t, second)
        }""")
    rng = np.random.default_rng(0)
    for layer, shape in (("first", (6, 8)), ("second", (4, 6))):
        node, name = next(node for node in model.graph.node if layer in node.input), f"{layer}.weight"
        node.input[1] = name
        model.graph.initializer.append(onnx.numpy_helper.from_array((rng.normal(size=shape) * 0.4).astype(np.float32), name))
    return source(model)


ALTERED: dict[str, tuple[Callable[[onnx.ModelProto], Any], dict[str, int]]] = {
    "as it is": (lambda model: model, {"first.weight": 1}),
    "quantized": (lambda model: surgery.quantize(model, activations=None, scales="fixed"), {"first.weight": 1}),
    "learned scales": (lambda model: surgery.quantize(model, activations=None), {"first.weight": 1}),
    "direction and length": (surgery.weight_normalize, {"first.weight_v": 1, "second.weight_v": 1}),
    "lora": (lambda model: surgery.lora(model, rank=2, alpha=6), {"first.lora_A.weight": 0, "first.lora_B.weight": 0}),
    "dora": (
        lambda model: surgery.lora(model, rank=2, alpha=6, variant="dora"),
        {"first.lora_A.weight": 0, "second.lora_B.weight": 0},
    ),
    "pruned": (lambda model: surgery.prune(model, 0.5), {"first.weight": 1, "second.weight": 1}),
    "pruned by a schedule": (lambda model: surgery.prune(model, 0.5, end=3), {"first.weight": 1, "second.weight": 1}),
}


@pytest.mark.parametrize("name", ALTERED)
def test_the_sum_over_the_inputs_keeps_its_value_whatever_a_weight_goes_through(name: str) -> None:
    """By plain steps of SGD: 0 in place of a drift as large as the weights move."""
    source, axes = ALTERED[name]
    batch = {"x": np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32), "labels": np.arange(16) % 4}
    moved: dict[bool, dict[str, np.ndarray]] = {}
    for centred in (True, False):
        plain = optim.sgd(lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ObjectiveWarning)
            program = burnish.compile(two_layers(source), optimizer=optim.chain(optim.centralize(), plain) if centred else plain)
        session = burnish.Session(program, engine="onnxruntime")
        session.step(batch)  # of an adapter the first step moves B alone
        before = session.state()
        session.step(batch)
        after = session.state()
        moved[centred] = {parameter: after[f"param/{parameter}"] - before[f"param/{parameter}"] for parameter in axes}
    for parameter, axis in axes.items():
        change = moved[True][parameter]
        assert np.abs(change).max() > 0
        assert np.abs(change.sum(axis)).max() < 1e-5 * np.abs(change).max() + 1e-6, parameter
        assert np.abs(moved[False][parameter].sum(axis)).max() > 1e-3 * np.abs(moved[False][parameter]).max()


def test_what_is_masked_stays_zero_and_has_no_part_in_the_mean() -> None:
    """Beside the same step by hand: the mean of the gradient over the weights that are kept."""
    batch = {"x": np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32), "labels": np.arange(16) % 4}
    pruned = two_layers(lambda model: surgery.prune(model, 0.5))
    states = {}
    for name, optimizer in {"plain": optim.sgd(lr=0.1), "centred": optim.chain(optim.centralize(), optim.sgd(lr=0.1))}.items():
        session = burnish.Session(burnish.compile(pruned, optimizer=optimizer), engine="reference")
        start = session.state()
        session.step(batch)
        states[name] = session.state()
    for name in ("first.weight", "second.weight"):
        mask, before = start[f"stat/{name}_mask"], start[f"param/{name}"]
        gradient = (before - states["plain"][f"param/{name}"]) / np.float32(0.1)
        mean = gradient.sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        expected = before - 0.1 * mask * (gradient - mean)
        np.testing.assert_allclose(states["centred"][f"param/{name}"], expected, rtol=1e-5, atol=1e-6)
        assert not states["centred"][f"param/{name}"][mask == 0].any()


def test_a_weight_whose_inputs_are_not_known_is_named() -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 8] x) => (float[N, 4] logits) <int64[3] three = {1, 6, 8}, int64[1] one = {1}, int64[1] two = {2}> {
            u = Unsqueeze (x, one) w = Reshape (odd, three) p = Mul (u, w) h = ReduceSum <keepdims = 0> (p, two)
            logits = MatMul (h, head)
        }""")
    for name, shape in (("odd", (8, 6)), ("head", (6, 4))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    optimizer = optim.chain(optim.centralize(), optim.sgd())
    with pytest.warns(
        ObjectiveWarning, match="centralize leaves the gradient of 'odd' as it is: .* Freeze such weights, or leave"
    ) as said:
        program = burnish.compile(model, optimizer=optimizer, trainable=["odd", "head"])
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        burnish.compile(
            model,
            optimizer=optim.chain(optim.centralize(), optim.groups(optim.sgd(), {"odd": "frozen"})),
            trainable=["odd", "head"],
        )
        plain = burnish.compile(model, optimizer="sgd", trainable=["odd", "head"])
    with pytest.warns(ObjectiveWarning, match="centralize leaves the gradient of 'odd'"):
        plain.with_optimizer(optimizer)
    assert program.signature["step"]


OPTIONS_OF_NOTHING: dict[str, tuple[Callable[[], optim.Optimizer], list[str] | None]] = {
    "centralize: it acts on none of the parameters that train": (
        lambda: optim.chain(optim.centralize(), optim.sgd()),
        ["b1", "b2"],
    ),
    "add_decayed_weights: weight_decay acts on none of the parameters that train: on='weights' leaves biases": (
        lambda: optim.chain(optim.add_decayed_weights(0.1, on="weights"), optim.sgd()),
        ["b1", "b2"],
    ),
    "groups: weight_decay acts on none of the parameters that train: decay='weights' leaves biases": (
        lambda: optim.groups(optim.sgd(weight_decay=0.1), decay="weights"),
        ["b1", "b2"],
    ),
    "layerwise_decay: it changes no rate: all parameters that train are those of the last layer": (
        lambda: optim.layerwise_decay(optim.sgd(), 0.5),
        ["w2", "b2"],
    ),
    "groups: 'w1' holds for no parameter: patterns after it match all that it matches": (
        lambda: optim.groups(optim.sgd(), {"w1": {"lr": 0.5}, "w*": {"lr_scale": 0.1}}),
        None,
    ),
    "groups: decay='weights' changes nothing without weight_decay: give both, or neither": (
        lambda: optim.groups(optim.sgd(), decay="weights"),
        None,
    ),
    "sgd: dampening changes nothing without momentum: give both, or neither": (lambda: optim.sgd(dampening=0.5), None),
    "nadam: decoupled_weight_decay changes nothing without weight_decay": (
        lambda: optim.ema(optim.groups(optim.nadam(decoupled_weight_decay=True), {"w1": {"lr": 0.1}})),
        None,
    ),
}


@pytest.mark.parametrize("message", OPTIONS_OF_NOTHING)
def test_an_option_that_changes_nothing_is_named(message: str) -> None:
    make, trainable = OPTIONS_OF_NOTHING[message]
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]> g (float[N, 8] x) => (float[N, 4] logits) {
            h = Gemm (x, w1, b1) t = Tanh (h) logits = Gemm (t, w2, b2) }""")
    for name, shape in {"w1": (8, 6), "b1": (6,), "w2": (6, 4), "b2": (4,)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    with pytest.warns(ObjectiveWarning, match=message) as said:
        burnish.compile(model, optimizer=make(), trainable=trainable)
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        plain = burnish.compile(model, trainable=trainable)
        if trainable is not None:
            burnish.compile(model, optimizer=make())
    with pytest.warns(ObjectiveWarning, match=message):
        plain.with_optimizer(make())


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.groups(optim.sgd(dampening=0.5), {"w1": {"momentum": 0.9}}),
        optim.groups(optim.radam(decoupled_weight_decay=True), {"w1": {"weight_decay": 0.1}}, decay="weights"),
    ],
)
def test_an_option_that_a_group_alone_reads_is_no_matter(optimizer: optim.Optimizer) -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 8] x) => (float[N, 4] logits) { h = MatMul (x, w1) logits = MatMul (h, w2) }""")
    for name, shape in {"w1": (8, 6), "w2": (6, 4)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        assert burnish.compile(model, optimizer=optimizer).step is not None
