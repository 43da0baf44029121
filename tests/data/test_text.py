"""Texts as data: tokens, padding to a few lengths, masks, labels, the order of an epoch, where texts are read from."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_texts import BUCKETS, VOCABULARY, WORDS, Columns, labelled, opened, program, spec, texts

import burnish
from burnish.data import DataSpec, EpochDataset, Loader, Text, TextDataset, as_dataset, open_dataset
from burnish.data.model_metadata import DataDescription
from burnish.data.text.settings import TextDescription, powers_of_two
from burnish.data.text.tokens import Masking, order_by_length
from burnish.data.unlabelled import open_samples
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import CheckpointError, DataError
from oracles.small_tokenizers import FIRST, LAST, MASK, PAD, word_tokenizer
from specs.program_inputs import class_entry, value_entry


def test_each_batch_is_padded_to_the_first_bucket_that_holds_it() -> None:
    data = opened("label", (["w0", "w1 w2 w3", "w4 w5 w6 w7 w8 w9 w10"], ["no", "yes", "no"]))
    assert isinstance(data, EpochDataset)
    assert (len(data), data.classes, data.note) == (3, ("no", "yes"), None)
    batch = data.batch(np.array([0]))
    assert {name: (array.dtype.name, array.tolist()) for name, array in batch.items()} == {
        "input_ids": ("int64", [[FIRST, 5, LAST, PAD]]),
        "attention_mask": ("int64", [[1, 1, 1, 0]]),
        "labels": ("int64", [0]),
    }
    batch = data.batch(np.array([1, 0]))
    assert batch["input_ids"].tolist() == [[FIRST, 6, 7, 8, LAST, PAD, PAD, PAD], [FIRST, 5, LAST, *[PAD] * 5]]
    assert batch["labels"].tolist() == [1, 0]
    assert data.batch(np.array([2, 0]))["input_ids"].shape == (2, 12)


def test_buckets_are_powers_of_two_up_to_what_the_model_takes() -> None:
    assert powers_of_two(100) == (16, 32, 64, 100)
    assert powers_of_two(64) == (16, 32, 64)
    assert powers_of_two(12) == (12,)
    data = TextDataset((["w0"], [0]), Text(tokenizer=word_tokenizer()), spec())
    assert (data.text.length, data.text.buckets) == (12, (12,))


def test_a_causal_model_learns_the_next_token_and_no_padding() -> None:
    data = opened("causal", ["w0 w1", "w2 w3 w4 w5 w6"])
    batch = data.batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[FIRST, 5, 6, LAST, *[PAD] * 4], [FIRST, 7, 8, 9, 10, 11, LAST, PAD]]
    assert batch["labels"].tolist() == [[5, 6, LAST, *[-100] * 5], [7, 8, 9, 10, 11, LAST, -100, -100]]
    assert set(batch) == {"input_ids", "labels"}


def test_joined_texts_are_cut_into_pieces_of_one_length() -> None:
    data = opened("causal", ["w0 w1", "w2", "w3 w4 w5"], joined=True, length=4)
    whole = [FIRST, 5, 6, LAST, FIRST, 7, LAST, FIRST, 8, 9, 10, LAST]
    assert data.batch(np.arange(3))["input_ids"].reshape(-1).tolist() == whole
    assert data.cut == 0


def test_long_texts_keep_what_the_tokenizer_puts_around_them_and_are_counted() -> None:
    data = opened("label", (["w0 w1 w2 w3 w4 w5", "w1"], [0, 1]), length=4)
    assert data.batch(np.array([0]))["input_ids"].tolist() == [[FIRST, 5, 6, LAST]]
    assert (data.cut, data.note) == (1, "data: of 2 texts, 1 had more than 4 tokens, and lost the rest")
    with pytest.raises(DataError, match=r"sample 0 has 8 tokens, and 4 at most are read: raise the length"):
        opened("label", (["w0 w1 w2 w3 w4 w5", "w1"], [0, 1]), length=4, too_long="error")


def test_a_text_is_told_as_the_model_reads_it() -> None:
    dataset = labelled()
    assert [dataset.words(index) for index in (0, 7)] == [texts(20)[index] for index in (0, 7)]
    copied = copy.copy(dataset)  # as for a process that reads ahead, which takes no tokenizer
    assert copied.words(0) is None
    np.testing.assert_array_equal(copied.batch(np.arange(3))["input_ids"], dataset.batch(np.arange(3))["input_ids"])


def test_a_tokenizer_s_own_padding_and_truncation_are_not_taken() -> None:
    tokenizer = word_tokenizer()
    tokenizer.enable_padding(length=11)
    tokenizer.enable_truncation(3)
    data = TextDataset((["w0 w1 w2"], [0]), Text(tokenizer=tokenizer, buckets=BUCKETS), spec())
    assert data.batch(np.array([0]))["input_ids"].tolist() == [[FIRST, 5, 6, 7, LAST, PAD, PAD, PAD]]


def test_the_share_that_is_masked_and_what_becomes_of_it() -> None:
    """Of 15 %: 80 % the mask, 10 % another token, 10 % as they were."""
    masking = Masking(0.15, MASK, VOCABULARY, frozenset(range(5)))
    tokens = np.array([FIRST, *(5 + np.arange(98) % WORDS), LAST])
    masked = stayed = chosen_in_all = 0
    places = np.zeros(100, int)
    for number in range(400):
        replaced, chosen = masking.masked(tokens, 3, 0, number)
        assert chosen.sum() == 15
        assert (replaced[~chosen] == tokens[~chosen]).all()
        others = replaced[chosen & (replaced != MASK)]
        assert (others >= 5).all()
        masked += int((replaced[chosen] == MASK).sum())
        stayed += int((replaced[chosen] == tokens[chosen]).sum())
        chosen_in_all += int(chosen.sum())
        places += chosen
    assert not places[[0, 99]].any()
    # Each of them within five standard deviations; a token that is drawn may be what stood there.
    for count, share in ((masked, 0.8), (stayed, 0.1 + 0.1 / WORDS)):
        assert abs(count - share * chosen_in_all) < 5 * np.sqrt(share * (1 - share) * chosen_in_all)
    assert np.abs(places[1:99] - 400 * 15 / 98).max() < 5 * np.sqrt(400 * 15 / 98)


def test_masks_are_a_function_of_seed_epoch_and_text_alone() -> None:
    data = opened("masked", texts(30))

    def rows(indices: list[int], seed: int, epoch: int) -> dict[int, tuple[list[int], list[int]]]:
        batch = data.batch_of_epoch(np.array(indices), seed, epoch)
        lengths = batch["attention_mask"].sum(1)
        return {
            index: (ids[:length].tolist(), labels[:length].tolist())
            for index, ids, labels, length in zip(indices, batch["input_ids"], batch["labels"], lengths, strict=True)
        }

    whole = rows(list(range(30)), 1, 2)
    assert rows([7, 29, 3], 1, 2) == {index: whole[index] for index in (7, 29, 3)}
    assert rows(list(range(30)), 1, 3) != whole
    assert rows(list(range(30)), 2, 2) != whole
    fixed = data.batch(np.arange(30))
    np.testing.assert_array_equal(data.batch(np.arange(30))["input_ids"], fixed["input_ids"])
    for ids, labels in whole.values():
        assert sum(label != -100 for label in labels) >= 1
        assert all(label in (-100, token) or token == MASK or token >= 5 for token, label in zip(ids, labels, strict=True))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_an_epoch_visits_each_text_once_and_keeps_like_lengths_together(lengths, batch_size, seed, epoch) -> None:
    buckets = np.array(lengths)
    order = order_by_length(buckets, batch_size, seed, epoch)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    whole = len(lengths) // batch_size
    mixed = sum(len(set(buckets[order[start * batch_size : (start + 1) * batch_size]])) > 1 for start in range(whole))
    assert mixed <= len(set(lengths)) - 1
    np.testing.assert_array_equal(order, order_by_length(buckets, batch_size, seed, epoch))


def test_the_order_differs_by_epoch_and_by_seed() -> None:
    buckets = np.arange(64) % 3
    orders = {order_by_length(buckets, 8, seed, epoch).tobytes() for seed, epoch in itertools.product(range(2), range(2))}
    assert len(orders) == 4


@pytest.mark.parametrize("task", ["label", "masked"])
def test_an_epoch_goes_on_anywhere_and_the_parts_of_workers_are_the_whole(task: str) -> None:
    data = labelled(23) if task == "label" else opened("masked", texts(23))
    loader = Loader(data, 5, seed=4)
    batches = list(loader.epoch(2))
    for number, batch in enumerate(Loader(data, 5, seed=4).epoch(2, 3), 3):
        assert all((array == batches[number][name]).all() for name, array in batch.items())
    parts = [list(Loader(data, 5, seed=4, rank=rank, workers=3).epoch(2)) for rank in range(3)]
    for number, batch in enumerate(batches):
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[number][name] for part in parts]), array)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_no_length_compiles_anew_and_padding_changes_no_loss(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    if engine == "onnxruntime":
        load = OnnxRuntimeEngine.inference_session
        monkeypatch.setattr(
            OnnxRuntimeEngine, "inference_session", lambda *given, **named: made.append(1) or load(*given, **named)
        )
    else:
        from burnish.engines.torch import engine as module

        translate = module.translate
        monkeypatch.setattr(module, "translate", lambda *given, **named: made.append(1) or translate(*given, **named))
    data = opened("masked", ["w0", "w1 w2 w3", *texts(6)])
    in_one_bucket = opened("masked", ["w0", "w1 w2 w3", *texts(6)], buckets=(12,))
    session = burnish.Session(program("masked"), engine=engine)
    extents = set()
    for indices in ([0], [1, 0], list(range(8)), [2], [0, 1]):
        batch, padded = (each.batch_of_epoch(np.array(indices), 0, 1) for each in (data, in_one_bucket))
        extents.add(batch["input_ids"].shape[1])
        figures, others = session.evaluate(batch), session.evaluate(padded)
        assert figures["loss"] == pytest.approx(others["loss"], rel=1e-5)
        assert session.step(batch)["loss"] == pytest.approx(figures["loss"], rel=1e-5)
    assert extents == set(BUCKETS)
    assert len(made) == 2  # the graphs of a step and of an evaluation


ROWS = [("no", "w0 w1"), ("yes", "w2, with a comma"), ("no", "w3")]
TOKENS = [[FIRST, 5, 6, LAST], [FIRST, 7, 1, 1, 1, 1, LAST], [FIRST, 8, LAST]]


def written(folder: Path, name: str) -> Any:
    path = folder / name
    if name == "lines.txt":
        path.write_text("".join(f"{label}\t{text}\n\n" for label, text in ROWS))
    elif name == "table.csv":
        path.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for label, text in ROWS))
    elif name == "table.tsv":
        path.write_text("kind\ttext\n" + "".join(f"{label}\t{text}\n" for label, text in ROWS))
    elif name == "lines.jsonl":
        path.write_text("".join(json.dumps({"label": label, "id": 7, "text": text}) + "\n" for label, text in ROWS))
    elif name == "table.parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = {"label": [label for label, _ in ROWS], "sentence": [text for _, text in ROWS]}
        parquet.write_table(pytest.importorskip("pyarrow").table(columns), path)
    elif name == "columns":
        return Columns({"text": [text for _, text in ROWS], "label": [0, 1, 0]}, ["no", "yes"])
    elif name == "datasets":
        datasets = pytest.importorskip("datasets", reason="a package of its own, which Columns stands for")
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
        columns = {"text": [text for _, text in ROWS], "label": [0, 1, 0]}
        table = pytest.importorskip("pyarrow").table(columns)
        # With a fingerprint it does not pickle the table to make one.
        return datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint="rows")
    return path


@pytest.mark.parametrize("name", ["lines.txt", "table.csv", "table.tsv", "lines.jsonl", "table.parquet", "columns", "datasets"])
def test_texts_are_read_from(tmp_path: Path, name: str) -> None:
    data = as_dataset(written(tmp_path, name), spec(), text=Text(tokenizer=word_tokenizer(), buckets=(7,), length=7))
    assert isinstance(data, TextDataset)
    batch = data.batch(np.arange(3))
    assert [ids[mask == 1].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)] == TOKENS
    assert (data.classes, batch["labels"].tolist()) == (("no", "yes"), [0, 1, 0])
    assert (data.note is not None) == (name == "lines.txt")  # its empty lines


@pytest.mark.parametrize("name", ["lines.txt", "table.csv"])
def test_labels_that_are_numbers_are_class_indices_or_values(tmp_path: Path, name: str) -> None:
    """As those of a table: as names, 10 would come before 2. Names that the model has for its classes stay names."""
    text, path = Text(tokenizer=word_tokenizer()), tmp_path / name
    head, between = ("label,text,note\n", ",") if name == "table.csv" else ("", "\t")
    end = "," if name == "table.csv" else ""  # a column that nothing reads, without values

    def read(of: DataSpec, *labels: str) -> TextDataset:
        path.write_text(head + "".join(f"{label}{between}w0{end}\n" for label in labels))
        data = open_dataset(path, of, text=text)
        assert isinstance(data, TextDataset)
        return data

    of_eleven = replace(spec(), label=class_entry(11))
    data = read(of_eleven, "10", "2", "0")
    assert (data.batch(np.arange(3))["labels"].tolist(), data.classes) == ([10, 2, 0], None)
    known = replace(of_eleven, described=DataDescription(classes=("0", "10", "2")))
    data = read(known, "10", "2", "0")
    assert (data.batch(np.arange(3))["labels"].tolist(), data.classes) == ([1, 2, 0], ("0", "10", "2"))
    data = read(of_eleven, "10", "2", "none")
    assert (data.batch(np.arange(3))["labels"].tolist(), data.classes) == ([0, 1, 2], ("10", "2", "none"))
    values = read(replace(spec(), label=value_entry()), "0.5", "-2")
    assert values.batch(np.arange(2))["targets"].tolist() == [0.5, -2]


def test_labels_that_may_not_be_meant_as_classes_are_said() -> None:
    assert opened("label", (["w0", "w1", "w2"], ["None", "none", "None"])).note == (
        "data: the classes 'None' and 'none' differ in case alone, and are two; 'None', 'none' are classes like the others: "
        "remove these rows where the label is missing"
    )


def test_lines_without_labels_are_texts_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text("w0\tw1\nw2\n")
    data = open_dataset(path, spec("causal"), text=Text(tokenizer=word_tokenizer(), task="causal"))
    assert data.batch(np.array([0]))["input_ids"].tolist() == [[FIRST, 5, 6, LAST, *[PAD] * 8]]
    samples = open_samples(path, spec("label"), text=Text(tokenizer=word_tokenizer(), buckets=BUCKETS))
    assert [len(samples.dataset), *samples.names] == [2, "0", "1"]
    assert {name: array.shape for name, array in samples.dataset.batch(np.array([0, 1])).items()} == {
        "input_ids": (2, 4),
        "attention_mask": (2, 4),
    }


def test_tokens_are_taken_as_they_are_and_their_padding_is_not() -> None:
    padded = [[*row, *[PAD] * (9 - len(row))] for row in TOKENS]
    masks = [[1] * len(row) + [0] * (9 - len(row)) for row in TOKENS]
    source = Columns({"input_ids": padded, "attention_mask": masks, "label": [1, 0, 1]})
    data = as_dataset(source, spec(), text=Text(buckets=BUCKETS, length=12))
    assert data.batch(np.array([2]))["input_ids"].tolist() == [[*TOKENS[2], PAD]]
    assert data.batch(np.array([0, 2]))["labels"].tolist() == [1, 1]
    assert len(as_dataset(source, spec())) == 3


def test_columns_of_numbers_are_a_table() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
            y = MatMul (x, w)
        }""")
    data = as_dataset(Columns({"a": [1.0, 2.0], "b": [3.0, 4.0], "label": [0, 1]}), DataSpec.by(burnish.compile(model)))
    assert data.batch(np.array([1]))["x"].tolist() == [[2.0, 4.0]]


