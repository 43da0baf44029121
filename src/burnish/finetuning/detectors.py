"""Recognition of detectors: the values that hold boxes and scores before they are decoded, and the loss that fits them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish import engines, losses
from burnish.data import Dataset
from burnish.data.annotated.objects import ObjectImages
from burnish.engines import Engine
from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, attribute_value, constant_array
from burnish.graph.uses import remove_unused
from burnish.importer import load
from burnish.losses.detection import BOXES, CROWD, LABELS
from burnish.metrics.average_precision import FOUND, IOU_THRESHOLDS, Picture, coco_average_precision
from burnish.metrics.base import rows_name
from burnish.surgery.linear_sources import LINEAR, PASSING, is_moved, linear_sources
from burnish.training.trained_model import open_model

SIDES = 4
BOXES_ARE_CALLED = ("box", "loc", "dist", "offset", "delta", "reg")
SCORES_ARE_CALLED = ("score", "class", "cls", "logit", "conf", "prob")
REMEDY = "name both, boxes first (head_output=[...], --outputs boxes,scores), and the loss (loss=..., --loss)"


@dataclass(frozen=True)
class Detector:
    """A detector as a loss reads it.

    Attributes:
        boxes, scores: the values.
        channels_first: True for ``[N, numbers, boxes]``, False for ``[N, boxes, numbers]``.
        numbers: numbers per box.
        score_count: scores per box.
        loss: the loss, such as ``task_aligned``, with its settings.
        background: number of scores for the background: 1 or 0.
        is_yes_or_no: True if each score is a separate yes-or-no question.
        doubt: assumption that the file does not confirm, in words; None if there is none.
    """

    boxes: ir.Value
    scores: ir.Value
    channels_first: bool
    numbers: int
    score_count: int
    loss: losses.Loss
    background: int
    is_yes_or_no: bool
    doubt: str | None = None

    @property
    def outputs(self) -> tuple[str, str]:
        """The names of both values, in the order of the loss."""
        return self.boxes.name or "", self.scores.name or ""


def find_detector(model: ir.Model, outputs: Sequence[str] | None = None, loss: losses.LossLike | None = None) -> Detector:
    """Return the detector in a canonical model.

    Boxes and scores are the last values of three axes, made from results of linear layers, before decoding and suppression.
    Distances in bins belong to an anchor-free YOLO; its grids follow from the layers. Boxes bounded by a Sigmoid, one for each
    query, belong to a DETR.

    Args:
        model: the model.
        outputs: names of boxes and scores, if given.
        loss: the loss, if given.

    Raises:
        ConfigurationError: the detector is ambiguous; the message names the option to set.
    """
    boxes, scores = _named(model.graph, outputs) if outputs is not None else _found(model.graph)
    first, count, numbers, score_count = _layout(boxes, scores)
    chosen = losses.get(loss) if loss is not None else _loss_of(boxes, scores, first, count, numbers, score_count)
    if chosen.name not in ("ssd", "task_aligned", "detr"):
        raise ConfigurationError(
            f"finetune: the data hold objects with boxes, and the loss {chosen.name} is none of detectors: give ssd, "
            "task_aligned or detr"
        )
    has_background = chosen.name == "ssd" or (isinstance(chosen, losses.Detr) and not chosen.is_focal)
    if isinstance(chosen, losses.Detr) and boxes.producer() is not None and _is_bounded(boxes):
        boxes = next(reader for reader, _ in boxes.uses() if reader.op_type == "Sigmoid").outputs[0]
    doubt = None
    if loss is None and isinstance(chosen, losses.Detr) and has_background and not _reads(scores, "Softmax"):
        doubt = (
            "scores: the last is taken for that of no object, as in DETR; where each is a question of yes or no, as in Deformable"
            " DETR and RT-DETR, say so (loss='detr:class_loss=focal', --loss detr:class_loss=focal)"
        )
    return Detector(boxes, scores, first, numbers, score_count, chosen, int(has_background), not has_background, doubt)


def _named(graph: ir.Graph, outputs: Sequence[str]) -> tuple[ir.Value, ir.Value]:
    values = {value.name or "": value for node in graph for value in node.outputs}
    if len(outputs) != 2 or any(name not in values for name in outputs):
        raise ConfigurationError(
            f"finetune: outputs {list(outputs)}: a detector has two, boxes and scores, that are values of the model: {REMEDY}"
        )
    boxes, scores = (values[name] for name in outputs)
    for value in (boxes, scores):
        shape = value.shape
        if shape is None or len(shape) != 3:
            raise ConfigurationError(f"finetune: '{value.name}' has shape {shape}, and boxes and scores have three axes")
    return _before_activation(boxes), _before_activation(scores)


def _before_activation(value: ir.Value) -> ir.Value:
    node = value.producer()
    is_activation = node is not None and node.domain == "" and node.op_type in ("Sigmoid", "Softmax", "LogSoftmax")
    before = node.inputs[0] if node is not None and is_activation else None
    return value if before is None else before


def _found(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    candidates: dict[ir.Value, None] = {}
    for node in graph:
        for value in node.outputs:
            readers = [reader for reader, _ in value.uses()]
            passes_on = bool(readers) and all(reader.domain == "" and reader.op_type in PASSING for reader in readers)
            is_last = value.dtype in FLOATING and not passes_on and is_moved(value) and not _is_mean_of_bins(value)
            if is_last and (raw := _of_three_axes(value)) is not None:
                candidates[raw] = None
    pairs = [
        (one, other)
        for one in candidates
        for other in candidates
        if one is not other and _fits(one, other) and (_says(one, BOXES_ARE_CALLED) or not _says(other, BOXES_ARE_CALLED))
    ]
    inner = _read_by_layers(graph, candidates)
    pairs = [pair for pair in pairs if not inner & {*pair}] or pairs
    for tells in (_says_which, _is_activated, _is_square):
        pairs = [pair for pair in pairs if tells(*pair)] or pairs
    if len(pairs) != 1:
        listed = ", ".join(f"'{value.name}' {value.shape}" for value in candidates) or "none"
        raise ConfigurationError(
            f"finetune: the data hold objects with boxes, and which values of the model are boxes and scores cannot be told "
            f"(results of linear layers with three axes: {listed}): {REMEDY}"
        )
    return pairs[0]


def _is_mean_of_bins(value: ir.Value) -> bool:
    """True if a layer that multiplies by 0, 1, 2, ... computes the value: YOLO's exporter writes the mean of bins this way."""
    node = value.producer()
    while node is not None and node.op_type in PASSING and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    weight = constant_array(node.inputs[1]) if node is not None and node.op_type in LINEAR else None
    return weight is not None and weight.size > 1 and np.array_equal(weight.reshape(-1), np.arange(weight.size))


