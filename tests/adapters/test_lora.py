"""Adapters beside layers: what they begin with, what trains, what stays, what is merged, and what is refused by name."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish import surgery
from burnish.adapters.graph import read_adapters
from burnish.errors import ConfigurationError, ModelError
from burnish.files.export import export_inference
from burnish.graph.annotations import ADAPTERS
from oracles import layers_in_bodies
from oracles.adapted_models import LAYERS, batch, layered_model

VARIANTS = {
    "lora": {"rank": 2, "alpha": 3},
    "lora with dropout and rslora": {"rank": 2, "alpha": 3, "dropout": 0.4, "rslora": True},
    "dora": {"rank": 2, "alpha": 4, "variant": "dora"},
    "dora with dropout": {"rank": 2, "variant": "dora", "dropout": 0.4},
    "ia3": {"variant": "ia3"},
    "ia3 of inputs": {"variant": "ia3", "feedforward": ["dense", "turned", "filter", "head"]},
}


def outputs(model, feeds):
    """The logits of a model. ONNX Runtime's further optimizations multiply int8 weights by int8 activations, which rounds."""
    source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return onnxruntime.InferenceSession(source, options).run(None, {"ids": feeds["ids"]})[0]


def array(model, name):
    return model.graph.initializers[name].const_value.numpy()


EACH_VARIANT = pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in ("lora", "dora", "ia3 of inputs") else pytest.mark.slow) for name in VARIANTS],
)


@functools.cache
def trained(variant: str, steps: int = 4) -> burnish.Session:
    model = surgery.lora(layered_model(), "*", **VARIANTS[variant])
    session = burnish.Session(burnish.compile(model, optimizer="adamw:lr=0.05"))
    for _ in range(steps):
        session.step(batch())
    return session


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_computes_what_it_did_before_until_a_step_is_taken(variant):
    before = outputs(ir.from_proto(layered_model()), batch())
    program = trained(variant).program
    kept = export_inference(program, program.initial_state(), merge=False)
    np.testing.assert_allclose(outputs(kept, batch()), before, rtol=1e-5, atol=1e-6)
    assert [adapter.layer for adapter in read_adapters(program.metadata).adapters] == list(LAYERS)


@pytest.mark.slow
@EACH_VARIANT
def test_adapters_alone_train_and_have_slots(variant):
    session = trained(variant)
    names = read_adapters(session.program.metadata).parameters
    start, state = session.program.initial_state(), session.state()
    changed = {name for name in state if not np.array_equal(start[name], state[name])}
    assert {f"param/{name}" for name in names} <= changed
    for name in start:
        if name.startswith("param/") and name.removeprefix("param/") not in names:
            assert start[name].tobytes() == state[name].tobytes()
    slots = {name for name in state if name.startswith("opt/")}
    assert slots == {f"opt/{slot}/{name}" for slot in ("first_moment", "second_moment") for name in names}


@pytest.mark.slow
@EACH_VARIANT
def test_an_export_is_merged_and_has_the_names_of_the_file(variant, tmp_path):
    session = trained(variant)
    path = session.export(tmp_path / "merged.onnx")
    kept = session.export(tmp_path / "kept.onnx", adapters="kept")
    np.testing.assert_allclose(outputs(path, batch()), outputs(kept, batch()), rtol=1e-5, atol=2e-6)
    merged, base = onnx.load(path), surgery.rename(layered_model(), {})
    shapes = {tensor.name: tuple(tensor.dims) for tensor in merged.graph.initializer}
    for name in ("words", "dense", "turned", "filter", "head"):
        assert shapes[f"{name}.weight"] == array(base, f"{name}.weight").shape
    assert not any("lora" in name or "ia3" in name for name in shapes)
    assert ADAPTERS.key not in {entry.key for entry in merged.metadata_props}
    again = burnish.compile(kept)
    assert again.options["trainable"] == session.program.options["trainable"]
    state = session.state()
    assert all(np.array_equal(again.weights[name], state[name]) for name in state if name.startswith("param/"))


