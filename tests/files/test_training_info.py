"""A program in one ONNX model: what the standard says of it, what plain runtimes make of it, and what comes back."""

from __future__ import annotations

import base64
import json
from functools import cache

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import burnish
from burnish import surgery
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import BurnishError, CheckpointError, ModelError
from burnish.files import training_info
from burnish.files.identity import graph_hashes
from burnish.files.metadata import TRAINING
from burnish.models import residual_network
from files.stamping import model_bytes
from oracles.combinations import spread
from oracles.standard_operators import STANDARD


def dropout_network():
    """Names that the program's graphs use too, a constant initializer, dropout, and a layer of batch normalization."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        net (float[n,6] x) => (float[n,4] loss) <float[4] step = {0.5, -0.5, 0.25, 1}, int64[2] order = {0, 1},
            float[5] scale = {1, 1, 2, 1, 1}, float[5] bias = {0, 0, 0, 1, 0}, float[5] mean = {0, 0, 1, 0, 0},
            float[5] var = {1, 1, 1, 2, 1}, float ratio = {0.25}> {
            h = MatMul (x, w)
            n = BatchNormalization (h, scale, bias, mean, var)
            a = Relu (n)
            d = Dropout (a, ratio)
            turned = Transpose <perm = [0, 1]> (d)
            t = Tile (turned, ones)
            y = MatMul (t, lr)
            loss = Add (y, step)
        }""")
    rng = np.random.default_rng(3)
    for name, shape in (("w", (6, 5)), ("lr", (5, 4))):
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1], np.int64), "ones"))
    for node in model.graph.node:
        node.name = f"training/{node.op_type}"
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "training/h"
    return model


def residual():
    return residual_network(width=4, blocks=(1, 1))


def quantized(scales):
    x = np.random.default_rng(5).normal(size=(8, *residual().graph.inputs[0].shape[1:])).astype(np.float32)
    return surgery.quantize(residual(), calibration=[{"x": x}], scales=scales)


PROGRAMS = {
    "residual, adam": (residual, {"optimizer": "adam"}),
    "residual, ghost layers": (residual, {"optimizer": burnish.optim.sgd(lr=0.05, momentum=0.9), "norm": "ghost:4"}),
    "residual, classifier alone": (residual, {"trainable": "classifier.*", "norm": "frozen", "metrics": ()}),
    "dropout, mean squared error": (dropout_network, {"loss": "mse", "optimizer": "adamw"}),
    "float16": (residual, {"precision": "float16"}),
    "pruned by a schedule": (
        lambda: surgery.prune(dropout_network(), 0.5, begin=1, end=4),
        {"loss": "mse", "optimizer": "adam"},
    ),
    "quantized, learned scales": (lambda: quantized("learned"), {"optimizer": "adam"}),
    "quantized, observed ranges": (lambda: quantized("observed"), {"optimizer": "sgd"}),
}


@cache
def compiled(name):
    source, options = PROGRAMS[name]
    return burnish.compile(source(), **options)


def batches(program, count):
    """Random batches of eight for any program of this file."""
    rng = np.random.default_rng(11)
    entries = [entry for entry in program.signature["step"].inputs if entry.role in ("data", "label")]
    for _ in range(count):
        batch = {}
        for entry in entries:
            shape = [extent if isinstance(extent, int) else 8 for extent in entry.extents]
            batch[entry.name] = rng.integers(0, 10, shape) if entry.maximum else rng.normal(size=shape).astype(np.float32)
        yield batch


def trained(program, steps=2, state=None):
    session = burnish.Session(program, engine=STANDARD, state=state, threads=1)
    for batch in batches(program, steps):
        session.step(batch)
    return session