def test_empty_texts_are_counted() -> None:
    tokenizer = word_tokenizer()
    from tokenizers import processors

    tokenizer.post_processor = processors.Sequence([])
    data = TextDataset((["", "w0"], [0, 1]), Text(tokenizer=tokenizer), spec())
    assert (len(data), data.note) == (2, "data: 1 texts have no token")
    data = TextDataset(["w0 w1", "", "w1 w2"], Text(tokenizer=tokenizer, task="masked"), spec("masked"))
    assert (len(data), data.note) == (2, "data: 1 texts with fewer than 1 tokens are left out")


@pytest.mark.slow
def test_a_run_that_stops_within_an_epoch_goes_on_bit_for_bit(tmp_path: Path) -> None:
    text = Text(tokenizer=word_tokenizer(), task="masked", buckets=BUCKETS)
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "seed": 3, "text": text, "progress": False, "threads": 1}

    def trainer(folder: str, **more: Any) -> burnish.Trainer:
        return burnish.Trainer(program("masked"), texts(22), run_directory=tmp_path / folder, **options | more)

    whole = trainer("whole")
    whole.run()

    class Stopped(Exception):
        pass

    stopped = trainer("stopped", checkpoint_every=1)
    step = stopped.session.step
    left = iter(range(8))

    def step_or_stop(*given: Any, **named: Any) -> Any:
        if next(left, None) is None:
            raise Stopped
        return step(*given, **named)

    stopped.session.step = step_or_stop  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        stopped.run()
    again = trainer("stopped", resume=True)
    again.run()
    for name, array in whole.session.state().items():
        np.testing.assert_array_equal(array, again.session.state()[name], err_msg=name)
    other = Text(tokenizer=word_tokenizer(), task="masked", buckets=(12,))
    with pytest.raises(CheckpointError, match="was started with text="):
        trainer("stopped", resume=True, text=other)


