"""Adapters of q_proj, k_proj and v_proj on a file whose builder put these into one layer: what they add, and what is refused."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

import burnish
from burnish import surgery
from burnish.errors import CarryOverWarning, ConfigurationError

INPUTS, OUTPUTS = 6, {"q": 8, "k": 4, "v": 4}
GENERATOR = np.random.default_rng(0)
WEIGHT = GENERATOR.normal(size=(sum(OUTPUTS.values()), INPUTS)).astype(np.float32)
X = GENERATOR.normal(size=(3, INPUTS)).astype(np.float32)
PACKED = "model.layers.0.attn.qkv_proj"


def built() -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", f"{PACKED}.MatMul.weight"], ["y"], "/model/layers.0/attn/qkv_proj/MatMul")
    graph = helper.make_graph(
        [node],
        "built",
        [helper.make_tensor_value_info("x", 1, ["n", INPUTS])],
        [helper.make_tensor_value_info("y", 1, ["n", len(WEIGHT)])],
        [numpy_helper.from_array(np.ascontiguousarray(WEIGHT.T), f"{PACKED}.MatMul.weight")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def folder_of(path, ranks, outputs=None, magnitudes=False, **settings):
    """A folder of PEFT, and what its adapters add to each output before alpha / rank."""
    outputs = outputs or OUTPUTS
    arrays, added = {}, {}
    for part, rank in ranks.items():
        a = GENERATOR.normal(size=(rank, INPUTS)).astype(np.float32)
        b = GENERATOR.normal(size=(outputs[part], rank)).astype(np.float32)
        name = f"base_model.model.model.layers.0.self_attn.{part}_proj"
        arrays |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        if magnitudes:
            arrays[f"{name}.lora_magnitude_vector"] = np.ones(outputs[part], np.float32)
        added[part] = b @ a
    save_file(arrays, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | settings))
    return path, added


def expected(added, scales):
    parts = [scales[part] * added[part] if part in added else np.zeros((count, INPUTS)) for part, count in OUTPUTS.items()]
    return X @ (WEIGHT + np.concatenate(parts)).T


@pytest.mark.parametrize("parts", ["qkv", "qv", "q", "k", "v"])
def test_each_output_gets_what_its_own_adapter_adds(parts, tmp_path):
    folder, added = folder_of(tmp_path, dict.fromkeys(parts, 2))
    with pytest.warns(CarryOverWarning, match=r"are one beside '.*\.self_attn\.qkv_proj', of the sum of their ranks"):
        model = surgery.load_peft(built(), folder)
    with burnish.Session(burnish.compile(model, loss="mse"), threads=1) as session:
        got = session.predict({"x": X})["y"]
    np.testing.assert_allclose(got, expected(added, dict.fromkeys(parts, 2.0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scalings_of_their_own_stay(rslora, tmp_path):
    ranks = {"q": 2, "k": 3, "v": 1}
    folder, added = folder_of(tmp_path, ranks, alpha_pattern={"k_proj": 6}, use_rslora=rslora)
    with pytest.warns(CarryOverWarning):
        model = surgery.load_peft(built(), folder)
    alphas = {"q": 4, "k": 6, "v": 4}
    scales = {part: alphas[part] / (np.sqrt(rank) if rslora else rank) for part, rank in ranks.items()}
    with burnish.Session(burnish.compile(model, loss="mse"), threads=1) as session:
        got = session.predict({"x": X})["y"]
        np.testing.assert_allclose(got, expected(added, scales), rtol=1e-5, atol=1e-5)
        session.export(tmp_path / "again", adapters="peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = surgery.load_peft(built(), tmp_path / "again")
    with burnish.Session(burnish.compile(again, loss="mse"), threads=1) as session:
        np.testing.assert_allclose(session.predict({"x": X})["y"], got, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"ranks": {"q": 2, "v": 2}, "outputs": {"q": 8, "v": 5}},
            r"'model\.layers\.0\.attn\.qkv_proj' of 16 outputs, which those of the adapters do not make up \('.*q_proj' has 8, "
            r"'.*v_proj' has 5\): the adapters are for a model of other extents",
        ),
        (
            {"ranks": {"q": 2}, "magnitudes": True, "use_dora": True},
            r"'.*q_proj' packed with others in the layer 'model\.layers\.0\.attn\.qkv_proj', .* which 'dora' is not: merge them",
        ),
    ],
)
def test_what_cannot_be_put_together_is_refused(arguments, message, tmp_path):
    folder, _ = folder_of(tmp_path, **arguments)
    with pytest.raises(ConfigurationError, match=message):
        surgery.load_peft(built(), folder)