def _read_by_layers(graph: ir.Graph, results: Collection[ir.Value]) -> set[ir.Value]:
    """Results that further layers read, as inside a transformer, rather than only the outputs."""
    leads: set[ir.Value] = set()
    for node in reversed(graph):
        if any(value in leads or value in results for value in node.outputs):
            leads.update(value for value in node.inputs if value is not None)
    return leads & {*results}


def _says_which(boxes: ir.Value, scores: ir.Value) -> bool:
    return _says(boxes, BOXES_ARE_CALLED) or _says(scores, SCORES_ARE_CALLED)


def _is_activated(boxes: ir.Value, scores: ir.Value) -> bool:
    """True if scores become probabilities, and boxes of more than four numbers do not."""
    is_bounded = _reads(boxes, "Sigmoid") and _numbers(boxes, scores) != SIDES
    return not is_bounded and any(_reads(scores, name) for name in ("Sigmoid", "Softmax", "LogSoftmax"))


def _is_square(boxes: ir.Value, scores: ir.Value) -> bool:
    return _numbers(boxes, scores) == SIDES and _numbers(scores, boxes) != SIDES


def _of_three_axes(value: ir.Value) -> ir.Value | None:
    """The last value of three axes before a value that can hold whole boxes, through operators that only move elements."""
    while True:
        shape = value.shape
        if shape is not None and len(shape) == 3 and any(isinstance(extent, int) for extent in shape.dims[1:]):
            whole = [extent for extent in shape.dims[1:] if isinstance(extent, int)]
            if not (value.producer() is not None and _op(value) in ("Slice", "Gather")) or min(whole) >= SIDES:
                return value
        node = value.producer()
        if node is None or node.op_type not in PASSING or node.op_type == "Concat" or node.inputs[0] is None:
            return None
        value = node.inputs[0]


def _op(value: ir.Value) -> str:
    node = value.producer()
    return "" if node is None else node.op_type


def _fits(boxes: ir.Value, scores: ir.Value) -> bool:
    return _numbers(boxes, scores) is not None


def _numbers(boxes: ir.Value, scores: ir.Value) -> int | None:
    """Numbers per box if both values count the same boxes; None if they do not, or if the numbers cannot be sides of boxes."""
    assert boxes.shape is not None
    assert scores.shape is not None
    for numbers, places in ((2, 1), (1, 2)):
        own, count = boxes.shape[numbers], boxes.shape[places]
        if count == scores.shape[places] and isinstance(own, int) and own % SIDES == 0 and isinstance(scores.shape[numbers], int):
            return own
    return None