def assert_same_state(first, second):
    assert list(first) == list(second)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def combined(model):
    """The graph that the standard says a training step runs: the inference graph followed by the algorithm."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    algorithm = whole.training_info[0].algorithm
    for part in ("input", "initializer", "output", "node", "value_info"):
        getattr(whole.graph, part).extend(getattr(algorithm, part))
    del whole.training_info[:]
    del whole.functions[:]
    return whole


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (place > 0)) for place, name in enumerate(PROGRAMS)], name="program"
)
def each_program(request):
    return compiled(request.param)


def test_the_checker_accepts_the_model_and_the_graphs_that_a_trainer_runs(program):
    model = program.to_onnx()
    onnx.checker.check_model(model, full_check=True)
    onnx.checker.check_model(combined(model), full_check=True)
    info = model.training_info[0]
    assert len(info.initialization.input) == 0
    initialization = onnx.helper.make_model(info.initialization, opset_imports=model.opset_import)
    onnx.checker.check_model(initialization, full_check=True)
    initializers = {tensor.name for tensor in (*model.graph.initializer, *info.algorithm.initializer)}
    for bindings, graph in ((info.initialization_binding, info.initialization), (info.update_binding, info.algorithm)):
        keys = [binding.key for binding in bindings]
        assert len(set(keys)) == len(keys)
        assert set(keys) <= initializers
        assert {binding.value for binding in bindings} <= {value.name for value in graph.output}
    updated = {binding.key for binding in info.update_binding}
    assert updated == {training_info_name(model, name) for name in program.signature["step"].updates}


def training_info_name(model, state_name):
    return metadata_of(model)["state"][state_name]


def metadata_of(model):
    return json.loads(next(entry.value for entry in model.metadata_props if entry.key == TRAINING))


def test_a_plain_runtime_runs_the_model_for_inference(program):
    session = trained(program)
    model = program.to_onnx(session.state())
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    batch = next(batches(program, 1))
    inputs = {value.name: batch[value.name] for value in plain.get_inputs()}
    is_rounded = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    for output, array in zip(plain.get_outputs(), plain.run(None, inputs), strict=True):
        apart = np.diff(np.unique(array))
        # A runtime that fuses layers computes with integers, and may round a number halfway between two to the other one.
        step = apart[apart > 1e-6].min() if is_rounded else 0
        np.testing.assert_allclose(array, session.predict(batch)[output.name], rtol=1e-4, atol=1e-5 + step)


def test_initializers_keep_the_names_of_the_source():
    program = compiled("residual, adam")
    names = {tensor.name for tensor in program.to_onnx().graph.initializer}
    assert set(residual().graph.initializers) <= names


def test_the_program_comes_back_whole(program, tmp_path):
    path = tmp_path / "program.onnx"
    path.write_bytes(program.to_onnx().SerializeToString())
    loaded = burnish.Program.load(path)
    assert graph_hashes(loaded) == graph_hashes(program)
    assert loaded.signature == program.signature
    assert loaded.options == json.loads(json.dumps(program.options))
    assert_same_state(loaded.saved_state, program.initial_state())
    assert_same_state(loaded.weights, program.weights)
    assert_same_state(loaded.initial_state(seed=5), program.initial_state(seed=5))


def test_training_goes_on_to_bitwise_the_same_state(program, tmp_path):
    session = trained(program)
    path = tmp_path / "program.onnx"
    path.write_bytes(program.to_onnx(session.state()).SerializeToString())
    loaded = burnish.Program.load(str(path))
    assert_same_state(loaded.saved_state, session.state())
    assert_same_state(trained(loaded, state=loaded.saved_state).state(), trained(program, state=session.state()).state())
    again = burnish.Program.load(loaded.to_onnx(loaded.saved_state))
    assert graph_hashes(again) == graph_hashes(program)


def test_the_kernels_that_train_the_program_train_it_after_it_was_read():
    program = compiled("quantized, learned scales")
    loaded = burnish.Program.load(program.to_onnx())
    (batch,) = batches(program, 1)
    losses = [burnish.Session(each, engine=OnnxRuntimeEngine(), threads=1).step(batch)["loss"] for each in (program, loaded)]
    assert losses[0] == losses[1]
    assert set(loaded.semantic) == set(program.semantic) != set()


@pytest.mark.parametrize("name", ["pruned by a schedule", "quantized, learned scales", "quantized, observed ranges"])
def test_masks_and_integers_are_exported_of_a_program_that_was_read_again(name, tmp_path):
    session = trained(compiled(name))
    onnx.save(compiled(name).to_onnx(session.state()), tmp_path / "program.onnx")
    again = burnish.Program.load(tmp_path / "program.onnx")
    other = burnish.Session(again, engine=STANDARD, state=again.saved_state, threads=1)
    session.export(tmp_path / "one.onnx")
    other.export(tmp_path / "other.onnx")
    first, second = (onnx.load(tmp_path / file) for file in ("one.onnx", "other.onnx"))
    assert [node.op_type for node in first.graph.node] == [node.op_type for node in second.graph.node]
    arrays = [
        {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer} for model in (first, second)
    ]
    assert arrays[0].keys() == arrays[1].keys()
    for tensor, array in arrays[0].items():
        np.testing.assert_array_equal(array, arrays[1][tensor], err_msg=tensor)
    kinds = {tensor.data_type for tensor in first.graph.initializer}
    assert (onnx.TensorProto.INT8 in kinds) == name.startswith("quantized")


def test_checkpoints_pass_between_the_two(tmp_path):
    program = compiled("residual, adam")
    session = trained(program)
    session.save_checkpoint(tmp_path / "last.safetensors")
    other = burnish.Session(burnish.Program.load(program.to_onnx()), threads=1)
    other.restore(tmp_path / "last.safetensors")
    assert_same_state(other.state(), session.state())


@spread("name", ["residual, adam", "dropout, mean squared error"], test=1)
def test_the_bindings_alone_train_the_model(name):
    """Without burnish: run the combined graph, and put the values of the update bindings into the initializers."""
    program = compiled(name)
    model = program.to_onnx()
    names = metadata_of(model)["state"]
    batch = next(batches(program, 1))
    for _ in range(3):
        whole = combined(model)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
        bindings = {binding.key: binding.value for binding in model.training_info[0].update_binding}
        results = dict(zip(bindings, session.run(list(bindings.values()), batch), strict=True))
        for tensor in (*model.graph.initializer, *model.training_info[0].algorithm.initializer):
            if tensor.name in results:
                tensor.CopyFrom(onnx.numpy_helper.from_array(results[tensor.name], tensor.name))
    expected = burnish.Session(program, OnnxRuntimeEngine("none", kernels=False), threads=1)
    for _ in range(3):
        expected.step(batch)
    tensors = {tensor.name: tensor for tensor in (*model.graph.initializer, *model.training_info[0].algorithm.initializer)}
    for state_name, array in expected.state().items():
        held = onnx.numpy_helper.to_array(tensors[names[state_name]])
        np.testing.assert_allclose(held, array, rtol=1e-5, atol=1e-6, err_msg=state_name)


def test_the_initialization_graph_gives_the_initial_state():
    program = compiled("residual, adam")
    model = program.to_onnx(trained(program).state())
    info = model.training_info[0]
    initialization = onnx.helper.make_model(info.initialization, opset_imports=model.opset_import, ir_version=10)
    session = onnxruntime.InferenceSession(initialization.SerializeToString(), providers=["CPUExecutionProvider"])
    values = dict(zip((value.name for value in session.get_outputs()), session.run(None, {}), strict=True))
    names, expected = metadata_of(model)["state"], program.initial_state(seed=0)
    bound = {binding.key: values[binding.value] for binding in info.initialization_binding}
    assert {names[name] for name in expected if name.startswith(("opt/", "rng/", "step"))} == set(bound)
    for name, array in expected.items():
        if names[name] in bound:
            np.testing.assert_array_equal(bound[names[name]], array, err_msg=name)


def test_such_a_model_compiles_again_as_any_other():
    program = compiled("residual, adam")
    again = burnish.compile(program.to_onnx(), optimizer="adam")
    assert again.signature["step"] == program.signature["step"]


@pytest.fixture(scope="module")
def written():
    return compiled("residual, adam").to_onnx()


def damaged(model, damage):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    damage(copy)
    return copy


def change_metadata(**values):
    def change(model):
        metadata = metadata_of(model) | values
        entry = next(entry for entry in model.metadata_props if entry.key == TRAINING)
        entry.value = json.dumps({k: v for k, v in metadata.items() if v is not None})

    return change


def drop_function(model):
    del model.functions[1]


def drop_training(model):
    del model.training_info[:]


def drop_metadata(model):
    del model.metadata_props[:]


def spoil_metadata(model):
    entry = next(entry for entry in model.metadata_props if entry.key == TRAINING)
    entry.value = entry.value[:-100]


def rename_state(model):
    next(t for t in model.training_info[0].algorithm.initializer if t.name == "step").name = "stop"


def reshape_state(model):
    tensor = next(t for t in model.graph.initializer if t.name == "classifier.bias")
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(3, np.float32), tensor.name))


def cut_a_step_node(model):
    del model.training_info[0].algorithm.node[5]


def cut_a_function_node(model):
    del model.functions[0].node[-1]


def shorten_a_tensor(model):
    tensor = next(t for t in model.training_info[0].algorithm.initializer if t.name.startswith("opt/"))
    tensor.raw_data = tensor.raw_data[:-4]


def point_outside(model):
    tensor = next(t for t in model.training_info[0].algorithm.initializer if t.name.startswith("opt/"))
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")


def point_a_graph_for_kernels_outside(model):
    metadata = metadata_of(model)
    graph = onnx.ModelProto.FromString(base64.b64decode(metadata["semantic"]["grad"]))
    tensor = graph.graph.initializer.add(name="stolen", data_type=onnx.TensorProto.FLOAT, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret.bin")
    packed = base64.b64encode(graph.SerializeToString()).decode()
    change_metadata(semantic={**metadata["semantic"], "grad": packed})(model)


DAMAGES = [
    (change_metadata(semantic={"grad": "no base64"}), CheckpointError, "its grad graph for engines with kernels cannot be read"),
    (point_a_graph_for_kernels_outside, CheckpointError, "it reads the file 'secret.bin'"),
    (drop_metadata, CheckpointError, r"has no ai\.onnx\.preview\.training\.Gradient in its algorithm"),
    (spoil_metadata, CheckpointError, "its metadata 'burnish.training' cannot be read"),
    (change_metadata(format="other"), CheckpointError, "format is 'other', expected 'burnish training'"),
    (change_metadata(version=99), CheckpointError, "of format version 99, and this burnish reads version 3: update burnish"),
    (change_metadata(version=1), CheckpointError, "of format version 1, .* with burnish compile MODEL -o program.onnx"),
    (change_metadata(opsets=None), CheckpointError, "has no 'opsets'"),
    (change_metadata(signature={"step": {}}), CheckpointError, "the signature in its metadata cannot be read"),
    (change_metadata(signature={}), CheckpointError, r"its signature has the graphs \[\], expected"),
    (drop_training, CheckpointError, "it has 0 training_info, and one was written"),
    (drop_function, CheckpointError, "it has 0 functions 'burnish.program.apply'"),
    (rename_state, CheckpointError, "it has no initializer that holds 'step'"),
    (reshape_state, CheckpointError, r"'param/classifier.bias' has shape \[3\], expected \[10\]"),
    (cut_a_step_node, CheckpointError, "its step graph is not valid"),
    (cut_a_function_node, CheckpointError, "its grad graph is not valid"),
    (shorten_a_tensor, ModelError, "declares dims .* and holds"),
    (point_outside, ModelError, "external data outside the model's folder: '../secret.bin'"),
]


@spread(("damage", "error", "message"), DAMAGES, test=3)
def test_damaged_models_are_refused_by_name(written, tmp_path, damage, error, message):
    path = tmp_path / "damaged.onnx"
    path.write_bytes(model_bytes(damaged(written, damage)))
    with pytest.raises(error, match=message) as raised:
        burnish.Program.load(path)
    if error is CheckpointError:
        assert "damaged.onnx" in str(raised.value)


def test_a_bit_that_changed_anywhere_is_noticed(tmp_path):
    path = tmp_path / "program.onnx"
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[b,2] x) => (float[b,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }""")
    burnish.compile(model, loss="mse", optimizer="sgd").save(path)
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(BurnishError):
            burnish.Program.load(path)
    path.write_bytes(content)
    burnish.Program.load(path)