@pytest.mark.slow
def test_parameters_begin_as_those_of_peft():
    model = surgery.lora(layered_model(), "*", rank=4, seed=3)
    for name, inputs in (("dense.lora_A.weight", 8), ("turned.lora_A.weight", 8), ("filter.lora_A.weight", 24)):
        drawn, limit = array(model, name), 1 / math.sqrt(inputs)
        assert np.abs(drawn).max() <= limit
        assert np.isclose(drawn.std(), limit / math.sqrt(3), rtol=0.4)
    assert not array(model, "words.lora_embedding_A").any()
    assert np.isclose(array(model, "words.lora_embedding_B").std(), 1, rtol=0.4)
    for name in ("dense.lora_B.weight", "head.lora_B.weight", "filter.lora_B.weight"):
        assert not array(model, name).any()
    dora = surgery.lora(layered_model(), ["dense", "filter", "words", "head"], variant="dora")
    weights = {name: array(dora, f"{name}.weight") for name in ("dense", "filter", "words", "head")}
    for name, axes in (("dense", 0), ("filter", (1, 2)), ("words", 0), ("head", 1)):
        lengths = np.sqrt((weights[name].astype(np.float64) ** 2).sum(axis=axes))
        np.testing.assert_allclose(array(dora, f"{name}.lora_magnitude_vector"), lengths, rtol=1e-6)
    assert (array(surgery.lora(layered_model(), "dense", variant="ia3"), "dense.ia3_l") == 1).all()


def test_seeds_draw_apart():
    one, other, same = (array(surgery.lora(layered_model(), "dense", seed=seed), "dense.lora_A.weight") for seed in (0, 1, 0))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    "pattern",
    ["dense", "dense.weight", "dense_product", "den*", ["dense"]],
    ids=["layer", "initializer", "node", "wildcard", "list"],
)
def test_patterns_name_layers_nodes_and_initializers(pattern):
    adapters = read_adapters(surgery.lora(layered_model(), pattern).metadata_props).adapters
    assert [adapter.layer for adapter in adapters] == ["dense"]


def test_what_else_is_to_train_is_kept_with_the_adapters(tmp_path):
    model = surgery.lora(layered_model(quantized=False), ["dense", "words"], rank=2, also_trained="head.*")
    program = burnish.compile(model, optimizer="sgd:lr=0.1")
    assert {"head.weight", "head.bias"} < set(program.options["trainable"])
    session = burnish.Session(program)
    session.step(batch())
    assert not np.array_equal(session.state()["param/head.weight"], program.weights["param/head.weight"])
    path = session.export(tmp_path / "merged.onnx")
    np.testing.assert_allclose(outputs(path, batch()), session.predict(batch())["logits"], rtol=1e-5, atol=1e-6)


