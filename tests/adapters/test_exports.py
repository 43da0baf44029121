"""Adapters apart from their model: for ONNX Runtime, as inputs, and as PEFT keeps them."""

from __future__ import annotations

import functools
import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import load_file, save_file

import burnish
from burnish import surgery
from burnish.errors import CheckpointError, ConfigurationError
from oracles.adapted_models import batch, layered_model
from oracles.combinations import spread

VARIANTS = {
    "lora": {"rank": 2, "alpha": 3, "rslora": True},
    "dora": {"rank": 2, "alpha": 4, "variant": "dora"},
    "ia3": {"variant": "ia3", "feedforward": "head"},
}


@functools.cache
def trained(variant: str) -> burnish.Session:
    model = surgery.lora(layered_model(quantized=False), "*", **VARIANTS[variant])
    session = burnish.Session(burnish.compile(model, optimizer="adamw:lr=0.05"))
    for _ in range(3):
        session.step(batch())
    return session


def run(path, feeds, adapter=None):
    """The logits of a model, with the adapters of a file. ONNX Runtime does not keep the adapter alive; this call does."""
    settings, options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    settings.log_severity_level = 3
    active = onnxruntime.LoraAdapter()
    if adapter is not None:
        active.Load(str(adapter))
        options.add_active_adapter(active)
    return onnxruntime.InferenceSession(str(path), settings).run(None, feeds, options)[0]


@spread("variant", VARIANTS, test=1)
def test_stock_onnx_runtime_gives_a_model_its_adapters(variant, tmp_path):
    session, feeds = trained(variant), {"ids": batch()["ids"]}
    path = session.export(tmp_path / "apart.onnx", adapters="apart")
    predicted = session.predict(batch())["logits"]
    np.testing.assert_allclose(run(path, feeds, path.with_suffix(".onnx_adapter")), predicted, rtol=1e-5, atol=2e-6)
    base = burnish.Session(burnish.compile(layered_model(quantized=False))).predict(batch())["logits"]
    np.testing.assert_allclose(run(path, feeds), base, rtol=1e-5, atol=2e-6)
    assert not np.allclose(predicted, base, atol=1e-3)


