"""A single-shot detector with batch normalization, after Liu et al. 2016, "SSD: Single shot multibox detector"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish import losses
from burnish.graph import Tensor
from burnish.graph.annotations import OBJECTIVE
from burnish.models.layers import Layers, check_extents, check_halvings, check_input_shape
from burnish.validation import check_count

HALVINGS = 3
"""Number of halvings of height and width; boxes come from the maps after the second and the third."""
SCALES = (0.25, 0.5, 0.8)
RATIOS = (2.0,)
SHAPES = 2 + 2 * len(RATIOS)
"""Default boxes per cell: two squares, and a wide and an upright one for each ratio."""
SIDES = 4


def ssd(input_shape: Sequence[int], classes: int = 20, width: int = 16, seed: int = 0) -> ir.Model:
    """Build an object detector in standard ONNX, in inference form, with initial weights.

    Each of three stages is two 3x3 convolutions with batch normalization and ReLU, the first with stride 2. Two maps, a quarter
    and an eighth of the image's sides, give offsets and scores of four default boxes per cell. The metadata hold the loss ``ssd``
    with the sizes of the default boxes, for ``burnish.finetune``.

    Args:
        input_shape: shape of an image: (channels, height, width). Height and width are multiples of 8.
        classes: number of classes, without the background.
        width: channels of the first stage.
        seed: seed of the initial weights: convolutions normal with variance 2 / fan-out (He et al. 2015), the last ones uniform
            with bound 1 / sqrt(fan-in).

    Returns:
        A model with the input ``x`` (float32, [batch, channels, height, width]) and the outputs ``boxes`` (float32, [batch, A,
        4]), offsets from A default boxes, and ``scores`` (float32, [batch, A, 1 + classes]), logits with the background first, as
        ``burnish.losses.ssd`` reads them.

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1 or is too large, an input shape that is not an
            image's, or a height or width that is not a multiple of 8.
    """
    check_input_shape("ssd", input_shape, "channels", "height", "width")
    check_extents("ssd", classes=classes, width=width)
    check_count("ssd", 0, seed=seed)
    check_halvings("ssd", input_shape, HALVINGS)
    channels, *sides = input_shape
    network = Layers("ssd", seed)
    builder = network.builder
    y = network.input("x", ir.DataType.FLOAT, *input_shape)
    boxes, scores = [], []
    for stage in range(HALVINGS):
        for layer in range(2):
            name, stride = f"stages.{stage + 1}.{layer + 1}", 2 - layer
            y = builder.op("Relu", network.normalized_convolution(name, y, channels, width << stage, stride=stride))
            channels = width << stage
        if stage:
            boxes.append(_of_cells(network, f"boxes.{stage}", y, channels, SIDES))
            scores.append(_of_cells(network, f"scores.{stage}", y, channels, 1 + classes))
    grids = [[side >> (stage + 1) for side in sides] for stage in range(1, HALVINGS)]
    loss = losses.ssd(grids=grids, scales=SCALES, ratios=[RATIOS] * len(grids))
    network.metadata[OBJECTIVE.key] = OBJECTIVE.write(
        {"loss": loss.options(), "metrics": ["coco_map"], "outputs": ["boxes", "scores"]}
    )
    count = SHAPES * sum(height * width for height, width in grids)
    network.output("boxes", builder.op("Concat", *boxes, axis=1), count, SIDES)
    return network.model(builder.op("Concat", *scores, axis=1), count, 1 + classes, name="scores")


def _of_cells(network: Layers, name: str, x: Tensor, channels: int, numbers: int) -> Tensor:
    """Add a convolution that gives ``numbers`` values per default box: [batch, boxes, numbers], cell by cell."""
    bound = 1 / np.sqrt(9 * channels)
    weight = network.uniform(f"{name}.weight", bound, SHAPES * numbers, channels, 3, 3)
    bias = network.uniform(f"{name}.bias", bound, SHAPES * numbers)
    y = network.builder.op("Conv", x, weight, bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y = network.builder.op("Transpose", y, perm=[0, 2, 3, 1])
    return network.builder.op("Reshape", y, network.builder.constant(np.array([0, -1, numbers])))
