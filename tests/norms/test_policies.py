"""Policies of batch normalization: what each computes, against PyTorch; how they are chosen; what they refuse."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish import norms
from burnish.errors import ConfigurationError, InputError, ModelError, ObjectiveWarning
from burnish.program import Role
from oracles.combinations import diagonal, spread
from oracles.normalization_policies import MOMENTUM, batches, frozen, ghost, network, reference, renorm, train
from oracles.standard_operators import STANDARD

RENORM = {"r_max": 1.5, "d_max": 0.6, "start": 1, "r_max_step": 4, "d_max_step": 3}
RENORM_TEXT = "renorm:" + ",".join(f"{name}={value}" for name, value in RENORM.items())
CASES = {
    "train": train,
    "sync": train,
    "ghost:2": lambda ddof: ghost(2, ddof),
    "ghost:6": lambda ddof: ghost(6, ddof),
    "renorm": train,  # up to step 5000
    RENORM_TEXT: lambda ddof: renorm(**RENORM, ddof=ddof),
    "renorm:r_max=1.2,d_max=0.5,start=0,r_max_step=0,d_max_step=0": lambda ddof: renorm(1.2, 0.5, 0, 0, 0, ddof),
    "frozen": lambda ddof: frozen,
}


def close(actual, expected, scale=None, dtype=np.float32):
    """Assert that the error is small against the largest value, of ``scale`` where that is given."""
    tolerance = 3e-6 if dtype is np.float32 else 1e-10
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected if scale is None else scale).max())


class GradRunner:
    """The grad graph of a program, on onnxruntime."""

    def __init__(self, program):
        self.program = program
        serialized = ir.to_proto(program.grad).SerializeToString()
        self.run = onnxruntime.InferenceSession(serialized, providers=["CPUExecutionProvider"])

    def __call__(self, state, batch):
        names = [entry.name for entry in self.program.signature["grad"].inputs]
        values = self.run.run(None, {name: (state | batch)[name] for name in names})
        return dict(zip([entry.name for entry in self.program.signature["grad"].outputs], values, strict=True))


def follow(norm, layers, rank=4, rule="onnx", dtype=np.float64, momentum=None, batch="batch"):
    """Train a few steps and compare loss, every gradient and the running statistics of each with the reference.

    In float32 the error is taken against the largest gradient of all: that of a layer in front of a normalization is a
    difference of larger numbers, and may come to nothing.
    """
    optimizer = burnish.optim.sgd(lr=0.05)
    program = burnish.compile(network(rank, batch, dtype), loss="mse", norm=norm, running_variance=rule, optimizer=optimizer)
    grad, session = GradRunner(program), burnish.Session(program, engine=STANDARD)
    for data in batches(rank, 6, 6, dtype):
        state = session.state()
        loss, gradients, statistics = reference(state, data, layers, momentum(int(state["step"])) if momentum else None)
        largest = np.array([np.abs(gradient).max() for gradient in gradients.values()])
        outputs = grad(state, data)
        close(outputs["loss"], loss, dtype=dtype)
        for name, gradient in gradients.items():
            if f"grad:{name}" in outputs:
                close(outputs[f"grad:{name}"], gradient, largest, dtype)
        session.step(data)
        for name, value in statistics.items():
            close(session.state()[f"stat/{name}"], value, dtype=dtype)
            if f"next:stat/{name}" in outputs:
                np.testing.assert_array_equal(outputs[f"next:stat/{name}"], session.state()[f"stat/{name}"])
    return program


@diagonal(("norm", CASES), (("rank", "rule"), [(2, "onnx"), (3, "onnx"), (4, "pytorch")]), test=2)
def test_a_policy_against_pytorch_in_float64(norm, rank, rule):
    layer = CASES[norm](0 if rule == "onnx" else 1)
    follow(norm, {"bn1": layer, "bn2": layer}, rank, rule)


@spread("norm", CASES, test=2)
def test_a_policy_against_pytorch_in_float32(norm):
    follow(norm, {"bn1": CASES[norm](1), "bn2": CASES[norm](1)}, 4, "pytorch", np.float32)


def test_ghost_with_a_static_batch():
    follow("ghost:3", {"bn1": ghost(3, 0), "bn2": ghost(3, 0)}, batch=6)


def test_layers_by_pattern_each_by_a_policy_of_its_own():
    layers = {"bn1": ghost(2, 0), "bn2": frozen}
    program = follow({"*": "ghost:2", "bn2": "frozen"}, layers, momentum=lambda step: MOMENTUM | {"bn2": 1.0})
    assert program.options["norm"] == {"*": "ghost:2", "bn2": "frozen"}
    assert program.options["norm_layers"] == {"bn1": "ghost:2", "bn2": "frozen"}
    assert set(program.signature["step"].updates) >= {"stat/bn1.running_mean", "stat/bn1.running_var"}
    assert not any(name.startswith("stat/bn2") for name in program.signature["step"].updates)


@pytest.mark.parametrize("policy", [norms.Train, norms.Sync, norms.Renorm])
def test_cumulative_average(policy):
    layers = {"bn1": train(0), "bn2": train(0)}
    momentum = {"bn1": lambda step: 1 - 1 / (step + 1), "bn2": lambda step: 0.5}
    chosen = {"bn1": policy(momentum="cumulative"), "bn2": policy(momentum=0.5)}
    follow(chosen, layers, momentum=lambda step: {name: at(step) for name, at in momentum.items()})


def test_ghost_with_the_cumulative_average():
    layers = {"bn1": ghost(3, 1), "bn2": ghost(3, 1)}
    at = dict.fromkeys(("bn1", "bn2"))
    follow("ghost:3,momentum=cumulative", layers, rule="pytorch", momentum=lambda step: dict.fromkeys(at, 1 - 1 / (step + 1)))


def test_the_default_schedule_of_renorm():
    program = burnish.compile(network(2), loss="mse", norm="renorm")
    grad, state = GradRunner(program), program.initial_state()
    (data,) = batches(2, 1, 6)
    for step in (0, 5_000, 5_001, 15_000, 25_000, 30_000, 40_000, 1_000_000):
        state["step"] = np.asarray(step, np.int64)
        layer = renorm(3, 5, 5_000, 40_000, 25_000, 0)
        loss, gradients, _ = reference(state, data, {"bn1": layer, "bn2": layer})
        outputs = grad(state, data)
        close(outputs["loss"], loss)
        for name in ("bn1.weight", "bn2.weight", "first.weight"):
            close(outputs[f"grad:{name}"], gradients[name])


@spread("norm", [*CASES, "frozen:all", "train:momentum=cumulative"], test=3)
def test_evaluation_and_prediction_use_the_running_statistics(norm):
    program = burnish.compile(network(4), loss="mse", norm=norm)
    session = burnish.Session(program)
    for data in batches(4, 2, 6):
        session.step(data)
    state = session.state()
    (data,) = batches(4, 1, 6, seed=7)
    loss, _, _ = reference(state, data, {"bn1": frozen, "bn2": frozen})
    close(session.evaluate(data)["loss"], loss)
    alone = session.predict({"x": data["x"][:1]})["y"]
    np.testing.assert_allclose(session.predict({"x": data["x"]})["y"][:1], alone, rtol=1e-5, atol=1e-6)
    assert all((session.state()[name] == state[name]).all() for name in state)


@pytest.mark.parametrize("norm", ["frozen", "frozen:all"])
def test_frozen_statistics_never_change(norm):
    program = burnish.compile(network(4), loss="mse", norm=norm)
    session = burnish.Session(program)
    before = session.state()
    for data in batches(4, 3, 6):
        session.step(data)
    after = session.state()
    changed = {name for name in before if not (before[name] == after[name]).all() and name.startswith(("param/", "stat/"))}
    weights = {f"param/{layer}.{name}" for layer in ("first", "second") for name in ("weight", "bias")}
    affine = {f"param/{layer}.{name}" for layer in ("bn1", "bn2") for name in ("weight", "bias")}
    assert changed == (weights | affine if norm == "frozen" else weights)
    assert set(program.options["trainable"]) == {name.removeprefix("param/") for name in changed}


def test_frozen_all_by_pattern_trains_nothing_of_that_layer():
    program = burnish.compile(network(4), loss="mse", norm={"bn2": norms.Frozen(affine=False)})
    trained = {entry.name for entry in program.signature["grad"].outputs if entry.name.startswith("grad:")}
    assert not any(name.startswith("grad:bn2") for name in trained)
    assert {"grad:bn1.weight", "grad:bn1.bias"} <= trained
    assert "opt/momentum/bn2.weight" not in {entry.name for entry in program.signature.state}
    follow({"bn2": "frozen:all"}, {"bn1": train(0), "bn2": frozen}, momentum=lambda step: MOMENTUM | {"bn2": 1.0})


def test_a_statistic_is_never_trained_nor_decayed():
    (data,) = batches(4, 1, 6)
    optimizer = burnish.optim.sgd(lr=0.1, weight_decay=0.5)
    session = burnish.Session(burnish.compile(network(4), loss="mse", optimizer=optimizer))
    _, _, expected = reference(session.state(), data, {"bn1": train(0), "bn2": train(0)})
    session.step(data)
    for name, value in expected.items():
        close(session.state()[f"stat/{name}"], value)


@pytest.mark.parametrize(
    "text",
    [
        "train",
        "frozen",
        "frozen:all",
        "sync:momentum=0.5",
        "train:momentum=cumulative",
        "ghost:32",
        "ghost:32,momentum=cumulative",
        "train:momentum=cumulative,seen=3",
        "sync:4,momentum=cumulative,seen=3",
        "ghost:32,momentum=cumulative,seen=3",
        "renorm",
        "renorm:r_max=2,d_max=1.5,start=10,r_max_step=20,d_max_step=30",
        "renorm:momentum=0.99",
    ],
)
def test_a_policy_and_its_text_say_the_same(text):
    policy = norms.get(text)
    assert norms.get(str(policy)) == policy
    assert norms.get(policy) is policy
    assert set(str(policy).split(",")) == set(text.split(",")) or "renorm" in text


def test_policies_as_objects():
    assert norms.get("ghost:32,momentum=0.5") == norms.Ghost(32, momentum=0.5)
    assert norms.get(" renorm : r_max = 2 , d_max = 1 ") == norms.Renorm(r_max=2, d_max=1)
    assert norms.get("frozen:all") == norms.Frozen(affine=False)
    program = burnish.compile(network(2), loss="mse", norm=norms.Ghost(2))
    assert program.options["norm"] == "ghost:2"
    assert json.loads(json.dumps(program.options))["norm_layers"] == {"bn1": "ghost:2", "bn2": "ghost:2"}


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        ("whiten", r"there is no norm policy 'whiten'; choose among auto, frozen, ghost, local, renorm, sync, train"),
        ({1: "frozen"}, r"norm: a pattern is the name of a layer, .* not 1$"),
        ({"bn3": "frozen"}, r"norm: the pattern 'bn3' matches no batch normalization layer; .* are: 'bn1', 'bn2'"),
        ({"bn1": 3}, r"a norm policy is a name or an object of burnish\.norms, not 3; choose among auto"),
        (3, r"norm must be a policy, such as 'train' or 'frozen', or \{pattern: policy\}, not 3"),
        ("ghost", r"norm policy 'ghost' needs the option 'size': give it"),
        ("ghost:", r"norm policy 'ghost:': no settings stand after the colon: give some, or leave the colon out"),
        ("ghost:many", r"norm: ghost: size must be a whole number of samples, 1 or more, not 'many'"),
        ("ghost:0", r"norm: ghost: size must be a whole number of samples, 1 or more, not 0"),
        ("ghost:2.5", r"norm: ghost: size must be a whole number of samples, 1 or more, not 2\.5"),
        ("ghost:1", r"with 'ghost:1', a channel of its input 'first' of shape \[\?, 3\] has a single value"),
        ("frozen:some", r"norm: frozen: affine must be True or False, not 'some'"),
        ("train:32", r"norm policy 'train' has no option '32'; it takes momentum"),
        ("train:rate=1", r"norm policy 'train' has no option 'rate'; it takes momentum"),
        ("train:momentum=2", r"norm: train: momentum must be a number from 0 to 1, .* or 'cumulative', not 2"),
        ("train:momentum=slow", r"norm: train: momentum must be .* not 'slow'"),
        ("train:seen=3", r"norm: train: seen=3 counts the batches of an average, and momentum is None: give momentum=cumulative"),
        ("train:momentum=cumulative,seen=-1", r"norm: train: seen must be a whole number of batches, 0 or more, not -1"),
        ("renorm:r_max=0.5", r"norm: renorm: r_max must be a finite number of 1 or more, not 0\.5"),
        ("renorm:d_max=inf", r"norm: renorm: d_max must be a finite number of 0 or more, not inf"),
        ("renorm:start=-1", r"norm: renorm: start must be a whole number of steps, 0 or more, not -1"),
        (
            "renorm:start=30000",
            r"d_max_step=25000, where the bound is full, must lie behind start=30000, where it begins to grow",
        ),
        ("train:momentum=0.5,momentum=0.9", r"norm policy 'train:momentum=0\.5,momentum=0\.9' gives momentum twice"),
    ],
)
def test_policies_that_are_refused(norm, message):
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(network(2), loss="mse", norm=norm)


@pytest.mark.parametrize("option", [{"norm": "train"}, {"norm": norms.Ghost(4)}, {"running_variance": "onnx"}], ids=str)
def test_an_option_of_layers_that_a_model_does_not_have_is_named(option):
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N, 3] x) => (float[N, 3] y) {y = MatMul (x, w)}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    name, value = next(iter(option.items()))
    with pytest.warns(
        ObjectiveWarning, match=f"{name}='{value}' changes nothing: the model has no batch normalization. Leave it"
    ):
        burnish.compile(model, loss="mse", **option)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        assert burnish.compile(model, loss="mse", norm="frozen").options["norm"] == "frozen"


def test_a_pattern_after_which_others_match_all_is_named():
    with pytest.warns(
        ObjectiveWarning, match=r"norm: 'bn1' holds for no layer: patterns after it match all .* put it after them"
    ):
        burnish.compile(network(2), loss="mse", norm={"bn1": "frozen", "*": "train"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        program = burnish.compile(network(2), loss="mse", norm={"*": "train", "bn1": "frozen"})
    assert program.options["norm_layers"] == {"bn1": "frozen", "bn2": "train"}


def moved_elsewhere(source: str) -> onnx.ModelProto:
    """The running mean of ``bn2`` is no initializer: an input of the model, or computed from one."""
    proto = network(2)
    node = next(node for node in proto.graph.node if node.name.endswith("bn2"))
    mean = next(tensor for tensor in proto.graph.initializer if tensor.name == node.input[3])
    if source == "input":
        proto.graph.input.append(onnx.helper.make_tensor_value_info(mean.name, onnx.TensorProto.FLOAT, list(mean.dims)))
        proto.graph.initializer.remove(mean)
    else:
        proto.graph.node.insert(0, onnx.helper.make_node("Neg", [mean.name], ["opposite"], name="negated"))
        node.input[3] = "opposite"
    return proto


@pytest.mark.parametrize("norm", ["auto", "train", "renorm"])
@pytest.mark.parametrize(
    ("source", "reason"), [("input", "is an input of the model"), ("computed", "is computed by Neg 'negated'")]
)
def test_a_running_statistic_that_no_step_can_move_is_refused(source: str, reason: str, norm: str) -> None:
    proto = moved_elsewhere(source)
    message = rf"'(/bn2|bn2)' has a running mean that no step can move: .* {reason}.*Freeze the layer, norm=\{{'bn2': 'frozen'\}}"
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(proto, loss="mse", norm=norm)
    updates = burnish.compile(proto, loss="mse", norm={"bn2": "frozen"}).signature["step"].updates
    assert [name for name in updates if "bn1" in name and "running" in name]


def test_an_unknown_affine_is_refused():
    with pytest.raises(ConfigurationError, match=r"norm: frozen: affine must be True or False, not 'all'"):
        norms.Frozen(affine="all")


def test_a_static_batch_that_ghost_does_not_divide():
    message = (
        r"norm: 'ghost:4' takes statistics over groups of 4 samples, and the batch of 'bn1' is 6 \(BatchNormalization '/bn1'"
    )
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(network(4, batch=6), loss="mse", norm="ghost:4")


def test_a_batch_that_ghost_does_not_divide():
    session = burnish.Session(burnish.compile(network(4), loss="mse", norm={"bn2": "ghost:4"}))
    (data,) = batches(4, 1, 6)
    before = session.state()
    message = (
        r"The input 'x' has 6 along 'batch', and batch normalization 'bn2' takes its statistics over groups of 4 "
        r"\(norm 'ghost:4'\), and asks for a multiple of 4\. Give batches of another size \(drop_last=True .*\), or compile with "
        r"another ghost size"
    )
    with pytest.raises(InputError, match=message):
        session.step(data)
    assert all((session.state()[name] == before[name]).all() for name in before)
    session.evaluate(data)
    session.predict({"x": data["x"]})


def test_several_ghost_sizes_ask_for_a_multiple_of_each():
    program = burnish.compile(network(4), loss="mse", norm={"bn1": "ghost:2", "bn2": "ghost:3"})
    assert [(rule.layer, rule.multiple) for rule in program.signature["step"].extents] == [("bn1", 2), ("bn2", 3)]
    session = burnish.Session(program)
    session.step(batches(4, 1, 6)[0])
    with pytest.raises(InputError, match="groups of 3"):
        session.step(batches(4, 1, 4)[0])


def test_a_trainer_leaves_out_a_last_batch_that_the_program_does_not_take(tmp_path):
    program = burnish.compile(network(2), loss="mse", norm="ghost:4")
    (data,) = batches(2, 1, 22)
    options = {"epochs": 2, "progress": False, "run_directory": tmp_path / "run"}
    trained = burnish.Trainer(program, (data["x"], data["targets"]), batch_size=8, **options)
    assert trained.steps == 4
    assert trained.run().steps == 4
    assert burnish.Trainer(program, (data["x"][:20], data["targets"][:20]), batch_size=8, overwrite=True, **options).steps == 6
    with pytest.raises(
        ConfigurationError, match=r"batch_size=6: batch normalization 'bn1' .* multiple of 4; give another batch_s"
    ):
        burnish.Trainer(program, (data["x"], data["targets"]), batch_size=6, **options)


def test_what_is_asked_of_the_batch_is_saved_with_the_program(tmp_path):
    program = burnish.compile(network(4), loss="mse", norm="ghost:4")
    program.save(tmp_path / "program")
    loaded = burnish.Program.load(tmp_path / "program")
    assert loaded.signature == program.signature
    assert loaded.signature["step"].extents == (norms.ExtentRule("batch", "bn1", multiple=4),)
    assert loaded.signature["evaluate"].extents == ()


@pytest.mark.parametrize("norm", ["train", "sync", "renorm"])
def test_a_single_value_per_channel(norm):
    session = burnish.Session(burnish.compile(network(2), loss="mse", norm=norm))
    (data,) = batches(2, 1, 1)
    message = (
        r"The input 'x' has 1 along 'batch', and batch normalization 'bn1' needs 2 or more: a single value per channel has "
        r"no variance to normalize by\. Give batches of another size .* or freeze the layer, norm=\{'bn1': 'frozen'\}"
    )
    with pytest.raises(InputError, match=message):
        session.step(data)
    session.evaluate(data)
    static = r"BatchNormalization '/bn1' \(output 'bn1'\): a channel of its input 'first' of shape \[1, 3\] has a single value"
    with pytest.raises(ConfigurationError, match=static):
        burnish.compile(network(2, batch=1), loss="mse", norm=norm)


def test_a_single_sample_of_many_pixels_trains_and_a_frozen_layer_takes_a_single_value():
    for rank, norm, batch in ((4, "auto", "batch"), (2, "frozen", "batch"), (2, "frozen", 1)):
        session = burnish.Session(burnish.compile(network(rank, batch=batch), loss="mse", norm=norm))
        (data,) = batches(rank, 1, 1)
        losses = [session.step(data)["loss"] for _ in range(3)]
        assert losses[-1] < losses[0], (rank, norm, batch)


def test_an_empty_batch():
    session = burnish.Session(burnish.compile(network(4), loss="mse"))
    empty = {name: array[:0] for name, array in batches(4, 1, 2)[0].items()}
    with pytest.raises(InputError, match=r"The input 'x' is empty along axis 0 .*: leave empty batches out"):
        session.step(empty)
    message = (
        r"BatchNormalization '/bn1' .*: its input 'first' of shape \[\?, 3, 0, 3\] is empty, and an empty batch has no statistics"
    )
    without_rows = network(4)
    without_rows.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 0
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(without_rows, loss="mse")


def test_a_declared_batch_of_no_samples_is_an_open_one():
    program = burnish.compile(network(4, batch=0), loss="mse")
    (x,) = program.signature["step"].inputs_of(Role.DATA)
    assert x.extents == ("batch", 3, 3, 3)
    burnish.Session(program).step(batches(4, 1, 2)[0])


def resized(name, values):
    model = network(4)
    for initializer in model.graph.initializer:
        if initializer.name == name:
            initializer.CopyFrom(onnx.numpy_helper.from_array(np.ones(values, np.float32), name))
    return model


@pytest.mark.parametrize("name", ["bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"])
@pytest.mark.parametrize("values", [2, 5, (3, 1)])
def test_an_operand_of_the_wrong_size_names_the_layer(name, values):
    with pytest.raises(ModelError, match=r"BatchNormalization.*bn1"):
        burnish.compile(resized(name, values), loss="mse")


UNKNOWN_CHANNELS = """
<ir_version: 8, opset_import: ["": 18]>
reshaped (float[batch, 6] x, int64[2] size) => (float[n, c] y)
<float[2] scale = {1, 2}, float[2] bias = {0, 1}, float[3] mean = {0.5, -1, 0}, float[2] variance = {2, 3}> {
    values = Reshape(x, size)
    y = BatchNormalization (values, scale, bias, mean, variance)
}
"""


def test_operands_of_two_sizes_where_the_channels_are_not_known():
    message = r"its mean 'mean' of shape \[3\] must have shape \[2\]: its scale 'scale' has that many values|Dimension mismatch"
    with pytest.raises(ModelError, match=message):
        burnish.compile(onnx.parser.parse_model(UNKNOWN_CHANNELS), loss="mse")


def test_trainable_and_frozen_all_that_contradict_each_other():
    message = (
        r"trainable: 'bn1\.weight' would not train: 'bn1\.weight' belongs to the batch normalization 'bn1', which is "
        r"'frozen:all'; let its scale and bias train with norm=\{'bn1': 'frozen'\}, or leave 'bn1\.weight' out"
    )
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(network(4), loss="mse", norm="frozen:all", trainable=["first.*", "bn1.weight"])
    program = burnish.compile(network(4), loss="mse", norm="frozen:all", trainable="*")
    assert set(program.options["trainable"]) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    with pytest.raises(ConfigurationError, match=r"nothing would train: everything that trainable selects belongs to batch norm"):
        burnish.compile(network(4), loss="mse", norm="frozen:all", trainable=lambda name, array: name.startswith("bn"))


COMPUTED = """
<ir_version: 8, opset_import: ["": 18]>
computed (float[batch, 2] x) => (float[batch, 2] y)
<float[2] log_scale = {1, 2}, float[2] bias = {0, 1}, float[2] mean = {0.5, -1}, float[2] variance = {2, 3}> {
    scale = Exp(log_scale)
    y = BatchNormalization (x, scale, bias, mean, variance)
}
"""


def test_frozen_all_of_a_computed_scale():
    message = (
        r"cannot be 'frozen:all': 'scale' is computed from the weight 'log_scale'; choose 'frozen', and leave that weight out"
    )
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(onnx.parser.parse_model(COMPUTED), loss="mse", norm="frozen:all")


def test_every_policy_is_named_in_the_message_of_an_unknown_one():
    with pytest.raises(ConfigurationError) as error:
        norms.get("none")
    assert set(str(error.value).rpartition("choose among ")[2].split(", ")) == set(norms.POLICIES)
