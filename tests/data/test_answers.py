"""Prompts with completions, and messages: which tokens count, how they are padded and cut, and hostile chat templates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from word_texts import BUCKETS, Columns, spec

import burnish
from burnish.cli.console import message_lines
from burnish.data import DataSpec, Text, TextDataset, open_dataset
from burnish.errors import ConfigurationError, DataError
from oracles.causal_decoder import masked_decoder

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "</s>", "<|user|>", "<|assistant|>", *(f"w{number}" for number in range(20))]
NUMBER = {word: number for number, word in enumerate(WORDS)}
IGNORED = -100
BLOCKS = (
    "{% for message in messages %}<|{{ message.role }}|> {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }} </s>{% endgeneration %} {% else %}{{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
PLAIN = BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT = [
    {"role": "user", "content": "w0 w1"},
    {"role": "assistant", "content": "w2"},
    {"role": "user", "content": "w3"},
    {"role": "assistant", "content": "w4 w5"},
]


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(NUMBER, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[PAD]", "[UNK]", "</s>"])
    return made


@cache
def masked_spec() -> DataSpec:
    return DataSpec.by(burnish.compile(masked_decoder(), loss="cross_entropy:class_axis=-1"))


def opened(source: Any, *, of: DataSpec | None = None, **options: Any) -> TextDataset:
    return TextDataset(
        source,
        Text(**{"tokenizer": tokenizer(), "task": "causal", "buckets": BUCKETS, "length": 12} | options),
        of or spec("causal"),
    )


def counted(dataset: TextDataset, index: int = 0) -> list[str]:
    """The tokens that count, in words."""
    labels = dataset.batch(np.array([index]))["labels"][0]
    return [WORDS[label] for label in labels if label != IGNORED]


def test_the_completion_counts_and_the_end_after_it():
    dataset = opened([{"prompt": "w0 w1 ", "completion": "w2 w3"}, {"prompt": "w4 ", "completion": "w5"}])
    batch = dataset.batch(np.arange(2))
    ids, labels = batch["input_ids"], batch["labels"]
    np.testing.assert_array_equal(ids, [[5, 6, 7, 8, 2, 0, 0, 0], [9, 10, 2, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(labels, [[-100, 7, 8, 2, *[-100] * 4], [10, 2, *[-100] * 6]])
    assert dataset.text.train_on == "completion"
    assert dataset.described.text() == "the next token of completions; 12 tokens at most, padded to 4, 8, 12"


def test_a_token_that_reaches_into_the_completion_counts():
    """As where the space before a word belongs to its token."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "w0": 1, "w1w2": 2, "w3": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    dataset = opened([{"prompt": "w0 w1", "completion": "w2 w3"}], tokenizer=made)
    np.testing.assert_array_equal(dataset.batch(np.array([0]))["labels"], [[2, 3, -100, -100]])


@pytest.mark.parametrize("template", [BLOCKS, PLAIN])
def test_answers_of_the_assistant_count(template):
    source = [CHAT, CHAT[:2]]
    options = {"chat_template": template}
    assert counted(opened(source, **options)) == ["w2", "</s>", "w4", "w5", "</s>"]
    assert counted(opened(source, **options), 1) == ["w2", "</s>"]
    assert counted(opened(source, train_on="completion", **options)) == ["w4", "w5", "</s>"]
    whole = ["w0", "w1", "<|assistant|>", "w2", "</s>", "<|user|>", "w3", "<|assistant|>", "w4", "w5", "</s>"]
    assert counted(opened(source, train_on="all", **options)) == whole


def test_prompts_and_completions_of_messages():
    rows = [{"prompt": CHAT[:3], "completion": CHAT[3:]}]
    for train_on, expected in (("completion", ["w4", "w5", "</s>"]), ("assistant", ["w4", "w5", "</s>"])):
        assert counted(opened(rows, chat_template=PLAIN, train_on=train_on)) == expected
        assert counted(opened(rows, chat_template=BLOCKS, train_on=train_on)) == expected


