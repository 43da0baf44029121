"""Adapters in one file, as kohya's scripts, LyCORIS and diffusers write them: beside the right layers, with the right numbers."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import burnish
from burnish import surgery
from burnish.adapters.lora_files import name_in_diffusers
from burnish.errors import CarryOverWarning, CheckpointError, ConfigurationError

QUERY = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
OUT = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0"
FILTER = "down_blocks.0.resnets.0.conv1"
GENERATOR = np.random.default_rng(0)
WEIGHTS = {
    QUERY: GENERATOR.normal(size=(8, 8)).astype(np.float32),
    OUT: GENERATOR.normal(size=(8, 8)).astype(np.float32),
    FILTER: GENERATOR.normal(size=(6, 4, 3, 3)).astype(np.float32),
}
X = GENERATOR.normal(size=(3, 4, 2, 4)).astype(np.float32)


def denoiser() -> onnx.ModelProto:
    """A convolution and two linear layers, whose weights the exporter transposed or kept."""
    nodes = [
        helper.make_node("Conv", ["x", f"{FILTER}.weight"], ["filtered"], f"/{FILTER}/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Reshape", ["filtered", "extents"], ["rows"]),
        helper.make_node("MatMul", ["rows", "onnx::MatMul_7"], ["queries"], f"/{path_of(QUERY)}/MatMul"),
        helper.make_node("Transpose", [f"{OUT}.weight"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["queries", "turned"], ["y"], "node_linear"),
    ]
    arrays = {
        f"{FILTER}.weight": WEIGHTS[FILTER],
        "onnx::MatMul_7": np.ascontiguousarray(WEIGHTS[QUERY].T),
        f"{OUT}.weight": WEIGHTS[OUT],
        "extents": np.array([0, -1, 8]),
    }
    graph = helper.make_graph(
        nodes,
        "denoiser",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6, 8])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def path_of(module: str) -> str:
    """A module as PyTorch's older exporter writes it into the names of nodes."""
    return re.sub(r"\.(?!\d)", "/", module)


def expected(**deltas: np.ndarray) -> np.ndarray:
    """What the denoiser computes with something added to its weights."""
    weights = {name: WEIGHTS[name] + deltas.get(short, 0) for name, short in ((QUERY, "query"), (OUT, "out"), (FILTER, "filter"))}
    model = denoiser()
    for tensor in model.graph.initializer:
        module = QUERY if tensor.name == "onnx::MatMul_7" else tensor.name.removesuffix(".weight")
        if module in weights:
            array = weights[module].T if module == QUERY else weights[module]
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), tensor.name))
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})[0]


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def kohya(module: str) -> str:
    return f"lora_unet_{module.replace('.', '_')}"


A, B = drawn(4, 8), drawn(8, 4, seed=2)
CONV_A, CONV_B = drawn(2, 4, 3, 3), drawn(6, 2, 1, 1, seed=2)
CORE, DOWN = drawn(2, 2, 3, 3, seed=5), drawn(2, 4, 1, 1, seed=6)
HADA = {"w1_a": drawn(8, 2), "w1_b": drawn(2, 8, seed=2), "w2_a": drawn(8, 2, seed=3), "w2_b": drawn(2, 8, seed=4)}
HADA_CONV = {"w1_a": drawn(6, 2), "w1_b": drawn(2, 36), "w2_a": drawn(6, 2, seed=3), "w2_b": drawn(2, 36, seed=4)}
HADA_CORE = {
    "t1": drawn(2, 2, 3, 3, seed=7),
    "w1_a": drawn(2, 6),
    "w1_b": drawn(2, 4, seed=2),
    "t2": drawn(2, 2, 3, 3, seed=8),
    "w2_a": drawn(2, 6, seed=3),
    "w2_b": drawn(2, 4, seed=4),
}
FLAT = CONV_B.reshape(6, 2) @ CONV_A.reshape(2, 36)


