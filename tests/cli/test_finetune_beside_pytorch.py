"""``burnish finetune`` comes to the accuracy of the same transfer by hand in PyTorch, and leaves frozen tensors as they are."""

from __future__ import annotations

import pytest
import torch

import finetune
import finetune_by_hand
import finetune_models

SEEDS = {"mobilenet": (0, 1, 2), "keras": (0, 1, 2)}
"""Where both trainings start alike but not equal, one seed says little: batch normalization was folded, and is put back."""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "what"),
    [("perceptron", "all"), ("perceptron", "head"), ("keras", "all"), ("keras", "head"), ("bert", "all"), ("mobilenet", "all")],
)
def test_the_accuracy_is_that_of_pytorch(tmp_path, name, what):
    data = {kind: tmp_path / kind for kind in ("images", "table", "text")}
    for place in data.values():
        place.mkdir()
    finetune.write_images(data["images"])
    finetune.write_table(data["table"])
    finetune.write_texts(data["text"])
    folder = tmp_path / name
    folder.mkdir()
    file = finetune.pretrained(name, folder)
    figures = finetune.compare(name, what, data, folder, file, 1, SEEDS.get(name, (0,)))
    row = dict(zip(finetune.HEADER, figures, strict=True))
    assert row["within a point"] == "yes", row
    assert float(row["burnish %"]) > 40, row
    assert row["frozen bits"] == ("yes" if what == "head" else "-"), row


def test_sentences_are_told_apart_by_their_words():
    """The made-up texts hold what is to be learned: words of the topic, four times."""
    rng = finetune.np.random.default_rng(0)
    for topic in range(10):
        words = finetune.sentence(rng, topic)
        own = {*finetune.words_of(topic).tolist()}
        assert sum(int(word) in own for word in words) >= 4
        assert len(words) < 16
        assert len(own) == finetune.WORDS


@pytest.mark.slow
def test_the_fused_module_computes_the_same_without_normalization():
    """Its statistics are drawn at random: with those of a new module fusing would change nothing."""
    generator = torch.Generator().manual_seed(0)
    module = finetune_models.ChannelsLast()
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
    images = torch.randn(2, 32, 32, 3, generator=generator)
    with torch.no_grad():
        expected = module.eval()(images)
        fused = finetune_by_hand.fused(module, (images,))
        assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in fused.modules())
        torch.testing.assert_close(fused(images), expected)


def test_running_statistics_follow_the_data_within_a_short_run():
    """By hand, those that move by a hundredth with each step are made ten times as quick; others keep their pace."""
    module = torch.nn.Sequential(*(torch.nn.BatchNorm2d(2, momentum=momentum) for momentum in (0.01, 0.1, 0.3, None)))
    finetune_by_hand.quicken_statistics(module)
    assert [layer.momentum for layer in module] == [0.1, 0.1, 0.3, None]
