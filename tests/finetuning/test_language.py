"""A language model is recognized and learns texts: held to PyTorch, with its vocabulary, its cache and adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.data import DataSpec, Text, TextDataset
from burnish.errors import ConfigurationError, DataError
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.preparation import transfer
from burnish.models import bert, gpt2
from burnish.program import Program
from oracles import decoder_files
from oracles.causal_decoder import VOCABULARY, logits, loss_of_labels, masked_decoder, weights_of

tokenizers = pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")

WORDS = ["[PAD]", "[UNK]", "</s>", *(f"w{number}" for number in range(VOCABULARY - 3))]
ROWS = [{"prompt": f"w{a} w{b} ", "completion": f"w{a + b}"} for a in range(10) for b in range(10)]
SIZES = {"width": 16, "layers": 1, "heads": 2, "positions": 16, "dropout": 0.0}
LANGUAGE = "cross_entropy:class_axis=-1"


def tokenizer(words: list[str] = WORDS) -> Any:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def text(**options: Any) -> Text:
    return Text(**{"tokenizer": tokenizer(), "length": 16} | options)


def finetuned(model: Any, tmp_path: Any, data: Any = ROWS, **options: Any) -> tuple[burnish.finetuning.Finetuned, ir.Model]:
    given = {"epochs": 1, "lr": 0.01, "threads": 1, "text": text(), "batch_size": 25} | options
    made = burnish.finetune(model, data, output=tmp_path / "tuned.onnx", **given)
    return made, ir.load(made.path)


@pytest.mark.parametrize("side", ["right", "left"])
def test_loss_gradients_and_a_step_are_those_of_pytorch(side):
    """Completions of other lengths in one batch, padded on either side, with labels of -100 as Hugging Face has them."""
    rows = [{"prompt": "w0 w1 w2 ", "completion": "w3 w4"}, {"prompt": "w5 ", "completion": "w6 w7 w8 w9"}, ROWS[30]]
    model = masked_decoder()
    programs = {
        name: burnish.compile(model, loss=LANGUAGE, optimizer=f"{name}:lr={rate}", metrics=("perplexity", "accuracy"))
        for name, rate in (("sgd", 1.0), ("adamw", 0.01))
    }
    dataset = TextDataset(rows, text(task="causal", padding_side=side, buckets=[8, 16]), DataSpec.by(programs["sgd"]))
    batch = dataset.batch(np.arange(3))

    weights = weights_of(model)
    ids, mask = torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
    # The labels by Hugging Face's rule, made apart from those of the data set: the tokens, -100 at prompts and padding.
    labels = torch.full_like(ids, -100)
    for row, prompt in enumerate((3, 1, 2)):
        places = torch.nonzero(mask[row])[prompt:, 0]
        labels[row, places] = ids[row, places]
    assert int((labels != -100).sum()) == 10
    positions = (mask.cumsum(1) - 1).clamp(min=0) if side == "left" else torch.tensor(batch["position_ids"])
    scores = logits(weights, ids, mask, positions)
    loss = loss_of_labels(scores, labels)
    loss.backward()

    states = {}
    for name, program in programs.items():
        with burnish.Session(program, threads=1) as session:
            given = session.evaluate(batch)
            session.step(batch)
            states[name] = session.state()
    assert given["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert given["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)
    counts = labels[:, 1:] != -100
    right = (scores[:, :-1].argmax(-1) == labels[:, 1:])[counts].float().mean()
    assert given["accuracy"] == pytest.approx(right.item())
    before = {name: weight.detach().numpy().copy() for name, weight in weights.items()}
    torch.optim.AdamW(list(weights.values()), lr=0.01, weight_decay=0.01).step()
    for name, weight in weights.items():
        assert weight.grad is not None
        gradient = weight.grad.numpy()
        np.testing.assert_allclose(before[name] - states["sgd"][f"param/{name}"], gradient, atol=1e-5, err_msg=name)
        is_clear = np.abs(gradient) > 1e-5  # the step of a gradient that rounding decides is its sign
        step = states["adamw"][f"param/{name}"] - weight.detach().numpy()
        assert np.abs(step[is_clear]).max(initial=0.0) < 1e-5, name
    assert sum(int((weight.grad.abs() > 1e-5).sum()) for weight in weights.values() if weight.grad is not None) > 1000


def test_a_decoder_learns_completions_and_keeps_its_vocabulary(tmp_path):
    model = gpt2(VOCABULARY, **SIZES)
    made, tuned = finetuned(model, tmp_path, epochs=8, lr=0.02, eval_data=ROWS)
    assert made.notes[0] == (
        "task: a causal decoder learns the next token of completions: cross_entropy of 'logits', perplexity, accuracy"
    )
    assert made.notes[1] == f"head: 'embeddings.tokens' is kept, with its scores for {VOCABULARY} tokens"
    assert made.result.best is not None
    assert made.result.best["metric"] == "perplexity"
    assert made.result.best["value"] < 6, "that of guessing among all tokens is 25"
    assert [value.name for value in tuned.graph.inputs] == ["input_ids"]
    assert tuned.graph.outputs[0].shape[2] == VOCABULARY
    known = burnish.data.DataDescription.read(tuned.metadata_props).text
    assert known is not None
    assert (known.task, known.train_on) == ("causal", "completion")


def test_the_rate_is_found_for_adamw(tmp_path):
    made, _ = finetuned(gpt2(VOCABULARY, **SIZES), tmp_path, lr=None, epochs=3)
    (line,) = (note for note in made.notes if note.startswith("lr: "))
    assert "of AdamW" in line
    assert 1e-4 < float(line.split()[1]) <= 0.01
    assert made.result.metrics["perplexity"] < VOCABULARY


def test_all_tokens_and_python_options(tmp_path):
    made, _ = finetuned(gpt2(VOCABULARY, **SIZES), tmp_path, train_on="all")
    assert made.notes[0].startswith("task: a causal decoder learns the next token: ")
    with pytest.raises(ConfigurationError, match="train_on='all', and text has train_on='completion': give one of them"):
        finetuned(gpt2(VOCABULARY, **SIZES), tmp_path, train_on="all", text=text(train_on="completion"))
    made, _ = finetuned(gpt2(VOCABULARY, **SIZES), tmp_path, data=["w0 w1", "w2 w3 w4"] * 9, text=tokenizer())
    assert made.notes[0].startswith("task: a causal decoder learns the next token: ")


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_stand_beside_the_layers_but_the_last(tmp_path, tied):
    model = gpt2(VOCABULARY, **SIZES, tied=tied)
    before = {name: value.const_value.numpy().copy() for name, value in model.graph.initializers.items() if "." in name}
    made, tuned = finetuned(model, tmp_path, adapters={"rank": 2})
    assert "adapters: lora beside 6 layers; 576 numbers train" in " ".join(made.notes)
    after = {name: value.const_value.numpy() for name, value in tuned.graph.initializers.items()}
    changed = {name for name, array in before.items() if not np.array_equal(after[name], array)}
    assert changed == {name for name in before if name.startswith("layers.1.") and name.endswith("weight") and "norm" not in name}


def test_the_head_alone(tmp_path):
    made, tuned = finetuned(gpt2(VOCABULARY, **SIZES, tied=False), tmp_path, freeze_until="head")
    before = gpt2(VOCABULARY, **SIZES, tied=False).graph.initializers
    names = [name for name in before if "." in name]
    changed = [
        n for n in names if not np.array_equal(before[n].const_value.numpy(), tuned.graph.initializers[n].const_value.numpy())
    ]
    assert changed == ["head.weight"]
    assert any(note.startswith("frozen: ") for note in made.notes)


def test_an_encoder_is_no_causal_decoder_and_learns_masked_tokens(tmp_path):
    words = [*WORDS[:-1], "[MASK]"]
    model = bert(VOCABULARY, **SIZES)
    options = {"data": ["w0 w1 w2 w3"] * 30, "text": text(tokenizer=tokenizer(words))}
    with pytest.raises(ConfigurationError, match="earlier ones change with later tokens: no causal decoder") as refused:
        finetuned(model, tmp_path, **options)
    assert "task 'masked', --task masked" in str(refused.value)
    made, _ = finetuned(model, tmp_path, **options | {"text": text(tokenizer=tokenizer(words), task="masked")})
    assert made.notes[0].startswith("task: a language model learns masked tokens: ")
    _, dataset = transfer(masked_decoder(is_causal=True), ROWS, FinetuneOptions(text=text()))
    assert len(dataset) == 100
    with pytest.raises(ConfigurationError, match="no causal decoder"):
        transfer(masked_decoder(is_causal=False), ROWS, FinetuneOptions(text=text()))


def test_what_a_decoder_is_not_given(tmp_path):
    model = gpt2(VOCABULARY, **SIZES)
    with pytest.raises(ConfigurationError, match=r"head='new' \(--head new\): a language model keeps its output layer"):
        finetuned(model, tmp_path, head="new")
    with pytest.raises(ConfigurationError, match="augment: it changes images and rows of tables"):
        finetuned(model, tmp_path, augment="mixup:0.2")
    (tmp_path / "texts.txt").write_text("w0 w1\nw2 w3\n")
    with pytest.raises(DataError, match="texts become tokens by a tokenizer: name one"):
        finetuned(model, tmp_path, data=tmp_path / "texts.txt", text=None)
    with pytest.raises(DataError, match="the tokenizer has tokens up to 29, and the model's input 'input_ids' takes 0 to 24"):
        finetuned(model, tmp_path, text=text(tokenizer=tokenizer([*WORDS, *"abcde"])))


def test_the_cache_of_a_decoder_is_empty(tmp_path):
    """A file of onnxruntime-genai's builder: it trains with its cache bound to length 0."""
    words = tokenizer(WORDS[: decoder_files.VOCABULARY])
    rows = [{"prompt": "w0 w1 ", "completion": "w2"}, {"prompt": "w3 ", "completion": "w4 w5"}] * 8
    onnx.save(decoder_files.decoder(quantized=False), tmp_path / "decoder.onnx")
    made, tuned = finetuned(tmp_path / "decoder.onnx", tmp_path, data=rows, text=text(tokenizer=words, length=12), batch_size=4)
    assert made.notes[0].startswith("task: a causal decoder learns the next token of completions: ")
    assert "cache: it is empty ('past_sequence_length': 0), and the tuned file is without the inputs of the cache" in made.notes
    assert [value.name for value in tuned.graph.inputs] == ["input_ids", "attention_mask"]