def hada(parts: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {f"{prefix}.hada_{name}": array for name, array in parts.items()} | {f"{prefix}.alpha": np.float32(1)}


def product_of_cores() -> np.ndarray:
    one, other = (np.einsum("ijkl,jr,ip->prkl", HADA_CORE[f"t{n}"], HADA_CORE[f"w{n}_b"], HADA_CORE[f"w{n}_a"]) for n in "12")
    return one * other


FILES = {
    "kohya": (
        {
            f"{kohya(QUERY)}.lora_down.weight": A,
            f"{kohya(QUERY)}.lora_up.weight": B,
            f"{kohya(QUERY)}.alpha": np.float32(2),
            f"{kohya(OUT)}.lora_down.weight": A,
            f"{kohya(OUT)}.lora_up.weight": B,
        },
        {"query": 2 / 4 * B @ A, "out": B @ A},
    ),
    "kohya's convolution": (
        {
            f"{kohya(FILTER)}.lora_down.weight": CONV_A,
            f"{kohya(FILTER)}.lora_up.weight": CONV_B,
            f"{kohya(FILTER)}.alpha": np.array([1], np.float32),
        },
        {"filter": 0.5 * FLAT.reshape(6, 4, 3, 3)},
    ),
    "a convolution with a core": (
        {
            f"{kohya(FILTER)}.lora_down.weight": DOWN,
            f"{kohya(FILTER)}.lora_mid.weight": CORE,
            f"{kohya(FILTER)}.lora_up.weight": CONV_B,
            f"{kohya(FILTER)}.alpha": np.float32(2),
        },
        {"filter": np.einsum("or,rskl,si->oikl", CONV_B[:, :, 0, 0], CORE, DOWN[:, :, 0, 0])},
    ),
    "a linear layer as a convolution of one pixel": (
        {f"{kohya(QUERY)}.lora_down.weight": A.reshape(4, 8, 1, 1), f"{kohya(QUERY)}.lora_up.weight": B.reshape(8, 4, 1, 1)},
        {"query": B @ A},
    ),
    "names of the original blocks": (
        {
            "lora_unet_input_blocks_1_0_in_layers_2.lora_down.weight": CONV_A,
            "lora_unet_input_blocks_1_0_in_layers_2.lora_up.weight": CONV_B,
        },
        {"filter": FLAT.reshape(6, 4, 3, 3)},
    ),
    "diffusers": ({f"unet.{QUERY}.lora_A.weight": A, f"unet.{QUERY}.lora_B.weight": B}, {"query": B @ A}),
    "diffusers in sixteen bits": (
        {f"unet.{QUERY}.lora_A.weight": A.astype(np.float16), f"unet.{QUERY}.lora_B.weight": B.astype(np.float16)},
        {"query": B.astype(np.float16).astype(np.float32) @ A.astype(np.float16).astype(np.float32)},
    ),
    "diffusers' processors": (
        {
            f"unet.{OUT.removesuffix('.to_out.0')}.processor.to_out_lora.down.weight": A,
            f"unet.{OUT.removesuffix('.to_out.0')}.processor.to_out_lora.up.weight": B,
            f"unet.{QUERY.removesuffix('.to_q')}.processor.to_q_lora.down.weight": A,
            f"unet.{QUERY.removesuffix('.to_q')}.processor.to_q_lora.up.weight": B,
        },
        {"query": B @ A, "out": B @ A},
    ),
    "diffusers' layers without a component": (
        {f"{QUERY}.lora_linear_layer.down.weight": A, f"{QUERY}.lora_linear_layer.up.weight": B, f"{QUERY}.alpha": np.float32(8)},
        {"query": 2 * B @ A},
    ),
    "LoHa": (hada(HADA, kohya(QUERY)), {"query": 0.5 * (HADA["w1_a"] @ HADA["w1_b"]) * (HADA["w2_a"] @ HADA["w2_b"])}),
    "LoHa of a convolution": (
        hada(HADA_CONV, kohya(FILTER)),
        {"filter": 0.5 * ((HADA_CONV["w1_a"] @ HADA_CONV["w1_b"]) * (HADA_CONV["w2_a"] @ HADA_CONV["w2_b"])).reshape(6, 4, 3, 3)},
    ),
    "LoHa with cores": (hada(HADA_CORE, kohya(FILTER)), {"filter": 0.5 * product_of_cores()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_files_are_added_to_the_weights_that_they_name(kind, tmp_path):
    tensors, deltas = FILES[kind]
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, tmp_path / "adapter.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = surgery.load_peft(denoiser(), tmp_path / "adapter.safetensors")
    session = burnish.Session(burnish.compile(model, loss="mse", optimizer="adamw:lr=0.01"), threads=1)
    wanted = expected(**deltas)
    np.testing.assert_allclose(session.predict({"x": X})["y"], wanted, rtol=1e-4, atol=1e-4)
    merged = session.export(tmp_path / "merged.onnx")
    np.testing.assert_allclose(onnxruntime.InferenceSession(merged).run(None, {"x": X})[0], wanted, rtol=1e-4, atol=1e-4)
    losses = [float(session.step({"x": X, "targets": np.zeros((3, 6, 8), np.float32)})["loss"]) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_the_alpha_that_diffusers_notes_in_the_header_holds(tmp_path):
    notes = {"unet.r": 4, "unet.lora_alpha": 8, "unet.use_rslora": True, "unet.alpha_pattern": {"attn1.to_out.0": 4}}
    tensors = {f"unet.{name}.lora_{part}.weight": array for name in (QUERY, OUT) for part, array in (("A", A), ("B", B))}
    save_file(tensors, tmp_path / "adapter.safetensors", metadata={"lora_adapter_metadata": json.dumps(notes)})
    session = burnish.Session(burnish.compile(surgery.load_peft(denoiser(), tmp_path / "adapter.safetensors"), loss="mse"))
    np.testing.assert_allclose(session.predict({"x": X})["y"], expected(query=4 * B @ A, out=2 * B @ A), rtol=1e-4, atol=1e-4)


def test_dora_of_kohya_has_its_magnitudes(tmp_path):
    magnitude = np.abs(drawn(8, 1)) + 0.5
    tensors = {
        f"{kohya(QUERY)}.lora_down.weight": A,
        f"{kohya(QUERY)}.lora_up.weight": B,
        f"{kohya(QUERY)}.dora_scale": magnitude,
    }
    save_file(tensors, tmp_path / "adapter.safetensors")
    session = burnish.Session(burnish.compile(surgery.load_peft(denoiser(), tmp_path / "adapter.safetensors"), loss="mse"))
    whole = WEIGHTS[QUERY] + B @ A
    turned = magnitude * whole / np.linalg.norm(whole, axis=1, keepdims=True)
    np.testing.assert_allclose(session.predict({"x": X})["y"], expected(query=turned - WEIGHTS[QUERY]), rtol=1e-4, atol=1e-4)
    save_file({**tensors, f"{kohya(QUERY)}.dora_scale": magnitude.T.copy()}, tmp_path / "adapter.safetensors")
    with pytest.raises(ConfigurationError, match=r"a DoRA over its inputs .*wd_on_output"):
        surgery.load_peft(denoiser(), tmp_path / "adapter.safetensors")


def test_the_component_of_another_model_is_left_out_with_a_word(tmp_path):
    other = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    tensors = {f"{name}.lora_{part}.weight": array for name in (kohya(QUERY), other) for part, array in (("down", A), ("up", B))}
    path = tmp_path / "adapter.safetensors"
    save_file(tensors, path)
    with pytest.warns(CarryOverWarning, match="1 of 'lora_te', which are left out: .* say component='lora_unet' here"):
        model = surgery.load_peft(denoiser(), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = surgery.load_peft(denoiser(), path, component="lora_unet")
    assert list(again.graph.initializers) == list(model.graph.initializers)
    with pytest.raises(ConfigurationError, match=r"did you mean 'lora_unet'\?\): .* holds 'lora_te', 'lora_unet'"):
        surgery.load_peft(denoiser(), path, component="unet")
    with pytest.raises(ConfigurationError, match=f"'{other.removeprefix('lora_te_')}', and the model has no such"):
        surgery.load_peft(denoiser(), path, component="lora_te")


REFUSED = {
    "LoKr": ({f"{kohya(QUERY)}.lokr_w1": A}, ConfigurationError, "lokr_w1', of the kind 'lokr', is no part of a LoRA or LoHa"),
    "differences": ({f"{kohya(QUERY)}.diff": A}, ConfigurationError, "of the kind 'diff', is no part of a LoRA or LoHa"),
    "GLoRA": ({f"{kohya(QUERY)}.a1.weight": A}, ConfigurationError, "a1.weight' is no part of a LoRA or LoHa that burnish has"),
    "rank 0": (
        {f"{kohya(QUERY)}.lora_down.weight": A[:0], f"{kohya(QUERY)}.lora_up.weight": B[:, :0]},
        CheckpointError,
        "of rank 0, which is no adapter: save the adapters again",
    ),
    "half": ({f"{kohya(QUERY)}.lora_down.weight": A}, CheckpointError, "with A alone: save the adapters again"),
    "half of a LoHa": ({f"{kohya(QUERY)}.hada_w1_a": A}, CheckpointError, "w1_a of a LoHa alone: save the adapters again"),
    "file of PEFT": (
        {f"base_model.model.{QUERY}.lora_A.weight": A},
        ConfigurationError,
        "does not say their alpha: put its 'adapter_config.json' beside it, and give the folder",
    ),
    "another layer": (
        {"lora_unet_mid_block_proj.lora_down.weight": A, "lora_unet_mid_block_proj.lora_up.weight": B},
        ConfigurationError,
        "the module 'mid_block_proj', and the model has no such layer",
    ),
    "other extents": (
        {f"{kohya(QUERY)}.lora_down.weight": drawn(4, 7), f"{kohya(QUERY)}.lora_up.weight": B},
        ConfigurationError,
        "the adapters are for a model of other extents",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_lora_of_the_model_is_refused_by_name(case, tmp_path):
    tensors, error, message = REFUSED[case]
    save_file(tensors, tmp_path / "adapter.safetensors")
    with pytest.raises(error) as caught:
        surgery.load_peft(denoiser(), tmp_path / "adapter.safetensors")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("original", "module"),
    [
        ("input_blocks_4_1_proj_in", "down_blocks_1_attentions_0_proj_in"),
        ("input_blocks_3_0_op", "down_blocks_0_downsamplers_0_conv"),
        ("middle_block_1_proj_out", "mid_block_attentions_0_proj_out"),
        ("middle_block_2_out_layers_3", "mid_block_resnets_1_conv2"),
        ("output_blocks_5_1_transformer_blocks_0_attn1_to_k", "up_blocks_1_attentions_2_transformer_blocks_0_attn1_to_k"),
        ("output_blocks_2_2_conv", "up_blocks_0_upsamplers_0_conv"),
        ("time_embed_0", "time_embedding_linear_1"),
    ],
)
def test_blocks_of_the_original_are_those_of_diffusers(original, module):
    """As ``_maybe_map_sgm_blocks_to_diffusers`` of diffusers and the conversion of Stable Diffusion's checkpoints have them."""
    assert name_in_diffusers(original) == module