def _says(value: ir.Value, words: Sequence[str]) -> bool:
    return any(word in (value.name or "").lower() for word in words)


def _layout(boxes: ir.Value, scores: ir.Value) -> tuple[bool, int, int, int]:
    """Return channels_first, the number of boxes, the numbers per box, and the scores per box."""
    assert boxes.shape is not None
    assert scores.shape is not None
    for first, numbers, places in ((False, 2, 1), (True, 1, 2)):
        count, own, other = boxes.shape[places], boxes.shape[numbers], scores.shape[numbers]
        if count == scores.shape[places] and isinstance(own, int) and own % SIDES == 0 and isinstance(other, int):
            if isinstance(count, int):
                return first, count, own, other
            raise ConfigurationError(
                f"finetune: how many boxes '{boxes.name}' holds is open ({boxes.shape}), and they are told by their cells: "
                "export the model for images of one size"
            )
    raise ConfigurationError(
        f"finetune: '{boxes.name}' has shape {boxes.shape} and '{scores.name}' {scores.shape}, which are not boxes of four "
        f"numbers or bins and scores of the same boxes: {REMEDY}"
    )


def _is_bounded(value: ir.Value) -> bool:
    readers = [reader for reader, _ in value.uses()]
    return len(readers) == 1 and readers[0].op_type == "Sigmoid"