def test_a_model_says_how_its_texts_were_read() -> None:
    data = labelled()
    described = DataDescription.of(data)
    assert described.text == data.described
    assert DataDescription.read(described.metadata()) == described
    again = spec().like(described)
    assert TextDataset((["w0"], [0]), Text(tokenizer=word_tokenizer()), again).text.buckets == BUCKETS
    with pytest.raises(DataError, match="the model was trained with another tokenizer"):
        TextDataset((["w0"], [0]), Text(tokenizer=word_tokenizer(9)), again)
    assert data.described.text() == "labels; 12 tokens at most, padded to 4, 8, 12"
    with pytest.raises(DataError, match=r"its metadata 'burnish.text' cannot be read \(text: length='x'"):
        DataDescription.read({"burnish.text": '{"length": "x"}'})
    assert TextDescription.read(TextDescription(length=3).options()) == TextDescription(length=3)


class OfTransformers:
    """A tokenizer in the form of ``transformers``, without one of ``tokenizers`` inside."""

    all_special_ids = (0, 1, 2, 3, 4)
    mask_token_id, pad_token_id, eos_token_id = MASK, PAD, None

    def __len__(self) -> int:
        return VOCABULARY

    def get_vocab(self) -> dict[str, int]:
        return word_tokenizer(WORDS).get_vocab()

    def __call__(self, given: list[str], truncation: bool, padding: bool, max_length: int | None = None) -> dict[str, Any]:
        assert not padding
        rows = [word_tokenizer(WORDS).encode(text).ids for text in given]
        return {"input_ids": [[*row[: max_length - 1], LAST] if truncation and len(row) > max_length else row for row in rows]}


def test_a_tokenizer_of_transformers_is_taken_too() -> None:
    theirs = TextDataset(texts(9), Text(tokenizer=OfTransformers(), task="masked", length=5), spec("masked"))
    ours = TextDataset(texts(9), Text(tokenizer=word_tokenizer(WORDS), task="masked", length=5), spec("masked"))
    assert theirs.cut == ours.cut > 0
    assert theirs.words(0) is None  # this one does not tell
    for name, array in theirs.batch(np.arange(9)).items():
        np.testing.assert_array_equal(array, ours.batch(np.arange(9))[name])