def test_integer_weights_of_a_decoder_with_adapters(tmp_path):
    """QLoRA: the integers stay, and adapters train."""
    words = tokenizer(WORDS[: decoder_files.VOCABULARY])
    rows = [{"prompt": "w0 w1 ", "completion": "w2"}, {"prompt": "w3 ", "completion": "w4 w5"}] * 8
    options = FinetuneOptions(text=text(tokenizer=words, length=12), adapters={"rank": 2}, threads=1)
    prepared, _ = transfer(decoder_files.decoder(quantized=True), rows, options)
    assert prepared.trainable
    assert all(".lora_" in name for name in prepared.trainable)


def test_batches_weigh_by_their_tokens_under_accumulation():
    """Two micro-batches of different numbers of counted tokens make the step of both together."""
    rows = [{"prompt": "w0 ", "completion": "w1 w2 w3 w4"}, {"prompt": "w5 w6 ", "completion": "w7"}]

    def program(every: int) -> Program:
        optimizer = burnish.optim.sgd(lr=0.1)
        return burnish.compile(
            gpt2(VOCABULARY, **SIZES),
            loss=LANGUAGE,
            optimizer=burnish.optim.accumulate(optimizer, every) if every > 1 else optimizer,
        )

    whole, parts = program(1), program(2)
    dataset = TextDataset(rows, text(task="causal"), DataSpec.by(whole))
    with burnish.Session(whole, threads=1) as one, burnish.Session(parts, threads=1) as other:
        one.step(dataset.batch(np.arange(2)))
        for index in range(2):
            other.step(dataset.batch(np.array([index])))
        expected, found = one.state(), other.state()
    for name in (name for name in expected if name.startswith("param/")):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6, err_msg=name)