def test_adapters_of_another_rank_fit_the_same_model(tmp_path):
    path = trained("lora").export(tmp_path / "two.onnx", adapters="apart")
    model = surgery.lora(layered_model(quantized=False), "*", rank=5, alpha=1)
    other = burnish.Session(burnish.compile(model, optimizer="sgd:lr=0.5"))
    for _ in range(3):
        other.step(batch(seed=2))
    other.export(tmp_path / "five.onnx", adapters="apart")
    outputs = run(path, {"ids": batch()["ids"]}, tmp_path / "five.onnx_adapter")
    np.testing.assert_allclose(outputs, other.predict(batch())["logits"], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_are_required_inputs(variant, tmp_path):
    session = trained(variant)
    path = session.export(tmp_path / "inputs.onnx", adapters="inputs")
    arrays = load_file(path.with_suffix(".safetensors"))
    names = {value.name for value in onnxruntime.InferenceSession(str(path)).get_inputs()}
    assert names == {"ids", *arrays}
    outputs = run(path, {"ids": batch()["ids"], **arrays})
    np.testing.assert_allclose(outputs, session.predict(batch())["logits"], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_a_folder_of_peft_is_read_back(variant, tmp_path):
    session = trained(variant)
    folder = session.export(tmp_path / "peft", adapters="peft")
    has_the_weights_of(session, surgery.load_peft(layered_model(quantized=False), folder))


def has_the_weights_of(session, model):
    """Compare the parameters that a model begins with, those of its adapters, with a session's."""
    state = session.state()
    read = {name: array for name, array in burnish.compile(model).initial_state().items() if name.startswith("param/")}
    assert any("lora" in name for name in read)
    for name, array in read.items():
        assert np.array_equal(array, state[name]), name


def written(tmp_path, **changes):
    """A folder of PEFT with other entries in its configuration."""
    folder = trained("lora").export(tmp_path / "peft", adapters="peft")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def with_array(folder, name, array):
    arrays = load_file(folder / "adapter_model.safetensors")
    save_file({**arrays, name: array}, folder / "adapter_model.safetensors")


def refused(folder, error, message, **options):
    with pytest.raises(error) as caught:
        surgery.load_peft(layered_model(quantized=False), folder, **options)
    assert message in str(caught.value)


def test_alphas_of_patterns_are_read(tmp_path):
    folder = written(tmp_path, alpha_pattern={"dense": 9}, use_rslora=False, lora_alpha=4)
    model = surgery.load_peft(layered_model(quantized=False), folder)
    scalings = {one.layer: one.scaling for one in burnish.adapters.graph.read_adapters(model.metadata_props).adapters}
    assert scalings["dense"] == 4.5
    assert scalings["head"] == 2


@pytest.mark.parametrize("pattern", ["(a+)+b", ".*.*.*.*x", "(a|a)*b", "(dense"])
def test_patterns_that_could_take_long_are_refused(tmp_path, pattern):
    refused(written(tmp_path, alpha_pattern={pattern: 9}), ConfigurationError, "alpha_pattern has ")
    folder = written(tmp_path, alpha_pattern={"dense": "much"})
    refused(folder, CheckpointError, "adapter_config.json' cannot be read (ValueError(")


def test_files_of_peft_that_cannot_be_read_are_refused(tmp_path):
    refused(tmp_path, CheckpointError, "adapter_config.json': give a folder that save_pretrained of PEFT, or burnish, wrote")
    folder = written(tmp_path, peft_type="LOHA")
    refused(folder, ConfigurationError, "holds adapters of the kind 'LOHA', and burnish has LORA, with DoRA, and IA3")
    (folder / "adapter_config.json").write_text("[")
    refused(folder, CheckpointError, "adapter_config.json' cannot be read")
    folder = written(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, CheckpointError, "which is pickled and not read: save them in PEFT with safe_serialization=True")
    folder = written(tmp_path)
    content = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(content[:-7])
    refused(folder, CheckpointError, "is not a whole file of PEFT: it is truncated, damaged or another kind of file")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_alpha": float("nan")}, "an alpha is nan"),
        ({"alpha_pattern": {"dense": float("inf")}}, "an alpha is inf"),
        ({"lora_dropout": 10**400}, "int too large to convert to float"),
        ({"lora_dropout": 1.5}, "lora_dropout is 1.5, and no share of at least 0 and below 1"),
    ],
)
def test_numbers_that_no_adapter_can_have_are_refused(changes, problem, tmp_path):
    refused(written(tmp_path, **changes), CheckpointError, problem)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4', which takes something off the weights"),
        ({"init_lora_weights": "OLoRA"}, "path_initial_model_for_weight_conversion=...)"),
        ({"alora_invocation_tokens": [1, 2]}, "of the kind that 'alora_invocation_tokens' makes, which burnish does not have"),
        ({"use_qalora": True}, "of the kind that 'use_qalora' makes"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(changes, message, tmp_path):
    """PEFT has arrays of the same names and shapes for them, and other outputs."""
    refused(written(tmp_path, **changes), ConfigurationError, message)


@pytest.mark.parametrize("begun", [True, False, "gaussian", "eva", "orthogonal", None])
def test_other_ways_to_begin_are_read(begun, tmp_path):
    model = surgery.load_peft(layered_model(quantized=False), written(tmp_path, init_lora_weights=begun))
    has_the_weights_of(trained("lora"), model)


@pytest.mark.parametrize("array", [np.float32(1), np.zeros((0, 6), np.float32), np.ones((3, 6), np.int64)], ids=str)
def test_arrays_that_are_no_adapters_are_refused(array, tmp_path):
    folder = written(tmp_path)
    with_array(folder, "base_model.model.dense.lora_A.weight", np.asarray(array))
    refused(folder, CheckpointError, "has A of the module 'dense' as ")


def square_model() -> onnx.ModelProto:
    """Two layers of four features, whose weights are read as [inputs, outputs]."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "dense.weight"], ["h"], name="dense"),
        helper.make_node("MatMul", ["h", "head.weight"], ["y"], name="head"),
    ]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 4]) for name in "xy")
    weights = [
        numpy_helper.from_array(rng.normal(size=(4, 4)).astype(np.float32), f"{name}.weight") for name in ("dense", "head")
    ]
    graph = helper.make_graph(nodes, "square", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_a_square_weight_beside_adapters_is_laid_out_as_pytorch_has_it(tmp_path):
    """Its shape does not tell which of the two layouts it has: PyTorch's Linear is [outputs, inputs]."""
    model = surgery.lora(square_model(), "dense", also_trained="head.weight")
    weight = model.graph.initializers["head.weight"].const_value.numpy()
    folder = surgery.save_peft(model, tmp_path / "peft")
    key = "base_model.model.head.weight"
    np.testing.assert_array_equal(load_file(folder / "adapter_model.safetensors")[key], weight.T)
    trained = np.arange(16, dtype=np.float32).reshape(4, 4)
    with_array(folder, key, trained)
    read = surgery.load_peft(square_model(), folder).graph.initializers["head.weight"].const_value.numpy()
    np.testing.assert_array_equal(read, trained.T)


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    folder = written(tmp_path)
    with_array(folder, "base_model.model.dense.lora_B.bias", np.zeros(8, np.float32))
    refused(folder, ConfigurationError, "is a part of an adapter that burnish does not have: train without it")
    folder = written(tmp_path, use_dora=True)
    refused(folder, CheckpointError, "has A, B of the module '")
    folder = written(tmp_path)
    with_array(folder, "base_model.model.dnese.lora_A.weight", np.zeros((2, 8), np.float32))
    with_array(folder, "base_model.model.dnese.lora_B.weight", np.zeros((8, 2), np.float32))
    refused(folder, ConfigurationError, "for the module 'dnese', and the model has no such layer (did you mean 'dense'?)")
    folder = written(tmp_path)
    with_array(folder, "base_model.model.dense.lora_A.weight", np.zeros((2, 7), np.float32))
    refused(folder, ConfigurationError, "has an array of shape [7, 2] for 'dense.lora_A.weight' of shape [8, 2]")
    folder = written(tmp_path)
    with_array(folder, "base_model.model.tail.weight", np.zeros((2, 7), np.float32))
    refused(folder, ConfigurationError, "the file has the parameter 'tail.weight', and the model no initializer of this name")


def test_layers_are_mapped_by_names(tmp_path):
    trained("lora").export(tmp_path / "kept.onnx", adapters="kept")
    surgery.save_peft(tmp_path / "kept.onnx", tmp_path / "peft", names={"dense": "encoder.dense", "head": "classifier.out"})
    arrays = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert "base_model.model.encoder.dense.lora_A.weight" in arrays
    model = surgery.load_peft(layered_model(quantized=False), tmp_path / "peft", names={"head": "classifier.out"})
    assert np.array_equal(
        model.graph.initializers["head.lora_A.weight"].const_value.numpy().T,
        arrays["base_model.model.classifier.out.lora_A.weight"],
    )


def test_what_peft_cannot_have_is_refused(tmp_path):
    tables = surgery.lora(layered_model(quantized=False), "words", variant="ia3")
    with pytest.raises(ConfigurationError, match="PEFT has no ia3 of an embedding, as 'words' is"):
        surgery.save_peft(tables, tmp_path / "peft")
    both = surgery.lora(surgery.lora(layered_model(quantized=False), "dense"), "head", variant="dora")
    with pytest.raises(ConfigurationError, match="one folder holds adapters of one variant, dropout and rslora"):
        surgery.save_peft(both, tmp_path / "peft")
    plain = layered_model(quantized=False)
    with pytest.raises(ConfigurationError, match="names calls both 'dense' and 'turned' 'encoder', and a module has one adapter"):
        surgery.save_peft(surgery.lora(plain, ["dense", "turned"]), tmp_path / "peft", names=lambda layer: "encoder")
    plain.graph.initializer[-1].name = plain.graph.node[-1].input[2] = "bias"
    with pytest.raises(ConfigurationError, match="the initializer 'bias', which is trained too, has no name of a parameter"):
        surgery.save_peft(surgery.lora(plain, "dense", also_trained="bias"), tmp_path / "peft")
    with pytest.raises(ConfigurationError, match="adapters='peft': the model has no adapters"):
        surgery.save_peft(layered_model(), tmp_path / "peft")
    renamed = layered_model(quantized=False)
    renamed.graph.node[1].input[1] = next(t for t in renamed.graph.initializer if t.name == "dense.weight").name = (
        "onnx::MatMul_7"
    )
    renamed.graph.node[1].name = "a product"
    with pytest.raises(
        ConfigurationError, match=r"the layer 'a product' has no name of a PyTorch module: say which it is, names="
    ):
        surgery.save_peft(surgery.lora(renamed, "a product"), tmp_path / "peft")