def test_truncated_missing_and_foreign_files_are_refused(written, tmp_path):
    content = written.SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in (0, 10, len(content) // 2, len(content) - 7):
        path.write_bytes(content[:length])
        with pytest.raises((ModelError, CheckpointError), match=r"cut\.onnx"):
            burnish.Program.load(path)
    with pytest.raises(ModelError, match=r"there is no file '.*gone\.onnx'"):
        burnish.Program.load(tmp_path / "gone.onnx")
    with pytest.raises(CheckpointError, match="holds no burnish program: compile it with burnish"):
        burnish.Program.load(dropout_network())


def test_external_data_beside_the_file_is_read(written, tmp_path):
    copy = onnx.ModelProto()
    copy.CopyFrom(written)
    onnx.save(copy, tmp_path / "program.onnx", save_as_external_data=True, location="weights.data", size_threshold=64)
    loaded = burnish.Program.load(tmp_path / "program.onnx")
    assert_same_state(loaded.saved_state, burnish.Program.load(written).saved_state)
    (tmp_path / "weights.data").write_bytes(b"")
    with pytest.raises(ModelError, match="the file is cut short"):
        burnish.Program.load(tmp_path / "program.onnx")


def test_a_state_that_does_not_fit_is_refused():
    program = compiled("residual, adam")
    state = program.initial_state()
    del state["step"]
    with pytest.raises(CheckpointError, match="The state does not fit the program: missing 'step'"):
        program.to_onnx(state)


def test_what_one_model_cannot_hold_is_refused(monkeypatch):
    program = compiled("residual, adam")
    monkeypatch.setattr(training_info, "LARGEST", 1000)
    with pytest.raises(CheckpointError, match=r"more than one ONNX model can hold: save the program as a folder"):
        program.to_onnx()


@pytest.mark.slow
def test_saving_under_a_name_of_onnx_writes_one_file_whole_or_not_at_all(tmp_path):
    program = compiled("residual, adam")
    path = program.save(tmp_path / "new" / "program.onnx")
    assert [file.name for file in path.parent.iterdir()] == ["program.onnx"]
    assert graph_hashes(burnish.Program.load(program.save(path))) == graph_hashes(program)
    (tmp_path / "mine.onnx").write_bytes(dropout_network().SerializeToString())
    with pytest.raises(CheckpointError, match=r"mine\.onnx' is a file that is no saved program, and is not replaced"):
        program.save(tmp_path / "mine.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(CheckpointError, match=r"'.*folder\.onnx' is a folder: give the name of a file"):
        program.save(tmp_path / "folder.onnx")
    with pytest.raises(CheckpointError, match="could not be created"):
        program.save(path / "program.onnx")
