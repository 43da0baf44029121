"""What a file with a detector is: which values hold boxes and scores before they are decoded, and which loss they are for."""

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
        channels_first: whether they are ``[N, numbers, boxes]``, and not ``[N, boxes, numbers]``.
        numbers: of each box.
        score_count: of each box.
        loss: such as ``task_aligned`` with its settings.
        background: how many of the scores are of no class: 1 or 0.
        is_yes_or_no: whether each score is a question of its own.
        doubt: what was taken for granted that the file does not tell, in words; None where there is nothing.
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
        """The names of both, as the loss reads them."""
        return self.boxes.name or "", self.scores.name or ""


def find_detector(model: ir.Model, outputs: Sequence[str] | None = None, loss: losses.LossLike | None = None) -> Detector:
    """Tell what detector a canonical model is.

    Boxes and scores are sought before whatever decodes and suppresses them: the last values of three axes that are put together
    from the results of linear layers alone. Distances in bins are those of an anchor-free YOLO, whose grids are read off the
    layers; boxes that a Sigmoid bounds, one for each query, are those of a DETR.

    Args:
        model: the model.
        outputs: the names of boxes and scores, where they are said.
        loss: where it is said.

    Raises:
        ConfigurationError: what cannot be told, with what is to be given.
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
    """The values with boxes and scores."""
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
    """Whether a value is moved from a layer that multiplies by 0, 1, 2, ...: YOLO's exporter writes the mean of bins as one."""
    node = value.producer()
    while node is not None and node.op_type in PASSING and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    weight = constant_array(node.inputs[1]) if node is not None and node.op_type in LINEAR else None
    return weight is not None and weight.size > 1 and np.array_equal(weight.reshape(-1), np.arange(weight.size))


def _read_by_layers(graph: ir.Graph, results: Collection[ir.Value]) -> set[ir.Value]:
    """Which results of layers lead to further ones, as those inside of a transformer do, and not to what is given alone."""
    leads: set[ir.Value] = set()
    for node in reversed(graph):
        if any(value in leads or value in results for value in node.outputs):
            leads.update(value for value in node.inputs if value is not None)
    return leads & {*results}


def _says_which(boxes: ir.Value, scores: ir.Value) -> bool:
    return _says(boxes, BOXES_ARE_CALLED) or _says(scores, SCORES_ARE_CALLED)


def _is_activated(boxes: ir.Value, scores: ir.Value) -> bool:
    """Whether scores become probabilities, and numbers that are more than the sides of boxes do not."""
    is_bounded = _reads(boxes, "Sigmoid") and _numbers(boxes, scores) != SIDES
    return not is_bounded and any(_reads(scores, name) for name in ("Sigmoid", "Softmax", "LogSoftmax"))


def _is_square(boxes: ir.Value, scores: ir.Value) -> bool:
    """Whether boxes have four numbers, and scores another number."""
    return _numbers(boxes, scores) == SIDES and _numbers(scores, boxes) != SIDES


def _of_three_axes(value: ir.Value) -> ir.Value | None:
    """The last value of three axes on the way to a value, through what only moves elements, that could hold whole boxes."""
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
    """Whether two values may be the boxes and the scores of a detector."""
    return _numbers(boxes, scores) is not None


def _numbers(boxes: ir.Value, scores: ir.Value) -> int | None:
    """How many numbers a box has, where the two count the same boxes; None where they do not, or these are no sides of boxes."""
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
    """Whether channels come first, and how many boxes, numbers of each and scores of each there are."""
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
"""Boxes whose sides stay below it are fractions of the picture, others are pixels."""
CENTRED = 1
PRECISION = "coco_map"
TURNED = [1, 0, 3, 2]
COMPARED = 20
"""Boxes of a picture by which the order of their sides is told."""


def file_precision(path: str | Path, dataset: Dataset, batch_size: int, engine: str | Engine = "auto") -> float | str | None:
    """Return COCO's mean average precision of the boxes that a file's NonMaxSuppression leaves.

    The operator does not say in which order the sides of boxes stand, and takes any: left, top, right, bottom or top, left,
    bottom, right. It is read in the one in which its boxes are those that the loss of the file decodes.

    Args:
        path: the ONNX file, with its objective in its metadata.
        dataset: pictures with objects, as a loss of detectors takes them.
        batch_size: of the evaluation.
        engine: runs the file.

    Returns:
        The figure; why there is none, in words; or None, where the file suppresses nothing.
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
    """Return a line that says how precise what a file gives is; None where it suppresses nothing.

    Args:
        path, dataset, batch_size, engine: as ``file_precision`` takes them.
        data: which these are, in words.
    """
    figure = file_precision(path, dataset, batch_size, engine)
    if figure is None:
        return None
    if isinstance(figure, str):
        return f"{path}: the precision of the boxes that it leaves is not known: {figure}"
    return f"{path}: coco_map {figure:.4f} of the boxes that its own {SUPPRESSION} leaves ({data} data)"


class _UpToSuppression:
    """Runs a model as far as its suppression."""

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
    """Boxes as two corners, as the file has them otherwise."""
    sides = boxes.astype(np.float64)
    if not is_centred:
        return sides
    return np.concatenate([sides[..., :2] - sides[..., 2:] / 2, sides[..., :2] + sides[..., 2:] / 2], axis=-1)


def in_fractions(corners: np.ndarray, is_turned: bool, images: Sequence[int]) -> np.ndarray:
    """Return boxes as left, top, right, bottom, in fractions of the picture.

    Args:
        corners: in fractions or in pixels, ``[..., 4]``.
        is_turned: whether they are top, left, bottom, right.
        images: the shape of the model's input, ``[N, C, H, W]`` or ``[N, H, W, C]``.
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
    """How far the boxes that a loss decodes, the likeliest of ``[N, K, 4]``, are from the nearest of all, ``[N, A, 4]``."""
    likeliest = decoded[:, :COMPARED, None]
    return float(np.abs(likeliest - boxes[:, None]).max(axis=3).min(axis=2).sum())