def test_where_the_template_is_found(tmp_path):
    """Beside the tokenizer: in its settings, or in a file that goes before them; with its special tokens."""
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer.json"

    def words() -> list[str]:
        return counted(opened([CHAT[:2]], tokenizer=path))

    assert "the tokenizer has no chat template" in str(opened([CHAT[:2]], tokenizer=path).note)
    assert words() == ["w2"]
    settings = {"eos_token": {"content": "</s>"}, "chat_template": BLOCKS.replace("</s>", "{{ eos_token }}")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert words() == ["w2", "</s>"]
    assert opened([CHAT[:2]], tokenizer=path).note is None
    settings["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": BLOCKS}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert words() == ["w2", "</s>"]
    (tmp_path / "chat_template.jinja").write_text(BLOCKS.replace("{{ message.content }} </s>", "w9 {{ message.content }}"))
    assert words() == ["w9", "w2"]
    (tmp_path / "other.jinja").write_text(BLOCKS.replace("{{ message.content }} </s>", "w8"))
    assert counted(opened([CHAT[:2]], tokenizer=path, chat_template=tmp_path / "other.jinja")) == ["w8"]
    with pytest.raises(ConfigurationError, match=r"chat_template \(--chat-template\): .*none.jinja: the chat template cannot be"):
        opened([CHAT[:2]], tokenizer=path, chat_template=tmp_path / "none.jinja")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json: cannot be read"):
        words()


def test_what_templates_call():
    template = (
        "{{ strftime_now('%Y') | length }} {% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}"
        "{{ {'é': m.content} | tojson }} {% endfor %}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('no system prompt') }}{% endif %}"
    )
    dataset = opened([CHAT], chat_template=template, train_on="all", length=12)
    assert len(dataset) == 1
    with pytest.raises(DataError, match="data: the chat template, on conversation 1, fails: TemplateError: no system prompt"):
        opened([CHAT, [{"role": "system", "content": "w0"}]], chat_template=template, train_on="all")


UNSTABLE = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else 'w9' }} {% endfor %}"


def test_a_template_that_does_not_tell_where_answers_are():
    with pytest.raises(DataError, match=r"writes a message differently once others follow") as refused:
        opened([CHAT], chat_template=UNSTABLE)
    assert "Put {% generation %} and {% endgeneration %} around answers" in str(refused.value)
    assert len(opened([CHAT], chat_template=UNSTABLE, train_on="all")) == 1
    marked = UNSTABLE.replace("{{", "{% generation %}{{").replace("}}", "}}{% endgeneration %}")
    assert len(opened([CHAT], chat_template=marked)) == 1
    changed = BLOCKS.replace("</s>{% endgeneration %}", "</s>{% endgeneration %}").replace(
        "{% for", "{% filter upper %}{% for", 1
    )
    assert len(opened([CHAT], chat_template=changed.replace("{% endfor %}", "{% endfor %}{% endfilter %}"))) == 1
    cut = (
        "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ x[1:] }} {% endfor %}"
    )
    with pytest.raises(DataError, match="is changed after it is written"):
        opened([CHAT], chat_template=cut)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does what no template needs to: access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "does what no template needs to: access to attribute '__init__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ 'a' * 10 ** 11 }}", "takes more than .* bytes of memory"),
        ("{% for i in range(99999) %}{{ '%0999d' % i }}{% endfor %}", "a conversation becomes more than .* characters"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{% if", "the chat template fails: TemplateSyntaxError"),
    ],
)
def test_hostile_templates(template, message):
    with pytest.raises(DataError, match=message) as refused:
        opened([CHAT], chat_template=template)
    assert len(message_lines(str(refused.value))[0]) <= 200
    assert "--chat-template FILE" in str(refused.value)


def test_a_template_without_an_end(monkeypatch):
    monkeypatch.setattr("burnish.data.text.chat_template.SECONDS", 1.0)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match="the chat template takes longer than 1 s"):
        opened([CHAT], chat_template=endless)


