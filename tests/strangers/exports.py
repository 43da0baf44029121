"""Twelve models of transformers, two in two forms, and twelve of torchvision, small, as users export them, on both engines.

``python tests/strangers/exports.py [NAME ...] [--exporter dynamo|torchscript]`` prints one line per model and exporter, and exits
with status 1 if one of them does not train. Each model's loss is compared with PyTorch's, its gradient with differences.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import burnish
from strangers.training import FALL_TOLERANCE, Batch, Failure, train
from torchvision_operators import declare_torchvision_operators

BATCH = 3
CLASSES = 5
TOKENS = 9
PIXELS = 64
VOCABULARY = 640
"""More rows than the exporter keeps constants below inside the file."""
EXPORTERS = ("dynamo", "torchscript")
RATE, STEPS = 0.02, 3
"""Of the steps that are compared with PyTorch's."""

TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=CLASSES
)
DISTILLED = dict(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=CLASSES)
DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForSequenceClassification", TEXT),
    "bert-eager": ("BertConfig", "BertForSequenceClassification", {**TEXT, "attn_implementation": "eager"}),
    "distilbert": ("DistilBertConfig", "DistilBertForSequenceClassification", DISTILLED),
    "distilbert-eager": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {**DISTILLED, "attn_implementation": "eager"},
    ),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", TEXT),
    "electra": ("ElectraConfig", "ElectraForSequenceClassification", {**TEXT, "embedding_size": 16}),
    "albert": ("AlbertConfig", "AlbertForSequenceClassification", {**TEXT, "embedding_size": 16}),
    "mpnet": ("MPNetConfig", "MPNetForSequenceClassification", TEXT),
    "deberta-v2": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        dict(vocab_size=VOCABULARY, n_positions=512, n_embd=32, n_layer=2, n_head=4, use_cache=False),
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        dict(
            vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=512, use_cache=False,
        ),
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**DECODER, "use_cache": False}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**DECODER, "use_cache": False}),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        dict(
            image_size=PIXELS, patch_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            num_labels=CLASSES,
        ),
    ),
}  # fmt: skip

TORCHVISION: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "squeezenet1_1": {},
    "densenet121": {},
    "googlenet": {"aux_logits": False, "init_weights": True},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "shufflenet_v2_x0_5": {},
    "efficientnet_b0": {},
    "regnet_y_400mf": {},
    "convnext_tiny": {},
    "swin_t": {},
}


@dataclass(frozen=True)
class Stranger:
    """A module in evaluation mode that returns logits, classes along axis 1, and its example inputs by name."""

    module: nn.Module
    inputs: dict[str, torch.Tensor]


class Logits(nn.Module):
    """A model of transformers that takes its inputs by their order and returns its logits alone, classes along axis 1."""

    def __init__(self, model: nn.Module, names: list[str]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        logits = self.model(**dict(zip(self.names, arguments, strict=True))).logits
        return logits.transpose(1, 2) if logits.ndim == 3 else logits


def build(name: str) -> Stranger:
    torch.manual_seed(0)
    declare_torchvision_operators()
    images = torch.randn(BATCH, 3, PIXELS, PIXELS)
    if name in TORCHVISION:
        import torchvision

        module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **TORCHVISION[name])
        settle_statistics(module)
        return Stranger(module.eval(), {"x": images})
    import transformers

    configuration, model, options = TRANSFORMERS[name]
    module = getattr(transformers, model)(getattr(transformers, configuration)(**options)).eval()
    if name == "vit":
        inputs = {"pixel_values": images}
    else:
        tokens = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
        mask = torch.ones_like(tokens)
        mask[1, TOKENS - 3 :] = 0
        inputs = {"input_ids": tokens, "attention_mask": mask}
    return Stranger(Logits(module, list(inputs)).eval(), inputs)


def settle_statistics(module: nn.Module) -> None:
    """Give batch normalization the statistics of some data, as a trained model has them; else a deep network's values vanish."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = None
        module.train()
        module(torch.randn(16, 3, PIXELS, PIXELS))


def export(stranger: Stranger, path: Path, exporter: str) -> None:
    """Write the module as an ONNX file with the exporter's defaults, but for an open batch."""
    names, arguments = list(stranger.inputs), tuple(stranger.inputs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            batch = {0: torch.export.Dim("batch")}
            shapes = tuple(batch for _ in names)
            if isinstance(stranger.module, Logits):
                shapes = (shapes,)  # of its one parameter, *arguments
            torch.onnx.export(stranger.module, arguments, path, input_names=names, dynamic_shapes=shapes, verbose=False)
        else:
            axes = {name: {0: "batch"} for name in names}
            torch.onnx.export(
                stranger.module, arguments, path, input_names=names, output_names=["logits"], dynamic_axes=axes, dynamo=False
            )


def check(name: str, exporter: str) -> str:
    """Train one model of one exporter; returns what is to be said of it."""
    stranger = build(name)
    with torch.no_grad():
        logits = stranger.module(*stranger.inputs.values())
    labels = torch.randint(0, logits.shape[1], (logits.shape[0], *logits.shape[2:]))
    expected = nn.functional.cross_entropy(logits, labels).item()
    batch: Batch = {name: tensor.numpy() for name, tensor in stranger.inputs.items()} | {"labels": labels.numpy()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        export(stranger, path, exporter)
        trained = train(path, batch, norm="frozen")
        # Exporters fold batch normalization into the weights before it, which then train in another way.
        if not any(isinstance(layer, nn.BatchNorm2d) for layer in stranger.module.modules()):
            follow(stranger, labels, path, batch)
    off = abs(trained.losses[0] - expected) / abs(expected)
    if not off <= 1e-4:
        raise Failure(f"the first loss is {trained.losses[0]}, PyTorch's {expected}")
    return f"loss {expected:.4f}, off by {off:.0e}; engines {trained.between_engines:.0e}, gradient {trained.gradient:.0e}"


def follow(stranger: Stranger, labels: torch.Tensor, path: Path, batch: Batch) -> None:
    """Take steps in PyTorch and with the file: they agree where the same tensors train, and no others.

    Raises:
        Failure: they do not.
    """
    module = copy.deepcopy(stranger.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    expected = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(*stranger.inputs.values()), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    program = burnish.compile(path, optimizer=burnish.optim.sgd(lr=RATE), metrics=(), norm="frozen")
    with burnish.Session(program, seed=0) as session:
        losses = [session.step(batch)["loss"] for _ in range(STEPS)]
    allowed = FALL_TOLERANCE * abs(expected[0] - expected[-1]) + 1e-5 * abs(expected[0])
    if not abs(losses[-1] - expected[-1]) <= allowed:
        raise Failure(f"steps are not PyTorch's: {losses} and {expected}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*TRANSFORMERS, *TORCHVISION])}")
    parser.add_argument("--exporter", choices=EXPORTERS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    failed = 0
    for name in arguments.names or [*TRANSFORMERS, *TORCHVISION]:
        for exporter in [arguments.exporter] if arguments.exporter else EXPORTERS:
            start = time.perf_counter()
            try:
                outcome = "trains  " + check(name, exporter)
            except Exception as error:
                outcome, failed = f"FAILS   {type(error).__name__}: {error}", failed + 1
            print(f"{name:20} {exporter:12} {outcome}  ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
