"""The models of ``finetune.py`` that need a package: torchvision's, timm's, transformers', Keras' and scikit-learn's own, small.

Each at one sample and open, of which one is written by PyTorch's older exporter and one by the newer. None has dropout, as a file
that was exported for inference has none.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune_models import CLASSES, EXPORTERS, FEATURES, PIXELS, ChannelsLast, Model, Perceptron, tiny_bert
from torchvision_operators import declare_torchvision_operators

KERAS = "BURNISH_KERAS_PYTHON"
"""The environment variable with the interpreter that has Keras, TensorFlow and tf2onnx, in an environment of their own."""
KERAS_PYTHON = Path(__file__).parents[1] / ".venv-keras" / "bin" / "python"


def _of_torchvision(name: str, **options: Any) -> nn.Module:
    declare_torchvision_operators()
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)


def _vit_of_torchvision() -> nn.Module:
    """ViT-B/16's class, with two layers and patches of 8 pixels."""
    declare_torchvision_operators()
    from torchvision.models import VisionTransformer

    module = VisionTransformer(PIXELS, 8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=96, num_classes=CLASSES)
    nn.init.trunc_normal_(module.heads.head.weight, std=0.02)
    return module


def _of_timm(name: str, **options: Any) -> nn.Module:
    declare_torchvision_operators()
    import timm

    return timm.create_model(name, pretrained=False, num_classes=CLASSES, drop_rate=0.0, **options)


def _bert_of_transformers() -> nn.Module:
    declare_torchvision_operators()  # which transformers imports where it is there
    return tiny_bert()


def _vit_of_transformers() -> nn.Module:
    declare_torchvision_operators()
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=PIXELS,
            patch_size=8,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class Scaled(Perceptron):
    """scikit-learn's MLPClassifier behind a StandardScaler."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scale", torch.ones(FEATURES))

    def prepare(self, x: torch.Tensor) -> None:
        """Take mean and deviation of the columns; those that do not vary keep theirs, as scikit-learn's do."""
        deviation = x.std(0, unbiased=False)
        self.mean, self.scale = x.mean(0), torch.where(deviation > 0, deviation, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x - self.mean) / self.scale)


def _by_skl2onnx(module: nn.Module, path: Path, batch: str) -> None:
    """Put the weights into scikit-learn's classes, and write these with skl2onnx."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    x, labels = rng.random((40, FEATURES), np.float32), np.arange(40) % CLASSES
    model = MLPClassifier((module.hidden.out_features,), max_iter=1)
    pipeline = make_pipeline(StandardScaler(), model) if isinstance(module, Scaled) else make_pipeline(model)
    pipeline.fit(x, labels)
    arrays = {name: value.numpy() for name, value in module.state_dict().items()}
    model.coefs_ = [arrays["hidden.weight"].T, arrays["output.weight"].T]
    model.intercepts_ = [arrays["hidden.bias"], arrays["output.bias"]]
    if isinstance(module, Scaled):
        pipeline[0].mean_, pipeline[0].scale_ = arrays["mean"], arrays["scale"]
    types = [("X", FloatTensorType([1 if batch == "1" else None, FEATURES]))]
    path.write_bytes(to_onnx(pipeline, initial_types=types, options={"zipmap": False}).SerializeToString())


def _by_keras(module: nn.Module, path: Path, batch: str) -> None:
    """Put the weights into a model of Keras, which Keras itself writes, in the environment that has it."""
    arrays = path.with_suffix(".npz")
    np.savez(arrays, **{name: value.numpy() for name, value in module.state_dict().items()})
    script = str(Path(__file__).with_name("finetune_keras.py"))
    subprocess.run([keras_python(), script, str(arrays), str(path), batch], check=True, capture_output=True)


def keras_python() -> str:
    """The interpreter that has Keras."""
    return os.environ.get(KERAS) or (str(KERAS_PYTHON) if KERAS_PYTHON.exists() else "")


EXPORTERS |= {"skl2onnx": _by_skl2onnx, "keras": _by_keras}


def _both(name: str, model: Model) -> dict[str, Model]:
    """A model open, and at one sample with the other exporter."""
    other = {"dynamo": "torchscript", "torchscript": "dynamo"}.get(model.exporter, model.exporter)
    return {name: model, f"{name}-1": replace(model, batch="1", exporter=other)}


def _without_dropout(name: str) -> Callable[[], nn.Module]:
    return partial(_of_torchvision, name, dropout=0.0)


PACKAGED: dict[str, Model] = {
    **_both("torchvision/resnet18", Model("torchvision", partial(_of_torchvision, "resnet18"), "fc")),
    **_both("torchvision/mobilenet_v2", Model("torchvision", _without_dropout("mobilenet_v2"), "classifier.1")),
    **_both("torchvision/mobilenet_v3", Model("torchvision", _without_dropout("mobilenet_v3_small"), "classifier.3")),
    **_both(
        "torchvision/efficientnet_b0",
        Model("torchvision", partial(_of_torchvision, "efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0), "classifier.1"),
    ),
    **_both("torchvision/vit", Model("torchvision", _vit_of_torchvision, "heads.head")),
    **_both(
        "timm/vit",
        Model(
            "timm",
            partial(_of_timm, "vit_tiny_patch16_224", img_size=PIXELS, patch_size=8, embed_dim=48, depth=2, num_heads=4),
            "head",
        ),
    ),
    **_both("timm/resnet10t", Model("timm", partial(_of_timm, "resnet10t"), "fc", exporter="torchscript")),
    **_both("transformers/vit", Model("transformers", _vit_of_transformers, "classifier")),
    **_both("transformers/bert", Model("transformers", _bert_of_transformers, "classifier", kind="text")),
    **_both("keras/network", Model("Keras", ChannelsLast, "dense", exporter="keras", channels_first=False, has_softmax=True)),
    **_both("sklearn/perceptron", Model("scikit-learn", Perceptron, "output", kind="table", exporter="skl2onnx")),
    **_both("sklearn/scaled", Model("scikit-learn", Scaled, "output", kind="table", exporter="skl2onnx")),
}


def missing(name: str) -> str | None:
    """What a model needs that is not here; None where all is."""
    model = PACKAGED.get(name)
    if model is None:
        return None
    if model.exporter == "keras":
        return None if keras_python() else f"Keras, in the interpreter that {KERAS} names"
    package = {"scikit-learn": "skl2onnx"}.get(model.origin, model.origin)
    return None if importlib.util.find_spec(package) is not None else package