def _loss_of(boxes: ir.Value, scores: ir.Value, first: bool, count: int, numbers: int, score_count: int) -> losses.Loss:
    maps = [node.outputs[0].shape for node in linear_sources(boxes) or [] if node.op_type == "Conv"]
    sides = [shape.dims[2:] for shape in maps if shape is not None and len(shape) == 4]
    grids = [[height, width] for height, width in sides if isinstance(height, int) and isinstance(width, int)]
    cells = sum(height * width for height, width in grids)
    per_cell = count // cells if cells and count % cells == 0 else 0
    if numbers > SIDES and per_cell == 1:
        return losses.task_aligned(grids=grids, bins=numbers // SIDES, channels_first=first)
    if not grids and numbers == SIDES and _is_bounded(boxes) and not first:
        return losses.detr(class_loss="focal" if _reads(scores, "Sigmoid") else "cross_entropy")
    what = f"'{boxes.name}' {boxes.shape} and '{scores.name}' {scores.shape}"
    if per_cell and numbers == SIDES:
        text = str(grids).replace(" ", "")
        forms = f"ssd:grids={text},scales=[...],ratios=[...]"
        if per_cell == 1:
            forms += f", or of distances in cells task_aligned:grids={text},bins=1"
        raise ConfigurationError(
            f"finetune: {what} are {per_cell} boxes in each cell of the grids {text}; what they are relative to is not in the "
            f"file: give the loss (loss=..., --loss), of an SSD {forms}"
        )
    raise ConfigurationError(
        f"finetune: {what} are boxes and scores, and of which detector cannot be told: give the loss "
        "(loss=..., --loss): ssd, task_aligned or detr, with its settings"
    )


def _reads(value: ir.Value, operator: str) -> bool:
    return any(reader.op_type == operator for reader, _ in value.uses())


SUPPRESSION = "NonMaxSuppression"
FRACTIONS_END = 2.0
"""Boxes with sides below this are fractions of the image; others are in pixels."""
CENTRED = 1
PRECISION = "coco_map"
TURNED = [1, 0, 3, 2]
COMPARED = 20
"""Boxes per image used to find the order of their sides."""


def file_precision(path: str | Path, dataset: Dataset, batch_size: int, engine: str | Engine = "auto") -> float | str | None:
    """Return COCO's mean average precision of the boxes that the file's NonMaxSuppression keeps.

    The operator accepts sides in two orders and does not record which: left, top, right, bottom or top, left, bottom, right. The
    order that matches the boxes decoded by the file's loss is used.

    Args:
        path: ONNX file with its objective in the metadata.
        dataset: images with objects, as for a detection loss.
        batch_size: batch size of the evaluation.
        engine: engine that runs the file.

    Returns:
        The precision; a text with the reason if there is none; or None if the file has no suppression.
    """
    model = load(path)
    found = [node for node in model.graph if node.domain == "" and node.op_type == SUPPRESSION]
    if not found or not isinstance(dataset, ObjectImages):
        return None
    if len(found) > 1:
        return f"it has {len(found)} nodes {SUPPRESSION}"
    node = found[0]
    is_centred = attribute_value(node, "center_point_box", 0) == CENTRED
    entry = model.graph.inputs[0]
    run, fixed = _UpToSuppression(model, node, engine), None if entry.shape is None else entry.shape[0]
    decodes, is_turned = open_model(path, metrics=(PRECISION,), engine=engine), None if not is_centred else False
    size = fixed if isinstance(fixed, int) else batch_size
    pictures: list[Picture] = []
    for begin in range(0, len(dataset) - len(dataset) % size if isinstance(fixed, int) else len(dataset), size):
        batch = dataset.batch(np.arange(begin, min(begin + size, len(dataset))))
        boxes, scores, selected = run(batch)
        first = scores.shape[1] - len(dataset.classes)
        if first not in (0, 1):
            return f"its {SUPPRESSION} reads {scores.shape[1]} scores of each box, and there are {len(dataset.classes)} classes"
        corners, images = _corners(boxes, is_centred), batch[entry.name or ""]
        if is_turned is None:
            decoded = decodes.totals(batch)[rows_name(PRECISION, FOUND)][..., 2:]
            straight, turned = (_distance(in_fractions(corners, way, images.shape), decoded) for way in (False, True))
            is_turned = turned < straight
        pictures += _pictures(in_fractions(corners, is_turned, images.shape), scores, selected, first, batch)
    return coco_average_precision(pictures, IOU_THRESHOLDS, "all", 100)


def file_line(path: str | Path, dataset: Dataset, batch_size: int, data: str, engine: str | Engine = "auto") -> str | None:
    """Return a line with the precision of a file's boxes; None if the file has no suppression.

    Args:
        path, dataset, batch_size, engine: as in ``file_precision``.
        data: name of the data in the line.
    """
    figure = file_precision(path, dataset, batch_size, engine)
    if figure is None:
        return None
    if isinstance(figure, str):
        return f"{path}: the precision of the boxes that it leaves is not known: {figure}"
    return f"{path}: coco_map {figure:.4f} of the boxes that its own {SUPPRESSION} leaves ({data} data)"


class _UpToSuppression:
    def __init__(self, model: ir.Model, node: ir.Node, engine: str | Engine):
        self._names = [value.name or "" for value in model.graph.inputs]
        values = [*node.inputs[:2], node.outputs[0]]
        self._read = [value.name or "" for value in values if value is not None]
        model.graph.outputs.clear()
        model.graph.outputs.extend(value for value in values if value is not None)
        remove_unused(model)
        self._run = engines.get(engine).load(model)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        outputs = self._run({name: batch[name] for name in self._names})
        boxes, scores, selected = (outputs[name] for name in self._read)
        return boxes, scores, selected


def _corners(boxes: np.ndarray, is_centred: bool) -> np.ndarray:
    sides = boxes.astype(np.float64)
    if not is_centred:
        return sides
    return np.concatenate([sides[..., :2] - sides[..., 2:] / 2, sides[..., :2] + sides[..., 2:] / 2], axis=-1)


def in_fractions(corners: np.ndarray, is_turned: bool, images: Sequence[int]) -> np.ndarray:
    """Return boxes as left, top, right, bottom, in fractions of the image.

    Args:
        corners: boxes in fractions or in pixels, ``[..., 4]``.
        is_turned: True if they are top, left, bottom, right.
        images: shape of the model's input, ``[N, C, H, W]`` or ``[N, H, W, C]``.
    """
    sides = corners[..., TURNED] if is_turned else corners
    if np.abs(sides).max(initial=0.0) <= FRACTIONS_END:
        return sides
    height, width = images[2:4] if images[1] in (1, 3) else images[1:3]
    return sides / np.array([width, height, width, height], np.float64)


def _pictures(
    boxes: np.ndarray, scores: np.ndarray, selected: np.ndarray, first: int, batch: Mapping[str, np.ndarray]
) -> Iterator[Picture]:
    for sample in range(len(scores)):
        own = selected[(selected[:, 0] == sample) & (selected[:, 1] >= first)]
        there = batch[LABELS][sample] >= 0
        crowd = batch[CROWD][sample][there] > 0 if CROWD in batch else np.zeros(int(there.sum()), bool)
        yield Picture(
            scores[sample, own[:, 1], own[:, 2]].astype(np.float64),
            (own[:, 1] - first).astype(np.int64),
            boxes[sample, own[:, 2]],
            batch[LABELS][sample][there].astype(np.int64),
            batch[BOXES][sample][there].astype(np.float64),
            crowd,
            np.zeros(int(there.sum())),
            (1.0, 1.0),
        )


def _distance(boxes: np.ndarray, decoded: np.ndarray) -> float:
    """Sum of distances from the likeliest boxes of a loss, ``[N, K, 4]``, to the nearest of all boxes, ``[N, A, 4]``."""
    likeliest = decoded[:, :COMPARED, None]
    return float(np.abs(likeliest - boxes[:, None]).max(axis=3).min(axis=2).sum())
