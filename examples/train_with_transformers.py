"""Train a BERT that burnish computes with the Trainer of transformers: which of two words comes more often in a sentence.

    python examples/train_with_transformers.py --epochs 4 --folder runs

The model is small and made from scratch, and so are the sentences: nothing is downloaded. Sentences have any length, and each
batch is padded to its longest. The Trainer keeps the loop, the optimizer, its schedule, clipping, checkpoints and evaluation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import burnish.torch

VOCABULARY, PADDING, FIRST, SECOND = 20, 0, 1, 2
LONGEST = 12


class Sentences(Dataset):
    """Tokens of drawn sentences, and 1 for those in which ``SECOND`` comes more often than ``FIRST``."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sentences: list[dict[str, torch.Tensor]] = []
        while len(self.sentences) < count:
            length = int(torch.randint(6, LONGEST + 1, (1,), generator=generator))
            tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
            chosen = torch.rand(length, generator=generator)
            tokens[chosen < 0.25], tokens[chosen > 0.75] = FIRST, SECOND
            difference = int((tokens == SECOND).sum() - (tokens == FIRST).sum())
            if difference:
                self.sentences.append({"input_ids": tokens, "labels": torch.tensor(int(difference > 0))})

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sentences[index]


def padded(sentences: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch: tokens and their mask, [batch, length of the longest], and labels, [batch]."""
    tokens = torch.nn.utils.rnn.pad_sequence([sentence["input_ids"] for sentence in sentences], True, PADDING)
    labels = torch.stack([sentence["labels"] for sentence in sentences])
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=800)
    parser.add_argument("--bf16", action="store_true", help="compute products in bfloat16")
    parser.add_argument("--folder", type=Path, default=Path("runs/transformers"), help="where checkpoints and the model go")
    arguments = parser.parse_args()
    set_seed(0)
    train, test = Sentences(arguments.sentences, 0), Sentences(400, 1)

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=LONGEST))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=LONGEST)
    open_axes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}, "labels": {0: batch}}
    wrapped = burnish.torch.wrap(model, padded([train[0], train[1]]), dynamic_shapes=open_axes)

    settings = TrainingArguments(
        str(arguments.folder), num_train_epochs=arguments.epochs, learning_rate=2e-3, lr_scheduler_type="cosine",
        per_device_train_batch_size=16, gradient_accumulation_steps=2, per_device_eval_batch_size=200, max_grad_norm=1.0,
        bf16=arguments.bf16, use_cpu=True, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1,
        report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(
        wrapped, settings, data_collator=padded, train_dataset=train, eval_dataset=test,
        compute_metrics=lambda result: {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())},
    )  # fmt: skip
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.4f}")

    trainer.save_model(arguments.folder / "model")
    plain = AutoModelForSequenceClassification.from_pretrained(arguments.folder / "model").eval()
    batch = padded(test.sentences)
    with torch.no_grad():
        right = plain(**batch).logits.argmax(-1) == batch["labels"]
    print(f"in PyTorch: {type(plain).__name__}, accuracy {right.float().mean():.4f}")


if __name__ == "__main__":
    main()
