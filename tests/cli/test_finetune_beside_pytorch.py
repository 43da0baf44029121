"""``burnish finetune`` comes to the accuracy of the same transfer by hand in PyTorch, and leaves frozen tensors as they are."""

from __future__ import annotations

import pytest

import finetune


@pytest.mark.campaign
@pytest.mark.parametrize("what", ["all", "head"])
@pytest.mark.parametrize("name", ["perceptron", "keras"])
def test_the_accuracy_is_that_of_pytorch(tmp_path, name, what):
    data = {kind: tmp_path / kind for kind in ("images", "table", "text")}
    for place in data.values():
        place.mkdir()
    finetune.write_images(data["images"])
    finetune.write_table(data["table"])
    folder = tmp_path / name
    folder.mkdir()
    figures = finetune.compare(name, what, data, folder, finetune.pretrained(name, folder), 1)
    row = dict(zip(finetune.HEADER, figures, strict=True))
    assert row["within a point"] == "yes", row
    assert float(row["burnish %"]) > 40, row
    assert row["frozen bits"] == ("yes" if what == "head" else "-"), row


def test_sentences_are_told_apart_by_their_words():
    """The made-up texts hold what is to be learned: words of the topic, four times."""
    rng = finetune.np.random.default_rng(0)
    for topic in range(10):
        words = finetune.sentence(rng, topic)
        own = range(topic * finetune.WORDS, (topic + 1) * finetune.WORDS)
        assert sum(int(word) in own for word in words) >= 4
        assert len(words) < 16
