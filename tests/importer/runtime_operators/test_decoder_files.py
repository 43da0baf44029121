"""A decoder as onnxruntime-genai writes it: what the runtime computes of the file, and training without its cache."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import burnish
from burnish.errors import UntrainedWeightsWarning
from burnish.importer import InitializerKind, classify_initializers
from oracles.decoder_files import KV_HEADS, LAYERS, SIZE, VOCABULARY, decoder
from oracles.onnxruntime_outputs import onnxruntime_outputs

IDS = np.random.default_rng(0).integers(0, VOCABULARY, (3, 6))
MASK = np.ones((3, 6), np.int64)
TOKENS = {"input_ids": IDS, "attention_mask": MASK}
NO_CACHE = {"past_sequence_length": 0}


def cache(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    names = [f"past_key_values.{layer}.{name}" for layer in range(LAYERS) for name in ("key", "value")]
    return {name: rng.normal(size=(3, KV_HEADS, length, SIZE)).astype(np.float32) for name in names}


def with_scores(file: onnx.ModelProto) -> onnx.ModelProto:
    """The logits with their classes along the axis where a loss expects them."""
    file.graph.node.append(helper.make_node("Transpose", ["logits"], ["scores"], perm=[0, 2, 1]))
    file.graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, None))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [True, False])
def test_the_numbers_of_the_runtime(quantized: bool) -> None:
    file = decoder(quantized)
    feeds = TOKENS | cache(0)
    expected = onnxruntime_outputs(file, feeds)
    for actual in (
        onnxruntime_outputs(burnish.load(file), feeds),
        onnxruntime_outputs(burnish.load(file, bind=NO_CACHE), TOKENS),
    ):
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_one_more_token_after_a_cache() -> None:
    file = decoder()
    feeds = {"input_ids": IDS[:, :1], "attention_mask": np.ones((3, 5), np.int64)} | cache(4)
    expected, actual = onnxruntime_outputs(file, feeds), onnxruntime_outputs(burnish.load(file), feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-4, atol=2e-5, err_msg=name)


def test_without_a_cache_the_program_has_no_such_input() -> None:
    model = burnish.load(decoder(), bind=NO_CACHE)
    assert [value.name for value in model.graph.inputs] == list(TOKENS)
    assert not {"GatherElements", "ScatterElements"} & {node.op_type for node in model.graph}


@pytest.mark.slow
def test_scales_and_tables_of_angles_are_no_weights() -> None:
    kinds = classify_initializers(burnish.load(decoder()))
    weights = {name for name, kind in kinds.items() if kind is InitializerKind.WEIGHT}
    norms = {"norm.0", "norm.0.middle", "norm.1", "norm.1.middle", "norm.2", "model.embed_tokens"}
    assert weights == {f"{name}.weight" for name in norms} | {"lm_head.MatMul.weight"}
    assert kinds["layers.0.q_proj.weight_scales"] is kinds["cos_cache"] is InitializerKind.CONSTANT


@pytest.mark.slow
def test_tables_for_short_and_long_sequences_are_no_weights() -> None:
    """Two pairs of tables, of which a branch chooses by the length."""
    file = decoder()
    tables = {tensor.name: tensor for tensor in file.graph.initializer if tensor.name.endswith("_cache")}
    branches = {}
    for name in ("then_branch", "else_branch"):
        values = [
            helper.make_tensor_value_info(f"{table}_{name}", TensorProto.FLOAT, tensor.dims) for table, tensor in tables.items()
        ]
        nodes = [helper.make_node("Constant", [], [f"{table}_{name}"], value=tensor) for table, tensor in tables.items()]
        branches[name] = helper.make_graph(nodes, name, [], values)
    for tensor in tables.values():
        file.graph.initializer.remove(tensor)
    limit = helper.make_node("Constant", [], ["limit"], value=helper.make_tensor("limit", TensorProto.INT32, [], [8]))
    at = next(index for index, node in enumerate(file.graph.node) if "total" in node.output) + 1
    file.graph.node.insert(at, limit)
    file.graph.node.insert(at + 1, helper.make_node("Greater", ["total", "limit"], ["is_long"]))
    file.graph.node.insert(at + 2, helper.make_node("If", ["is_long"], list(tables), **branches))
    feeds = TOKENS | cache(0)
    expected = onnxruntime_outputs(decoder(), feeds)["logits"]
    loaded = burnish.load(file)
    np.testing.assert_allclose(onnxruntime_outputs(loaded, feeds)["logits"], expected, rtol=1e-4, atol=2e-5)
    kinds = classify_initializers(loaded)
    assert not {name for name, kind in kinds.items() if kind is InitializerKind.WEIGHT and "cache" in name}


@pytest.mark.slow
def test_it_trains_alike_on_every_engine() -> None:
    labels = np.roll(IDS, -1, 1)
    with pytest.warns(UntrainedWeightsWarning, match=r"14 weights stay as they are.*weight_Q4.*: integers"):
        program = burnish.compile(
            with_scores(decoder()), loss="cross_entropy", outputs="scores", optimizer="sgd:lr=0.1", metrics=(), bind=NO_CACHE
        )
    losses = {}
    for engine in ("onnxruntime", "torch"):
        session = burnish.Session(program, engine=engine)
        losses[engine] = [session.step(TOKENS | {"labels": labels})["loss"] for _ in range(4)]
    assert losses["onnxruntime"] == sorted(losses["onnxruntime"], reverse=True)
    np.testing.assert_allclose(losses["torch"], losses["onnxruntime"], rtol=1e-5)


@pytest.mark.slow
def test_a_cache_that_is_given_trains_too() -> None:
    file = decoder(quantized=False)
    feeds = {"input_ids": IDS[:, :1], "attention_mask": np.ones((3, 5), np.int64)} | cache(4)
    logits = onnxruntime_outputs(file, feeds)["logits"][:, 0].astype(np.float64)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(3), IDS[:, 1]]
    model = with_scores(file)
    program = burnish.compile(model, loss="cross_entropy", outputs="scores", optimizer="sgd:lr=0.1", metrics=())
    session = burnish.Session(program)
    losses = [session.step(feeds | {"labels": IDS[:, 1:2]})["loss"] for _ in range(3)]
    np.testing.assert_allclose(losses[0], expected.mean(), rtol=1e-5)
    assert losses == sorted(losses, reverse=True)