def test_the_cache_of_optimum_is_empty():
    """Keys of each layer, and a branch that reads the cache or not."""
    model = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["": 18]>
decoder (int64[batch, tokens] input_ids, float[batch, past_sequence_length, 4] past_key, bool[1] use_cache_branch)
  => (float[batch, tokens, 25] logits, float[batch, total, 4] present_key) <int64[1] one = {1}> {
  h = Gather(table, input_ids)
  joined = Concat<axis = 1>(past_key, h)
  present_key = If (use_cache_branch) <
    then_branch = with () => (a) { a = Identity(joined) }, else_branch = without () => (b) { b = Identity(h) }
  >
  summed = CumSum(h, one)
  logits = MatMul(summed, head)
}""")
    rng = np.random.default_rng(0)
    for name, shape in (("table", (25, 4)), ("head", (4, 25))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    prepared, _ = transfer(model, ROWS, FinetuneOptions(text=text(), threads=1))
    assert [value.name for value in prepared.model.graph.inputs] == ["input_ids"]
    (line,) = (note for note in prepared.notes if note.startswith("cache: "))
    assert line.startswith("cache: it is empty ('past_sequence_length', 'use_cache_branch': 0), and the tuned file is without")


def test_perplexities_are_no_percentages(tmp_path):
    made, _ = finetuned(gpt2(VOCABULARY, **SIZES), tmp_path, quantize="int8")
    assert made.notes[-1].startswith("quantization: perplexity ")
    assert "%" not in made.notes[-1]