def test_an_answer_that_is_cut_off_is_counted_and_named(tmp_path):
    rows = [{"prompt": "w0 " * count, "completion": "w1"} for count in (2, 9, 3, 5, 20)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = opened(path, length=5, buckets=None)
    assert len(dataset) == 2
    expected = "left out, as there is nothing of a completion within 5 tokens (--max-tokens): 3 of 5, line 2, line 4, line 5"
    assert expected in str(dataset.note)
    assert "of 5 texts, 3 had more than 5 tokens, and lost the rest" in str(dataset.note)
    assert [counted(dataset, index) for index in range(2)] == [["w1", "</s>"], ["w1", "</s>"]]
    with pytest.raises(DataError, match=r"there is nothing of a completion within 3 tokens .*, in no text: allow more tokens"):
        opened(rows[1:2], length=3, buckets=None)
    with pytest.raises(DataError, match="line 2 has 11 tokens, and 5 at most are read"):
        opened(path, length=5, buckets=None, too_long="error")


def test_padding_on_the_left_changes_no_label():
    rows = [{"prompt": "w0 w1 ", "completion": "w2 w3"}, {"prompt": "w4 ", "completion": "w5"}]
    right = opened(rows, of=masked_spec()).batch(np.arange(2))
    left = opened(rows, of=masked_spec(), padding_side="left").batch(np.arange(2))
    np.testing.assert_array_equal(left["attention_mask"], [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(left["position_ids"], [[0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 1, 2]])
    for row in range(2):
        is_token = left["attention_mask"][row] == 1, right["attention_mask"][row] == 1
        for name in ("input_ids", "labels", "position_ids"):
            np.testing.assert_array_equal(left[name][row][is_token[0]], right[name][row][is_token[1]])
        assert (left["labels"][row][~is_token[0]] == IGNORED).all()
    texts = opened(["w0 w1", "w2"], of=masked_spec(), padding_side="left").batch(np.arange(2))
    np.testing.assert_array_equal(texts["labels"], [[-100, 6, 2, -100], [-100, -100, 2, -100]])
    with pytest.raises(ConfigurationError, match="the model has no input 'attention_mask' to hide padding before a text"):
        opened(rows, padding_side="left")


def test_joined_pieces_keep_what_counts():
    rows = [{"prompt": "w0 w1 ", "completion": "w2"}, {"prompt": "w3 ", "completion": "w4 w5"}]
    dataset = opened(rows, joined=True, length=4, buckets=None)
    np.testing.assert_array_equal(dataset.batch(np.arange(2))["labels"][:, :4], [[-100, 7, 2, -100], [9, 10, 2, -100]])
    part = dataset.part(np.array([1]))
    np.testing.assert_array_equal(part.batch(np.array([0]))["labels"][:, :4], [[9, 10, 2, -100]])


def test_forms_of_the_same_rows(tmp_path):
    """Rows and columns in Python, a data set of Hugging Face, and each kind of file give the same batch."""
    rows = [{"prompt": f"w{number} ", "completion": f"w{number + 1}"} for number in range(3)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.csv").write_text("prompt,completion,source\n" + "".join(f"{p},{c},x\n" for p, c in map(dict.values, rows)))
    expected = opened(rows).batch(np.arange(3))["labels"]
    for source in (columns, Columns(columns), tmp_path / "rows.jsonl", tmp_path / "rows.csv"):
        np.testing.assert_array_equal(opened(source).batch(np.arange(3))["labels"], expected)
    assert "not read: 'source'" in str(opened(tmp_path / "rows.csv").note)
    chats = {"messages": [CHAT, CHAT[:2]]}
    cells = [json.dumps(each).replace('"', '""') for each in chats["messages"]]
    (tmp_path / "chats.csv").write_text("messages\n" + "".join(f'"{cell}"\n' for cell in cells))
    older = {
        "messages": [{"role": [m["role"] for m in each], "content": [m["content"] for m in each]} for each in chats["messages"]]
    }
    expected = opened(chats["messages"], chat_template=BLOCKS).batch(np.arange(2))["labels"]
    for source in (chats, [{"messages": each} for each in chats["messages"]], older, tmp_path / "chats.csv"):
        np.testing.assert_array_equal(opened(source, chat_template=BLOCKS).batch(np.arange(2))["labels"], expected)


def test_parquet_with_messages(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": [CHAT, CHAT[:2]]}), tmp_path / "chats.parquet")
    assert counted(opened(tmp_path / "chats.parquet", chat_template=BLOCKS), 1) == ["w2", "</s>"]


def test_tokens_with_labels_of_hugging_face():
    columns = {"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100, -100, 7], [-100, 9]], "attention_mask": [[1, 1, 1], [1, 1]]}
    np.testing.assert_array_equal(
        opened(columns, tokenizer=None).batch(np.arange(2))["labels"][:, :3], [[-100, 7, -100], [9, -100, -100]]
    )
    every = opened(columns, tokenizer=None, train_on="all").batch(np.arange(2))["labels"]
    np.testing.assert_array_equal(every[:, :3], [[6, 7, -100], [9, -100, -100]])
    with pytest.raises(DataError, match="'labels' of sample 0 are neither its tokens nor -100"):
        opened({**columns, "labels": [[6, 7, -100], [9, -100]]}, tokenizer=None)


def test_a_conversation_without_an_answer_is_read_where_nothing_is_learned():
    predicting = DataSpec(spec("causal").data, None, predicts=True)
    dataset = opened([CHAT[:1], CHAT], of=predicting, chat_template=BLOCKS)
    assert len(dataset) == 2
    assert [*dataset.batch(np.arange(1))] == ["input_ids"]


def test_the_model_says_what_it_was_trained_on():
    dataset = opened([CHAT], chat_template=BLOCKS, train_on="all")
    known = spec("causal").like(burnish.data.DataDescription.of(dataset))
    again = TextDataset([CHAT], Text(tokenizer=tokenizer(), chat_template=BLOCKS), known)
    assert (again.text.task, again.text.train_on) == ("causal", "all")
    assert TextDataset(["w0 w1"], Text(tokenizer=tokenizer()), known).text.train_on == "all"
    left = opened(["w0 w1"], of=masked_spec(), padding_side="left")
    again = TextDataset(["w0 w1"], Text(tokenizer=tokenizer()), masked_spec().like(burnish.data.DataDescription.of(left)))
    assert again.text.padding_side == "left"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (["w0"], {"train_on": "completion"}, r"train_on='completion' \(--train-on\), and the data hold plain texts"),
        (
            [{"prompt": "w0", "completion": "w1"}],
            {"train_on": "assistant"},
            "a prompt and a completion: give 'completion' or 'all'",
        ),
        (["w0"], {"train_on": "answers"}, r"train_on='answers' \(--train-on\): give 'completion', 'assistant', 'all'"),
        (["w0"], {"train_on": "all", "task": "masked"}, "is for the task 'causal', and this is 'masked'"),
        (["w0"], {"padding_side": "both"}, "give 'right' or 'left'"),
    ],
)
def test_settings_that_do_not_fit(source, options, message):
    with pytest.raises(ConfigurationError, match=message):
        opened(source, **options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (CHAT, r"these are the messages of one conversation: give a list of conversations, \[\[...\], ...\]"),
        ({"messages": ["w0"]}, "sample 0: 'messages' is a str, and a list of objects with 'role' and 'content' is expected"),
        ({"messages": [[]]}, "sample 0: 'messages' is empty"),
        ({"messages": [CHAT, [{"from": "user", "value": "w0"}]]}, "sample 1: message 0 of 'messages' has 'from', 'value', and"),
        ({"messages": [[{"role": "user", "content": 3}]]}, "the content of message 0 is a int, and a text is expected"),
        ({"messages": [CHAT[:1]]}, "there is nothing of an answer of the assistant within 12 tokens"),
        ({"prompt": ["w0"], "completion": [CHAT]}, "one of prompt and completion is a text, and the other is not"),
        ([{"prompt": "w0", "completion": "w1"}, "w0"], "sample 1 is a str, and the first is an object"),
        ({"prompt": ["w0"], "answer": ["w1"]}, "which column holds the texts is not known"),
    ],
)
def test_data_that_do_not_fit(source, message):
    with pytest.raises(DataError, match=message):
        opened(source, chat_template=BLOCKS)


def test_a_line_without_an_answer_is_named(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w0", "completion": "w1"}\n{"prompt": "w0"}\n')
    with pytest.raises(DataError, match="line 2: no value for 'completion'"):
        open_dataset(tmp_path / "rows.jsonl", spec("causal"), text=Text(tokenizer=tokenizer(), task="causal"))
