"""A small BERT, a small Llama and a small convolutional network, as PyTorch has them and as burnish reads them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

import burnish

VOCABULARY, LENGTH, CLASSES = 20, 6, 3
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


class Logits(nn.Module):
    """A model of transformers that returns its logits alone, so that layers are called ``model.<their path>``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).mean((2, 3)))


@dataclass(frozen=True)
class Adaptable:
    """A model in both forms.

    Attributes:
        module: what PEFT adapts; ``fresh`` gives a copy.
        model: the same for burnish.
        input: the name of its input.
        loss: of the program.
        adapted: names of the modules that are adapted.
        feedforward: of those whose inputs an ia3 scales.
        tables: of the embeddings that are adapted.
        padded: the path of an embedding whose row 0 is padding.
    """

    module: nn.Module
    model: ir.Model
    input: str
    loss: str
    adapted: tuple[str, ...]
    feedforward: tuple[str, ...]
    tables: tuple[str, ...] = ()
    padded: str = ""

    def fresh(self) -> Any:
        return copy.deepcopy(self.module)

    def batch(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        if self.input == "x":
            x = generator.normal(size=(4, 2, 6, 6)).astype(np.float32)
            return {"x": x, "labels": generator.integers(0, CLASSES, 4)}
        ids = generator.integers(0, VOCABULARY, (4, LENGTH))
        is_decoder = "class_axis" in self.loss
        return {"ids": ids, "labels": generator.integers(0, VOCABULARY, ids.shape) if is_decoder else np.arange(4) % CLASSES}

    def torch_loss(self, module: Any, batch: dict[str, np.ndarray]) -> torch.Tensor:
        """The loss of a module that PEFT may have wrapped."""
        logits = self.torch_logits(module, batch)
        return nn.functional.cross_entropy(logits.flatten(0, -2), torch.from_numpy(batch["labels"]).flatten())

    def torch_logits(self, module: Any, batch: dict[str, np.ndarray]) -> torch.Tensor:
        if self.input == "x":
            return module(torch.from_numpy(batch["x"]))
        return module(input_ids=torch.from_numpy(batch["ids"])).logits


@functools.cache
def adaptable(name: str) -> Adaptable:
    """Return ``bert``, ``llama`` or ``convolutional``, drawn from one seed."""
    torch.manual_seed(0)
    if name == "convolutional":
        module = Convolutional().eval()
        model = burnish.load(module, example_inputs=(torch.zeros(2, 2, 6, 6),))
        return Adaptable(module, model, "x", "cross_entropy", ("first", "second", "head"), ("second",))
    import transformers

    if name == "bert":
        options = {**SIZES, "max_position_embeddings": 8, "num_labels": CLASSES, "attn_implementation": "eager"}
        module = transformers.BertForSequenceClassification(transformers.BertConfig(**options)).eval()
        adapted, feedforward, tables = ("query", "value", "output.dense"), ("output.dense",), ("word_embeddings",)
    else:
        options = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 8, "use_cache": False}
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, attn_implementation="eager")).eval()
        adapted, feedforward, tables = ("q_proj", "v_proj", "down_proj"), ("down_proj",), ("embed_tokens",)
    model = burnish.load(Logits(module), example_inputs=(torch.zeros(2, LENGTH, dtype=torch.long),))
    loss = "cross_entropy" if name == "bert" else "cross_entropy:class_axis=-1"
    padded = "bert.embeddings.word_embeddings" if name == "bert" else ""
    return Adaptable(module, model, "ids", loss, adapted, feedforward, tables, padded)
