"""Files that ONNX Runtime's optimizers made of exports: the gradients are those of the export."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import AttentionOpType, FusionOptions

import burnish
from burnish.errors import ModelError
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.transformer_files import HEADS, VOCABULARY, WIDTH, Decoder, Encoder, Images, export

Level = onnxruntime.GraphOptimizationLevel
GENERATOR = np.random.default_rng(0)
WORDS = GENERATOR.integers(0, VOCABULARY, (3, 8))
MASK = np.ones_like(WORDS)
MASK[0, 5:] = 0
FEEDS = {
    "encoder": {"input_ids": WORDS, "attention_mask": MASK, "token_type_ids": WORDS % 2},
    "decoder": {"input_ids": WORDS, "attention_mask": MASK},
    "images": {"x": GENERATOR.normal(size=(3, 3, 8, 8)).astype(np.float32)},
}
MODULES = {"encoder": Encoder, "decoder": Decoder, "images": Images}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for name, module in MODULES.items():
        export(module(), folder, *(torch.tensor(array) for array in FEEDS[name].values()))
    return folder


def by_session(path: Path, level: Level = Level.ORT_ENABLE_EXTENDED) -> Path:
    result = path.with_suffix(".optimized.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(result)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return result


def by_transformer_optimizer(kind: str, multi_head: bool = False) -> Callable[[Path], Path]:
    def optimized(path: Path) -> Path:
        logging.disable(logging.WARNING)
        options = FusionOptions(kind)
        if multi_head:
            options.use_multi_head_attention = True
            options.attention_op_type = AttentionOpType.MultiHeadAttention
        model = optimizer.optimize_model(
            str(path), model_type=kind, num_heads=HEADS, hidden_size=WIDTH, optimization_options=options, opt_level=0
        )
        logging.disable(logging.NOTSET)
        result = path.with_suffix(f".{kind}.onnx")
        model.save_model_to_file(str(result))
        return result

    return optimized


CASES = {
    "bert": ("encoder", by_transformer_optimizer("bert"), "Attention BiasGelu EmbedLayerNormalization SkipLayerNormalization"),
    "bert_multi_head": ("encoder", by_transformer_optimizer("bert", True), "MultiHeadAttention BiasGelu SkipLayerNormalization"),
    "gpt2": ("decoder", by_transformer_optimizer("gpt2"), "FastGelu SkipLayerNormalization"),
    "encoder_by_session": ("encoder", by_session, "BiasGelu FusedMatMul FusedGemm LayerNormalization"),
    "decoder_by_session": ("decoder", by_session, "FastGelu FusedMatMul LayerNormalization"),
    "images_by_session": ("images", by_session, "FusedConv FusedGemm"),
}


def differentiated(path: Path, feeds: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Every weight, its gradient by one cotangent, and the output."""
    model = burnish.load(path)
    weights = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.dtype.name == "FLOAT" and value.const_value.shape.rank() and value.uses()
    }
    gradients = burnish.grad(path, list(weights), of="logits")
    output = onnxruntime_outputs(model, feeds)["logits"]
    cotangent = np.random.default_rng(1).normal(size=output.shape).astype(np.float32)
    results = onnxruntime_outputs(gradients, feeds | {"cotangent:logits": cotangent})
    return weights, {name: results[f"grad:{name}"] for name in weights}, output


def same_in_other(array: np.ndarray, weights: dict[str, np.ndarray]) -> str | None:
    return next((name for name, other in weights.items() if other.shape == array.shape and np.array_equal(other, array)), None)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_export(case: str, folder: Path) -> None:
    name, optimize, fused = CASES[case]
    path = folder / f"{name}.onnx"
    optimized = optimize(path)
    written = {node.op_type for node in onnx.load(optimized).graph.node}
    assert set(fused.split()) <= written, written
    feeds = FEEDS[name]
    weights, gradients, logits = differentiated(path, feeds)
    fused_weights, fused_gradients, fused_logits = differentiated(optimized, feeds)
    np.testing.assert_allclose(fused_logits, logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(onnxruntime_outputs(str(optimized), feeds)["logits"], fused_logits, rtol=1e-4, atol=1e-5)
    scale = max(np.linalg.norm(gradient) for gradient in gradients.values())
    for fused_name, array in fused_weights.items():
        parts = [array]
        if same_in_other(array, weights) is None:  # queries, keys and values in one
            parts = np.split(array, 3, axis=-1)
        sources = [same_in_other(part, weights) for part in parts]
        assert None not in sources, fused_name
        expected = np.concatenate([gradients[source] for source in sources if source is not None], axis=-1)
        error = np.linalg.norm(fused_gradients[fused_name] - expected) / (np.linalg.norm(expected) + 1e-3 * scale)
        assert error < 1e-4, f"{fused_name}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_steps_of_a_fused_encoder(engine: str, folder: Path) -> None:
    path = by_transformer_optimizer("bert")(folder / "encoder.onnx")
    losses = {}
    for source in (folder / "encoder.onnx", path):
        program = burnish.compile(source, loss="cross_entropy", optimizer="sgd:lr=0.1")
        session = burnish.Session(program, engine=engine)
        losses[source] = [session.step(FEEDS["encoder"] | {"labels": np.arange(3)})["loss"] for _ in range(3)]
    np.testing.assert_allclose(losses[path], losses[folder / "encoder.onnx"], rtol=1e-4)


def test_a_file_in_the_layout_of_one_processor(folder: Path) -> None:
    path = by_session(folder / "images.onnx", Level.ORT_ENABLE_ALL)
    if not any(node.domain == "com.microsoft.nchwc" for node in onnx.load(path).graph.node):
        pytest.skip("ONNX Runtime has no layout of its own for this processor")
    with pytest.raises(
        ModelError, match=r"com\.microsoft\.nchwc\.\w+ .* was saved by ONNX Runtime in the layout of one processor"
    ):
        burnish.load(path)
