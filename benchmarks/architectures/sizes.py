"""The architectures in sizes of which a step takes long enough to be timed, with the batch that it is timed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from architectures import catalogue, detection, images, pixels, text
from architectures.catalogue import ARCHITECTURES, Architecture

TOKENS = 64
_WORDS = catalogue.classes(text.VOCABULARY, TOKENS)
_TRANSFORMER = {"width": 256, "heads": 4, "layers": 4}


def _images(name: str, side: int, build: type | partial, batch: int, labels: int | None = None) -> tuple[Architecture, int]:
    """An architecture over images of this side; ``labels`` is the number of classes that a pixel may have."""
    resized = replace(ARCHITECTURES[name], build=build, inputs=catalogue.numbers(3, side, side))
    return (replace(resized, labels=catalogue.classes(labels, side, side)) if labels is not None else resized), batch


SIZED: Mapping[str, tuple[Architecture, int]] = {
    "mnist": (ARCHITECTURES["mnist"], 64),
    "bert": (
        replace(ARCHITECTURES["bert"], build=partial(text.Bert, **_TRANSFORMER), inputs=catalogue.padded_tokens(TOKENS)),
        16,
    ),
    "distilbert": (
        replace(
            ARCHITECTURES["distilbert"],
            build=partial(text.Bert, sentences=False, **_TRANSFORMER),
            inputs=catalogue.padded_tokens(TOKENS),
        ),
        16,
    ),
    "gpt2": (
        replace(
            ARCHITECTURES["gpt2"],
            build=partial(text.Gpt2, **_TRANSFORMER),
            inputs=catalogue.tokens_of(TOKENS),
            labels=_WORDS,
        ),
        16,
    ),
    "llama": (
        replace(
            ARCHITECTURES["llama"],
            build=partial(text.Llama, **_TRANSFORMER),
            inputs=catalogue.tokens_of(TOKENS),
            labels=_WORDS,
        ),
        16,
    ),
    "t5": (
        replace(
            ARCHITECTURES["t5"],
            build=partial(text.T5, **_TRANSFORMER),
            inputs=catalogue.pairs_of_tokens(TOKENS),
            labels=_WORDS,
        ),
        16,
    ),
    "vit": _images("vit", 64, partial(images.Vit, pixels=64, **_TRANSFORMER), 16),
    "swin": _images("swin", 64, partial(images.Swin, version=1, pixels=64, width=64), 16),
    "swin_v2": _images("swin_v2", 64, partial(images.Swin, version=2, pixels=64, width=64), 16),
    "deeplab": _images("deeplab", 128, partial(pixels.DeepLab, width=32), 8, 4),
    "lraspp": _images("lraspp", 128, partial(pixels.LrAspp, width=32), 8, 4),
    "unet": _images("unet", 128, partial(pixels.UNet, width=16), 4, 4),
    "video_resnet": (
        replace(
            ARCHITECTURES["video_resnet"],
            build=partial(images.VideoResNet, width=16),
            inputs=catalogue.numbers(3, 8, 56, 56),
        ),
        4,
    ),
    "frames_lstm": (
        replace(
            ARCHITECTURES["frames_lstm"],
            build=partial(images.FramesThenLstm, width=32, hidden=128),
            inputs=catalogue.numbers(8, 3, 64, 64),
        ),
        8,
    ),
    **{
        name: (
            replace(
                ARCHITECTURES[name],
                build=partial(images.Recurrent, name.upper(), width=128, hidden=128),
                inputs=catalogue.tokens_of(TOKENS),
            ),
            16,
        )
        for name in ("lstm", "gru")
    },
    "yolo": (
        replace(
            ARCHITECTURES["yolo"],
            build=lambda: detection.WithLoss(detection.Yolo(32), detection.YoloLoss(16)),
            inputs=catalogue.yolo_inputs(128),
        ),
        8,
    ),
    "ssd": (
        replace(
            ARCHITECTURES["ssd"],
            build=lambda: detection.WithLoss(detection.Ssd(32), detection.SsdLoss()),
            inputs=catalogue.ssd_inputs(128),
        ),
        8,
    ),
}
"""By the names of ``ARCHITECTURES``."""
