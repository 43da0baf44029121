"""Language models on the command line: answers of files are learned, and a run keeps its tokenizer and its chat template."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest

from burnish.models import bert, gpt2
from burnish.program import Program

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "</s>", "<|user|>", "<|assistant|>", *(f"w{number}" for number in range(20))]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SIZES = {"width": 8, "layers": 1, "heads": 2, "positions": 16}
QUICK = ("--tokenizer", "tokenizer.json", "--threads", "1", "--batch-size", "8")


@pytest.fixture
def answers(folder):
    """A decoder, an encoder, a tokenizer with a chat template, prompts with completions, and conversations."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save("tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    ir.save(gpt2(len(WORDS), **SIZES), folder / "gpt.onnx")
    ir.save(bert(len(WORDS), **SIZES), folder / "bert.onnx")
    rows = [(f"w{number % 7}", f"w{number % 7 + 1}") for number in range(24)]
    pairs = [{"prompt": f"{first} ", "completion": second} for first, second in rows]
    roles = ("user", "assistant")
    chats = [{"messages": [dict(role=role, content=text) for role, text in zip(roles, row, strict=True)]} for row in rows]
    for name, lines in (("pairs", pairs), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_on_conversations_keeps_its_template(run, answers):
    options = ("--data", "chats.jsonl", "--eval-data", "chats.jsonl", *QUICK, "--lr", "0.03", "--epochs", "4", "-o", "chat")
    printed = run("finetune", "gpt.onnx", *options).stdout
    assert "task: a causal decoder learns the next token of the assistant's answers: cross_entropy of 'logits'" in printed
    assert f"head: 'embeddings.tokens' is kept, with its scores for {len(WORDS)} tokens" in printed
    assert "texts: the next token of the assistant's answers; 16 tokens at most, padded to 16" in printed
    kept = json.loads((answers / "chat" / "tokenizer_config.json").read_text())
    assert kept == {"eos_token": "</s>", "chat_template": TEMPLATE}
    (answers / "tokenizer_config.json").unlink()
    run("evaluate", "chat", "chats.jsonl", "-o", "figures.csv")
    figures = dict(line.split(",") for line in (answers / "figures.csv").read_text().splitlines())
    assert 1 < float(figures["perplexity"]) < len(WORDS)
    assert f"{float(figures['perplexity']):.4f}" in printed
    error = run("predict", "chat", "chats.jsonl", code=1).stderr
    assert "the model is a language model: 'logits' has scores of the next token at each token, and burnish generates no" in error
    run("predict", "chat", "chats.jsonl", "-o", "scores.npz")
    assert np.load(answers / "scores.npz")["logits"].shape == (24, 16, len(WORDS))


def test_a_run_on_completions_goes_on_with_its_optimizer(run, answers):
    options = ("--data", "pairs.jsonl", *QUICK, "--lora", "rank=2", "--lr", "0.01", "-o", "pairs")
    first = run("finetune", "gpt.onnx", *options, "--epochs", "1", "--train-on", "all").stdout
    assert "learns the next token: " in first
    assert "adapters: lora beside 6 layers" in first
    chosen = json.loads((answers / "pairs" / "finetune.json").read_text())
    assert (chosen["kind"], chosen["optimizer"], chosen["metrics"]) == (
        "tokens",
        "adamw:weight_decay=0",
        ["perplexity", "accuracy"],
    )
    run("finetune", "gpt.onnx", *options, "--epochs", "2", "--resume")
    record = json.loads((answers / "pairs" / "run.json").read_text())
    assert record["text"]["train_on"] == "all"
    assert Program.load("pairs/program").options["optimizer"]["name"] == "adamw"


def test_train_reads_the_same_data(run, answers):
    printed = run("train", "gpt.onnx", "--data", "pairs.jsonl", "--task", "causal", *QUICK, "--epochs", "1", "-o", "t").stdout
    assert "texts: the next token of completions" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt.onnx", "--data", "pairs.jsonl", *QUICK, "--train-on", "assistant"), "give 'completion' or 'all'"),
        (
            ("gpt.onnx", "--data", "pairs.jsonl", *QUICK, "--train-on", "answer"),
            "train_on='answer' (--train-on): give 'completion',",
        ),
        (
            ("gpt.onnx", "--data", "pairs.jsonl", *QUICK, "--padding-side", "left"),
            "the model has no input 'attention_mask' to hide",
        ),
        (
            ("gpt.onnx", "--data", "chats.jsonl", *QUICK, "--chat-template", "none.jinja"),
            "none.jinja: the chat template cannot be read",
        ),
        (("bert.onnx", "--data", "pairs.jsonl", *QUICK), "earlier ones change with later tokens: no causal decoder"),
        (("gpt.onnx", "--data", "pairs.jsonl"), "texts become tokens by a tokenizer: name one"),
    ],
)
def test_what_does_not_fit(run, answers, arguments, message):
    error = run("finetune", *arguments, "-o", "run", code=1).stderr
    assert message in " ".join(error.split())
    assert all(len(line) <= 200 for line in error.splitlines()[:1])