def tied_model() -> onnx.ModelProto:
    """A table that looks words up and, transposed, scores them."""
    model = layered_model(quantized=False)
    del model.graph.node[3:], model.graph.output[:]
    helper = onnx.helper
    model.graph.node.extend(
        [
            helper.make_node("Transpose", ["words.weight"], ["turned_words"], perm=[1, 0]),
            helper.make_node("ReduceMean", ["dense_sum"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("MatMul", ["mean", "turned_words"], ["logits"], "score"),
        ]
    )
    model.graph.output.append(helper.make_tensor_value_info("logits", 1, ["N", 11]))
    return model


@pytest.mark.slow
def test_a_tied_weight_stays_for_what_has_no_adapter(tmp_path):
    """Merged into the table, the adapter of the lookup would change the scores too."""
    session = burnish.Session(burnish.compile(surgery.lora(tied_model(), "look_up", rank=2), optimizer="sgd:lr=0.5"))
    for _ in range(3):
        session.step(batch())
    path = session.export(tmp_path / "merged.onnx")
    np.testing.assert_allclose(outputs(path, batch()), session.predict(batch())["logits"], rtol=1e-5, atol=1e-6)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    assert np.array_equal(weights["words.weight"], session.program.weights["param/words.weight"])
    assert not np.array_equal(weights["words.merged_weight"], weights["words.weight"])


@pytest.mark.slow
def test_both_readers_of_a_tied_weight_have_adapters_of_their_own(tmp_path):
    model = surgery.lora(tied_model(), ["look_up", "score"], rank=2)
    session = burnish.Session(burnish.compile(model, optimizer="sgd:lr=0.5"))
    assert [adapter.layer for adapter in read_adapters(model.metadata_props).adapters] == ["words", "score"]
    for _ in range(3):
        session.step(batch())
    path = session.export(tmp_path / "merged.onnx")
    np.testing.assert_allclose(outputs(path, batch()), session.predict(batch())["logits"], rtol=1e-5, atol=1e-6)


def convolution(groups: int, outputs: int = 4) -> onnx.ModelProto:
    helper, generator = onnx.helper, np.random.default_rng(0)
    weight = generator.normal(size=(outputs, 8 // groups, 3, 3)).astype(np.float32) * 0.3
    nodes = [
        helper.make_node("Conv", ["x", "filter.weight"], ["y"], "filter", group=groups, strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["y"], ["p"]),
        helper.make_node("Flatten", ["p"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "convolution",
        [helper.make_tensor_value_info("x", 1, ["N", 8, 6, 6])],
        [helper.make_tensor_value_info("logits", 1, ["N", outputs])],
        [onnx.numpy_helper.from_array(weight, "filter.weight")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rank": 4}, {"variant": "ia3", "feedforward": "filter"}], ids=["lora", "ia3 of inputs"])
def test_a_convolution_in_groups_is_merged_within_its_groups(options, tmp_path):
    session = burnish.Session(burnish.compile(surgery.lora(convolution(2), "filter", **options), optimizer="sgd:lr=1"))
    x = np.random.default_rng(1).normal(size=(3, 8, 6, 6)).astype(np.float32)
    for _ in range(3):
        session.step({"x": x, "labels": np.array([0, 1, 3])})
    path = session.export(tmp_path / "merged.onnx")
    merged = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0]
    np.testing.assert_allclose(merged, session.predict({"x": x})["logits"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(merged, burnish.Session(burnish.compile(convolution(2))).predict({"x": x})["logits"], atol=1e-3)


@pytest.mark.slow
def test_a_depthwise_convolution_computes_what_it_did_without_its_adapter(tmp_path):
    """Its default is of the least rank that each group can read a part of."""
    model = convolution(8, outputs=8)
    session = burnish.Session(burnish.compile(surgery.lora(model, "filter", rank=8), optimizer="sgd:lr=0.1"), threads=1)
    x = np.random.default_rng(1).normal(size=(3, 8, 6, 6)).astype(np.float32)
    session.step({"x": x, "labels": np.array([0, 1, 3])})
    session.step({"x": x, "labels": np.array([0, 1, 3])})
    path = session.export(tmp_path / "apart.onnx", adapters="apart")
    settings, options, adapter = onnxruntime.SessionOptions(), onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    settings.log_severity_level = 3
    runtime = onnxruntime.InferenceSession(path, settings)
    base = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(runtime.run(None, {"x": x})[0], base, rtol=1e-5, atol=1e-6)
    adapter.Load(str(path.with_suffix(".onnx_adapter")))
    options.add_active_adapter(adapter)
    adapted = runtime.run(None, {"x": x}, options)[0]
    np.testing.assert_allclose(adapted, session.predict({"x": x})["logits"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(adapted, base, atol=1e-4)


def test_the_lengths_of_dora_are_those_of_a_weight_that_its_gemm_scales():
    model = layered_model(quantized=False)
    model.graph.node[-1].attribute.append(onnx.helper.make_attribute("alpha", 0.5))
    adapted = surgery.lora(model, "head", rank=2, variant="dora")
    program = burnish.compile(adapted)
    kept = export_inference(program, program.initial_state(), merge=False)
    before = outputs(ir.from_proto(model), batch())
    np.testing.assert_allclose(outputs(kept, batch()), before, rtol=1e-5, atol=1e-6)


REFUSED = {
    "nothing matches": (
        {"patterns": "dens"},
        "patterns: 'dens' matches no layer of the model (did you mean 'dense'?); those that can be adapted are: 'words', 'dense'",
    ),
    "another node": (
        {"patterns": "dense.bias"},
        "matches the initializer 'dense.bias', which is no weight of a MatMul, Gemm, Conv",
    ),
    "no patterns": ({"patterns": []}, "patterns must be a name or pattern of layers, or a list of them, not []"),
    "rank": ({"patterns": "*", "rank": 0}, "lora: rank=0: give a whole number of 1 or more"),
    "alpha": ({"patterns": "*", "alpha": 0}, "lora: alpha=0: give a number above 0"),
    "variant": (
        {"patterns": "*", "variant": "dorra"},
        "lora: variant='dorra' (did you mean 'dora'?): choose among 'lora', 'dora'",
    ),
    "dropout": ({"patterns": "*", "dropout": 1.0}, "lora: dropout=1.0: give the share that is dropped, from 0 to below 1"),
    "rslora": ({"patterns": "*", "rslora": 1}, "lora: rslora=1: give True or False"),
    "feedforward of a lora": ({"patterns": "*", "feedforward": "head"}, "lora: feedforward is for variant='ia3'"),
    "dropout of an ia3": (
        {"patterns": "*", "variant": "ia3", "dropout": 0.1},
        "lora: variant='ia3' has no rank: leave rank, alpha, dropout",
    ),
    "alpha of an ia3": ({"patterns": "*", "variant": "ia3", "alpha": 2}, "lora: variant='ia3' has no rank: leave rank, alpha"),
    "rank of an ia3": ({"patterns": "*", "variant": "ia3", "rank": 2}, "lora: variant='ia3' has no rank: leave rank, alpha"),
    "feedforward beside": (
        {"patterns": "dense", "variant": "ia3", "feedforward": "head"},
        "lora: feedforward matches Gemm 'classify' (output 'logits'), which patterns does not: let patterns match it too",
    ),
    "feedforward of a table": (
        {"patterns": "*", "variant": "ia3", "feedforward": "words"},
        "which reads indices: leave it out of feedforward",
    ),
    "also trained": ({"patterns": "*", "also_trained": "haed.*"}, "lora: also_trained: 'haed.*' matches no weight"),
    "trained twice": (
        {"patterns": "*", "also_trained": "head.*"},
        "also_trained matches 'head.weight', beside which an adapter is to stand, and which then stays as it is",
    ),
    "groups": ({"patterns": "*", "rank": 3, "model": convolution(2)}, "lora: rank=3 does not fit Conv 'filter' (output 'y')"),
    "dora in groups": (
        {"patterns": "*", "rank": 4, "variant": "dora", "model": convolution(2)},
        "'filter', which has 2 groups: choose 'lora', or leave",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adapted_is_refused_by_name(case):
    options, message = REFUSED[case]
    options = dict(options)
    with pytest.raises(ConfigurationError) as caught:
        surgery.lora(options.pop("model", layered_model()), options.pop("patterns"), **options)
    assert message in str(caught.value)


def test_a_computed_weight_is_refused_by_its_node():
    model = layered_model(quantized=False)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([2.0]), "factor"))
    model.graph.node[1].input[1] = "doubled"
    model.graph.node.insert(1, onnx.helper.make_node("Mul", ["dense.weight", "factor"], ["doubled"], "double"))
    with pytest.raises(ConfigurationError) as caught:
        surgery.lora(model, "dense_product")
    assert "'dense_product' matches MatMul 'dense_product' (output 'product'), which cannot be adapted" in str(caught.value)
    assert "its weight 'doubled' is computed by Mul 'double' (output 'doubled') from 'factor', 'dense.weight'" in str(
        caught.value
    )
    assert "dense" not in [adapter.layer for adapter in read_adapters(surgery.lora(model, "*").metadata_props).adapters]


def test_a_layer_has_one_adapter():
    model = surgery.lora(layered_model(), "dense")
    with pytest.raises(ConfigurationError, match="the layer 'dense' has an adapter, or belongs to one"):
        surgery.lora(model, "dense")
    both = surgery.lora(model, "head", rank=2, variant="dora")
    assert [adapter.variant for adapter in read_adapters(both.metadata_props).adapters] == ["lora", "dora"]


def test_a_weight_of_zeros_has_no_direction():
    model = layered_model(quantized=False)
    zeros = np.zeros((8, 8), np.float32)
    next(tensor for tensor in model.graph.initializer if tensor.name == "dense.weight").CopyFrom(
        onnx.numpy_helper.from_array(zeros, "dense.weight")
    )
    with pytest.raises(ConfigurationError, match="output 0 of the layer 'dense' has weights of zero, and no direction"):
        surgery.lora(model, "dense", variant="dora")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "the model's metadata 'burnish.adapters' cannot be read"),
        (json.dumps({"version": 1, "adapters": [{"layer": 3}], "also_trained": []}), "cannot be read"),
        (json.dumps({"version": 9, "adapters": [], "also_trained": []}), "noted in version 9, and this burnish reads up to 1"),
    ],
)
def test_a_note_of_adapters_that_cannot_be_read_is_refused(entry, message):
    model = surgery.lora(layered_model(), "dense")
    model.metadata_props[ADAPTERS.key] = entry
    with pytest.raises(ModelError, match=message):
        burnish.compile(model)


def test_an_adapter_that_was_changed_is_not_merged():
    model = surgery.lora(layered_model(), "dense")
    model.metadata_props[ADAPTERS.key] = model.metadata_props[ADAPTERS.key].replace("product:base", "another")
    with pytest.raises(ModelError, match=r"the adapter of the layer 'dense' is not as burnish.surgery.lora put it: 'another'"):
        surgery.merge_adapters(model)


def noted(node: onnx.NodeProto, module: str) -> onnx.NodeProto:
    """A node with the note that PyTorch's newer exporter leaves of its module."""
    scopes = repr(["", *module.split("."), module, "node"])
    node.metadata_props.append(onnx.StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value=scopes))
    return node


def language_model(table: str, modules: tuple[str, str] | None = ("model.embed_tokens", "model.lm_head")) -> onnx.ModelProto:
    """A model that looks tokens up in a table, mixes them, and scores them by the same table.

    Args:
        table: what the exporter calls the initializer.
        modules: what it notes with the lookup and with the product; None: nothing.
    """
    helper, generator = onnx.helper, np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", [table, "ids"], ["embedded"], "node_embedding"),
        helper.make_node("MatMul", ["embedded", "mix.weight"], ["mixed"], "node_mix"),
        helper.make_node("Tanh", ["mixed"], ["active"]),
        helper.make_node("Transpose", [table], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["active", "turned"], ["logits"], "node_linear"),
    ]
    if modules is not None:
        noted(nodes[0], modules[0])
        noted(nodes[4], modules[1])
    arrays = {table: (11, 8), "mix.weight": (8, 8)}
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", 7, ["N", 5])],
        [helper.make_tensor_value_info("logits", 1, ["N", 5, 11])],
        [onnx.numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name) for name, shape in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def adapted_operators(model, patterns) -> dict[str, str]:
    """Layer -> operator of the adapters that patterns give."""
    adapters = read_adapters(surgery.lora(model, patterns, rank=2).metadata_props).adapters
    return {adapter.layer: adapter.operator for adapter in adapters}


@pytest.mark.parametrize("table", ["model.lm_head.weight", "model.embed_tokens.weight", "tied"])
def test_modules_that_share_a_weight_are_told_apart_by_their_nodes(table):
    """PEFT's target_modules=["lm_head"] adapts the output layer, whatever the exporter calls the table."""
    model = language_model(table)
    assert adapted_operators(model, "model.lm_head") == {"model.lm_head": "MatMul"}
    assert adapted_operators(model, "*embed_tokens*") == {"model.embed_tokens": "Gather"}
    assert adapted_operators(model, ["model.embed_tokens.weight", "*lm_head*"]) == {
        "model.embed_tokens": "Gather",
        "model.lm_head": "MatMul",
    }


@pytest.mark.parametrize(
    ("table", "operator"),
    [("lm_head.weight", "MatMul"), ("embed_out.weight", "MatMul"), ("wte.weight", "Gather"), ("shared.weight", "Gather")],
)
def test_without_notes_the_head_is_the_product_and_the_embedding_the_lookup(table, operator):
    layer = table.removesuffix(".weight")
    assert adapted_operators(language_model(table, modules=None), layer) == {layer: operator}


@pytest.mark.slow
def test_weights_without_names_are_those_of_their_modules():
    """A head that the exporter transposed ahead of time is called ``val_451``, or ``onnx::MatMul_768``."""
    for name, node_name in (("val_451", None), ("onnx::MatMul_768", "/model/mix/MatMul")):
        model = language_model("table")
        model.graph.node[1].input[1] = name
        model.graph.initializer[1].name = name
        if node_name is None:
            noted(model.graph.node[1], "model.mix")
        else:
            model.graph.node[1].name = node_name
        assert adapted_operators(model, "model.mix") == {"model.mix": "MatMul"}
        for pattern in ("model.mix", "model.mix.weight"):
            assert f"{name}_mask" in surgery.prune(model, 0.5, layers=pattern).graph.initializers
        program = burnish.compile(model, trainable="model.mix.*", loss="mse")
        assert program.options["trainable"] == [name]
        frozen = burnish.optim.groups(burnish.optim.sgd(lr=0.1), {"model.mix.weight": "frozen"})
        session = burnish.Session(burnish.compile(model, loss="mse", optimizer=frozen), threads=1)
        session.step({"ids": np.arange(10).reshape(2, 5), "targets": np.zeros((2, 5, 11), np.float32)})
        after, before = session.state(), session.program.weights
        assert np.array_equal(after[f"param/{name}"], before[f"param/{name}"])
        assert not np.array_equal(after["param/table"], before["param/table"])


def built_model() -> onnx.ModelProto:
    """Two layers as ONNX Runtime's builder of language models calls them."""
    helper, generator = onnx.helper, np.random.default_rng(0)
    names = ["model.layers.0.attn.o_proj", "model.layers.0.mlp.down_proj"]
    nodes = [
        helper.make_node("MatMul", [x, f"{name}.MatMul.weight"], [y], f"/{name.replace('.', '/').replace('/0', '.0')}/MatMul")
        for name, x, y in zip(names, "xh", "hy", strict=True)
    ]
    weights = [onnx.numpy_helper.from_array(generator.normal(size=(6, 6)).astype("f"), f"{name}.MatMul.weight") for name in names]
    graph = helper.make_graph(
        nodes,
        "built",
        [helper.make_tensor_value_info("x", 1, ["n", 6])],
        [helper.make_tensor_value_info("y", 1, ["n", 6])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize(
    ("pattern", "layer"),
    [
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
        ("model.layers.0.mlp.down_proj.MatMul", "model.layers.0.mlp.down_proj"),
        ("model.layers.0.self_attn.o_proj", "model.layers.0.attn.o_proj"),
        ("*.o_proj", "model.layers.0.attn.o_proj"),
    ],
)
def test_what_builders_append_to_names_hides_no_layer(pattern, layer):
    assert list(adapted_operators(built_model(), pattern)) == [layer]
    pruned = surgery.prune(built_model(), 0.5, layers=pattern)
    assert [name for name in pruned.graph.initializers if name.endswith("_mask")] == [f"{layer}.MatMul.weight_mask"]


def test_a_name_of_several_layers_is_refused_with_their_names():
    model = built_model()
    for node in model.graph.node:
        noted(node, "model.block")
    with pytest.raises(ConfigurationError, match=r"'model\.block' names 2 layers: say which, of 'model\.layers"):
        surgery.lora(model, "model.block")
    with pytest.raises(ConfigurationError, match=r"did you mean 'model.layers.0.mlp.down_proj'\?"):
        surgery.lora(model, "down_proj")
    assert len(adapted_operators(model, "*")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["branches", "scanned"])
@EACH_VARIANT
def test_layers_in_bodies_are_adapted_and_merged(kind, variant, tmp_path):
    settings = {key: value for key, value in VARIANTS[variant].items() if key != "feedforward"}
    if "feedforward" in VARIANTS[variant]:
        settings["feedforward"] = "*"
    original, given = layers_in_bodies.model(kind), layers_in_bodies.batch(kind)
    adapted = surgery.lora(original, **settings)
    layers = {adapter.weight for adapter in read_adapters(adapted.metadata_props).adapters}
    assert layers == {*layers_in_bodies.INSIDE[kind], *layers_in_bodies.OUTSIDE[kind]}
    session = burnish.Session(burnish.compile(adapted, optimizer="adamw:lr=0.05"))
    feeds = {name: array for name, array in given.items() if name != "labels"}
    before = onnxruntime.InferenceSession(original.SerializeToString()).run(None, feeds)[0]
    np.testing.assert_allclose(session.predict(feeds)["logits"], before, rtol=1e-5, atol=1e-6)
    start = session.state()
    losses = [session.step(given)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    state = session.state()
    for name in (*layers_in_bodies.INSIDE[kind], *layers_in_bodies.OUTSIDE[kind]):
        np.testing.assert_array_equal(state[f"param/{name}"], start[f"param/{name}"])
    session.export(tmp_path / "merged.onnx")
    merged = onnx.load(tmp_path / "merged.onnx")
    assert not [tensor.name for tensor in merged.graph.initializer if "lora" in tensor.name or "ia3" in tensor.name]
    after = onnxruntime.InferenceSession(tmp_path / "merged.onnx").run(None, feeds)[0]
    np.testing.assert_allclose(after, session.predict(feeds)["logits"], rtol=1e-4, atol=1e-5)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.slow
def test_an_adapted_scan_computes_what_the_merged_weights_do():
    """The loss of a step with A and B is that of the model whose weights are W + A B."""
    given = layers_in_bodies.batch("scanned")
    adapted = surgery.lora(layers_in_bodies.model("scanned"), "input_weight", rank=2)
    rng = np.random.default_rng(0)
    drawn = {part: rng.normal(size=shape).astype(np.float32) * 0.3 for part, shape in (("A", (8, 2)), ("B", (2, 8)))}
    program = burnish.compile(adapted, optimizer="sgd")
    named = {name: drawn["A" if "lora_A" in name else "B"] for name in program.initial_state() if "lora_" in name}
    session = burnish.Session(program, state={**program.initial_state(), **named})
    whole = layers_in_bodies.model("scanned")
    weight = next(tensor for tensor in whole.graph.initializer if tensor.name == "input_weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + drawn["A"] @ drawn["B"], weight.name))
    expected = burnish.Session(burnish.compile(whole, optimizer="sgd")).step(given)["loss"]
    assert session.step(given)["loss"] == pytest.approx(expected, rel=1e-5)
