"""A trained model prepared for other data: its head, its batch, and its trained weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish import losses, optim
from burnish.adapters.graph import read_adapters
from burnish.compiler.compile import compile
from burnish.data import DataDescription, Dataset, DataSource, DataSpec, ImageAugmentation, Text, TextDataset
from burnish.data.huggingface import is_columnar
from burnish.data.splitting import EvalSplit, held_out, parts
from burnish.data.text.columns import TOKENS
from burnish.data.text.settings import ASSISTANT, COMPLETION, as_text
from burnish.errors import ConfigurationError, DataError, ObjectiveWarning, UntrainedWeightsWarning
from burnish.finetuning.decoders import TRIED_TOKENS, OutputLayer, empty_cache, is_causal, language_output, layers_before
from burnish.finetuning.labels import innermost
from burnish.finetuning.normalization import settle_outputs, takes_one_sample, with_normalization
from burnish.finetuning.options import AUTO, KEEP, NEW, FinetuneOptions
from burnish.finetuning.targets import Scale, add_output_scale, fold_output_scale, is_near, standardize_head, target_scale
from burnish.finetuning.tasks import LANGUAGE, SHOWN, AnyHead, Task, absent_classes, is_of_classes, name_of, open_source, task_of
from burnish.finetuning.untrained_weights import are_random
from burnish.graph import FLOATING, bodies, garbage_kept, hold_single_precision
from burnish.graph.annotations import CLASS_NUMBERS, CLASSES, INITIAL
from burnish.graph.names import other_names, select_named
from burnish.importer import InitializerKind, Source, classify_initializers, load, reached_by_gradients
from burnish.optim.base import Rate
from burnish.program import Program
from burnish.sample_axes import find_sample_axes, input_axes
from burnish.settings import suggestion
from burnish.surgery import Head, load_peft, lora
from burnish.surgery.replace_head import settle_biases, with_a_score_for_each_class
from burnish.training.run_data import fixed_extent, length_of, within_the_model

HEAD = "head"
OF_TEXTS = (".txt", ".jsonl")
"""Files that hold only texts."""
HEAD_SCALE = 10.0
"""Factor of the learning rate of a re-initialized head over the trained layers."""
MOMENTUM = 0.9
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", "LSTM", "GRU", "RNN"})
"""Operators whose weights begin a layer; others, such as normalization, belong to the layer before."""


@dataclass(frozen=True)
class Transfer:
    """A model prepared for other data.

    Attributes:
        model: the model with a head for the classes in the data.
        head: the head.
        is_new: True if the head was re-initialized.
        frozen: names of the frozen initializers.
        batch: ``open`` if the file takes one sample at a time, else None.
        task: the task: values that the loss reads, the loss, the metrics.
        notes: decisions with reasons, one per line.
        idle: biases that an inserted batch normalization removes again; they do not train.
        evaluation: the held-out part of the data, or None.
        is_trained: True if the layers before the head are trained; None if unknown.
        spec: inputs of the model.
    """

    model: ir.Model
    head: AnyHead
    is_new: bool
    frozen: tuple[str, ...]
    batch: str | None
    notes: tuple[str, ...]
    task: Task
    idle: tuple[str, ...] = ()
    evaluation: Dataset | None = None
    is_trained: bool | None = None
    spec: DataSpec | None = None

    def groups(self, frozen: Collection[str] | None = None) -> dict[str, Any]:
        """Return the settings of the parameters, as for ``burnish.optim.groups``.

        Args:
            frozen: names to freeze; by default ``frozen``.
        """
        held = self.frozen if frozen is None else tuple(frozen)
        scaled: dict[str, Any] = {}
        is_ahead = self.is_new and self.is_trained is not False
        if is_ahead and not set(self.trainable) <= {*held, *self.head.initializers}:
            scaled = {name: {"lr_scale": HEAD_SCALE} for name in self.head.initializers}
        return {**scaled, **dict.fromkeys((*held, *self.idle), "frozen")}

    def largest_scale(self, frozen: Collection[str] | None = None) -> float:
        """Return the highest factor of the learning rate of any weight; ``frozen`` as in ``groups``."""
        settings = self.groups(frozen).values()
        return max((each["lr_scale"] for each in settings if isinstance(each, Mapping)), default=1.0)

    def optimizer(self, rate: Rate, frozen: Collection[str] | None = None, layer_decay: float | None = None) -> optim.Optimizer:
        """Return SGD with momentum; a new head gets ten times the rate if other layers train too.

        A model with ``uses_adamw`` gets AdamW without weight decay.

        Args:
            rate: a number or a schedule.
            frozen: as in ``groups``.
            layer_decay: factor of the rate from each layer to the one before it; None for one rate.
        """
        groups = self.groups(frozen)
        plain: optim.Optimizer = optim.sgd(lr=rate, momentum=MOMENTUM)
        if self.uses_adamw:
            plain = optim.adamw(lr=rate, weight_decay=0.0)
        grouped = optim.groups(plain, groups) if groups else plain
        return grouped if layer_decay is None else optim.layerwise_decay(grouped, layer_decay)

    @property
    def uses_adamw(self) -> bool:
        """True for a language model, and for random weights with an embedding table: gradients differ by orders of magnitude."""
        if self.task.kind == LANGUAGE:
            return True
        tables = (node.inputs[0] for node in self.model.graph if node.domain == "" and node.op_type == "Gather")
        has_table = any(table is not None and table.is_initializer() and table.dtype in FLOATING for table in tables)
        return has_table and self.is_trained is False

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of all weights in file order; for a model with adapters, the names that train."""
        return tuple(_trainable(self.model, self.task.outputs))

    @property
    def has_fixed_batch(self) -> bool:
        """True if the model takes only one batch size."""
        axes = input_axes(self.model.graph.inputs)
        extents = [
            value.shape[axis] for value in self.model.graph.inputs if value.shape and (axis := axes[value.name or ""]) is not None
        ]
        return self.batch is None and fixed_extent(extents) is not None

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """The unfrozen weights of each layer before the head, in the order in which the graph reads them."""
        known = set(self.trainable) - {*self.head.initializers, *self.frozen}
        layers: list[list[str]] = []
        for node, read in _weights_in_order(self.model.graph):
            own = [name for name in read if name in known]
            known.difference_update(own)
            if own and (node.op_type in LAYERS or not layers):
                layers.append(own)
            elif own:
                layers[-1] += own
        return [tuple(layer) for layer in layers]


@garbage_kept()
def transfer(source: Source, data: DataSource, options: FinetuneOptions = FinetuneOptions()) -> tuple[Transfer, Dataset]:
    """Return a model prepared for the classes in data, and the training data.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        data: as in ``open_source``.
        options: ``freeze_until`` is ``head`` to train only the head; the name of a node, or a name or pattern of initializers, to
            freeze everything before the first of them; or None to train everything. With ``adapters``, only these and the head
            train. MixUp and CutMix of ``augment`` become part of the loss, in the graph. The seed is used for the new head, the
            adapters, and the samples for the statistics of new normalization.

    Raises:
        ConfigurationError: no head can be found, ``freeze_until`` names nothing, ``folded_norm`` is unknown, or the head to keep
            has fewer classes than the data.
        DataError: the data cannot be read, or have no classes.
    """
    model = load(source, sample_axis=options.sample_axis)
    if bound := empty_cache(model):
        model = load(source, sample_axis=options.sample_axis, bind=bound)
    find_sample_axes(model.graph)
    batch = "open" if takes_one_sample(model) else None
    if batch is not None:
        settle_outputs(model)
    if (language := _language_of(model, data, options)) is not None:
        return _language_transfer(model, language, data, options, batch, bound)
    output, seed = options.head_output, options.seed
    settle_biases(model)
    known_scale = fold_output_scale(model)
    model = with_a_score_for_each_class(model, output if isinstance(output, str) else None)
    task = task_of(model, data, output, options.loss, options.metrics, options.augment, reading=options.reading)
    old, before = task.head, task.classes
    if task.scores not in (None, before):
        model, task = task.replaced(model, task.scores, seed)
    asked: EvalSplit | None = options.eval_split  # type: ignore[assignment]  # as it was checked
    dataset, spec, cut = _opened(_probe(model, task, batch), task, data, {**options.reading, "split": asked})
    names = _class_names(task, dataset, name_of(data))
    occurring = range(len(names)) if names else task.occurring(dataset, spec)
    _check_occurring(task, spec, occurring, name_of(data))
    count, absent = max(occurring, default=-1) + 1, absent_classes(occurring)
    evaluation, split = None, None
    if asked is not None:
        split = held_out(dataset, asked, seed, spec.label)
        dataset, evaluation = parts(dataset, split)
    if _is_drawn(options.head, task, count, names, spec, name_of(data)):
        model, task = task.replaced(model, count, seed)
    is_new = task.head is not old
    if task.kind in ("values", "questions"):
        _forget_classes(model)
    notes = [*_said(task, names), _said_of_head(task, is_new, before, count, is_of_classes(spec), options.head)]
    notes += [] if absent is None else [absent]
    notes += [] if split is None else [split.line, *split.notes]
    layer = task.head
    if cut is not None:
        notes.append(cut)
    if isinstance(dataset, TextDataset):
        model.metadata_props.update(DataDescription(text=length_of(dataset, spec)).metadata())
    if batch is not None:
        notes.append("batch: the file takes one sample at a time, and is opened for batches of any size")
    if options.adapters is not None:
        drawn = _arrays(model, layer)
        model = _with_adapters(model, layer, options.adapters, seed, notes)
        if any(not np.array_equal(drawn[name], array) for name, array in _arrays(model, layer).items()):
            is_new, notes[:] = False, [note for note in notes if not note.startswith("head:")]
            notes.insert(0, f"head: {task.called} that of {options.adapters}, for {count} classes")
    frozen = _frozen(model, layer, options.freeze_until, task.outputs)
    known = [name for name in _weights(model) if not is_new or name not in layer.initializers]
    is_trained = _were_trained(model, known, bool(frozen), notes)
    trained = {*_trainable(model, task.outputs)} - {*frozen, *layer.initializers}
    model, idle = with_normalization(
        model, dataset, trained, options.folded_norm, options.batch_size, seed, notes, is_trained is False
    )
    if batch is not None:
        settle_outputs(model)  # a new head has new shapes
    hold_single_precision(model)  # the run compiles this model, and resumes from the file that holds it
    layer = task.head_in(model)
    if task.kind == "values":
        task, said = _scaled(model, task, layer, target_scale(dataset, spec, name_of(data)), dataset, not is_new, known_scale)
        notes.insert(0, said)
    if frozen:
        notes.append(f"frozen: {len(frozen)} weights before {options.freeze_until!r} stay as they are, bit for bit")
    made = Transfer(model, layer, is_new, frozen, batch, tuple(notes), task, idle, evaluation, is_trained, spec)
    if made.largest_scale() > 1:
        rates = f"rates: the new head learns {HEAD_SCALE:g} times as fast as the layers that were trained already"
        made = replace(made, notes=(*notes, rates))
    return made, dataset


def _language_of(model: ir.Model, data: DataSource, options: FinetuneOptions) -> OutputLayer | None:
    """The output layer of a language model, if the data are texts without labels; None otherwise."""
    text, output = as_text(options.text), options.head_output
    if options.label is not None or not (output is None or isinstance(output, str)):
        return None
    if text is None:
        is_of_texts = isinstance(data, str | Path) and Path(data).suffix.lower() in OF_TEXTS
        if not is_of_texts and not (is_columnar(data) and TOKENS in data.column_names):  # type: ignore[union-attr]
            return None
    elif text.task == "label":
        return None
    return language_output(model, output)


def _language_transfer(
    model: ir.Model,
    language: OutputLayer,
    data: DataSource,
    options: FinetuneOptions,
    batch: str | None,
    bound: Mapping[str, int | bool],
) -> tuple[Transfer, Dataset]:
    """A language model prepared for texts, and the texts; vocabulary and output layer are kept.

    Raises:
        ConfigurationError: the model is not a causal decoder and does not learn masked tokens; or an option is for other models.
    """
    if options.head == NEW:
        raise ConfigurationError(
            "head='new' (--head new): a language model keeps its output layer, which has a score for each token: leave it out"
        )
    task = task_of(model, data, options.head_output, options.loss, options.metrics, options.augment, language)
    known = DataDescription.read(model.metadata_props).text
    text = as_text(options.reading["text"]) or Text()
    learned = text.task or (known.task if known is not None and known.task in ("masked", "causal") else "causal")
    asked: EvalSplit | None = options.eval_split  # type: ignore[assignment]  # as it was checked
    reading = {**options.reading, "text": replace(text, task=learned), "split": asked}
    probe = _probe(model, task, batch)
    dataset, spec, cut = _opened(probe, task, data, reading)
    assert isinstance(dataset, TextDataset)
    if learned == "causal" and not is_causal(probe, language.output, dataset.text.length or TRIED_TOKENS):
        raise ConfigurationError(
            f"finetune: '{language.output}' has scores for each token, and earlier ones change with later tokens: no causal "
            "decoder. Such a model learns tokens that are masked (task 'masked', --task masked); to generate text, give a "
            "decoder"
        )
    if learned == "causal":
        counted = {COMPLETION: " of completions", ASSISTANT: " of the assistant's answers"}.get(dataset.text.train_on or "", "")
        what = f"a causal decoder learns the next token{counted}"
    else:
        what = "a language model learns masked tokens"
    notes = [
        f"task: {what}: {task.loss.name} of '{language.output}', {', '.join(task.metrics)}",
        f"head: {task.called} kept, with its scores for {language.tokens:,} tokens",
    ]
    if bound:
        named = ", ".join(f"'{name}'" for name in bound)
        notes.append(f"cache: it is empty ({named}: 0), and the tuned file is without the inputs of the cache")
    notes += [] if cut is None else [cut]
    described, given = length_of(dataset, spec), dataset.described
    described = replace(described, task=given.task, train_on=given.train_on, padding_side=given.padding_side)
    model.metadata_props.update(DataDescription(text=described).metadata())
    parted: tuple[Dataset, Dataset | None] = (dataset, None)
    if asked is not None:
        split = held_out(dataset, asked, options.seed, spec.label)
        parted = parts(dataset, split)
        notes += [split.line, *split.notes]
    if batch is not None:
        notes.append("batch: the file takes one sample at a time, and is opened for batches of any size")
    if options.adapters is not None:
        adapters = options.adapters
        if isinstance(adapters, Mapping) and not adapters.get("patterns"):
            adapters = {**adapters, "patterns": layers_before(model, language)}
        model = _with_adapters(model, None, adapters, options.seed, notes)
    head = task.head_in(model)
    frozen = _frozen(model, head, options.freeze_until, task.outputs)
    if batch is not None:
        settle_outputs(model)
    hold_single_precision(model)
    head = task.head_in(model)
    if frozen:
        notes.append(f"frozen: {len(frozen)} weights before {options.freeze_until!r} stay as they are, bit for bit")
    made = Transfer(model, head, False, frozen, batch, tuple(notes), replace(task, head=head), evaluation=parted[1])
    return made, parted[0]


def _is_drawn(head: str, task: Task, count: int, names: tuple[str, ...] | None, spec: DataSpec, data: str) -> bool:
    """True if the head is re-initialized for the classes in the data.

    Raises:
        ConfigurationError: the head to keep has fewer classes.
    """
    if head == KEEP and count > task.classes:
        raise ConfigurationError(
            f"head='keep' (--head keep): the file's head has {task.classes} classes, and {data} has {count}: leave it out, and "
            "the head is re-initialized"
        )
    if head != AUTO:
        return head == NEW
    if task.is_other:
        return True
    # Numbered classes may not be the file's; a target for each score belongs to the file's own score.
    known = spec.described.classes
    differs = names is None or known != names if is_of_classes(spec) else None not in (known, names) and known != names
    return count != task.classes or differs


def _forget_classes(model: ir.Model) -> None:
    """Remove the old classes from a model that learns values, or labels named by the data."""
    for annotation in (CLASSES, CLASS_NUMBERS):
        annotation.remove(model)


def _scaled(
    model: ir.Model, task: Task, head: AnyHead, scale: Scale, dataset: Dataset, keeps: bool, known: Scale | None
) -> tuple[Task, str]:
    """Make a model learn standardized values and output them in their units; return the task and a note.

    Args:
        model: the model, changed in place.
        task: its task.
        head: the layer with the values.
        scale: mean and standard deviation of the targets.
        dataset: data with the targets.
        keeps: True if the head is the file's own.
        known: scale of the data that the file was trained on. If it differs (values in another unit), the head goes on giving
            standardized values.
    """
    assert isinstance(head, Head)
    mean, std = scale
    if keeps and known is not None and not is_near(known, scale):
        standardize_head(head, known)
        keeps = False
    if INITIAL.is_on(model):  # initial weights give outputs of the size of standardized values
        keeps = False
    labels = DataDescription.of(dataset).labels
    names = [f"'{name}'" for name in labels.columns] if labels is not None else []
    of = f" of {', '.join(names)}" if names else ""
    told = f"task: values{of}, as {task.reason}: {innermost(task.loss).name} of '{head.output}', {', '.join(task.metrics)}"
    if not add_output_scale(model, head, mean, std, keeps):
        return task, f"{told}; targets are learned as they are, as something behind the head bounds what it gives"
    numbers = [f"mean {one:.4g}, standard deviation {other:.4g}" for one, other in zip(mean[:SHOWN], std[:SHOWN], strict=True)]
    more = f" and {len(mean) - SHOWN} more" if len(mean) > SHOWN else ""
    loss = task.loss
    sizes: dict[str, Any] = {"mean": mean.tolist(), "std": std.tolist()}
    if isinstance(loss, losses.Mixed):
        loss = replace(loss, loss=losses.standardized(loss.loss, **sizes))
    else:
        loss = losses.standardized(loss, **sizes)
    line = (
        f"{told}; targets are standardized for training ({'; '.join(numbers)}{more}), and the file gives values in their own "
        "units. Where they are classes, say so (loss='cross_entropy', --loss cross_entropy)"
    )
    return replace(task, loss=loss), line


def _class_names(task: Task, dataset: Dataset, data: str) -> tuple[str, ...] | None:
    names = DataDescription.of(dataset).classes
    if task.kind == "classes" and names is not None and len(names) == 1:
        raise DataError(
            f"{data}: all samples have the class '{names[0]}', and nothing can be told apart: give samples of other classes too, "
            "each class in a folder of its own or with its name as label"
        )
    return names


def _check_occurring(task: Task, spec: DataSpec, occurring: Sequence[int], data: str) -> None:
    """Raise DataError for class numbers that cannot be trained on."""
    if task.kind != "classes" or not occurring or not is_of_classes(spec):
        return
    if occurring[0] < 0:
        raise DataError(
            f"{data}: a sample has the label {occurring[0]}, and classes are numbered from 0: number them so, or give names as "
            "labels"
        )
    if len(occurring) == 1:
        raise DataError(
            f"{data}: all samples have the label {occurring[0]}, and nothing can be told apart: give samples of other classes too"
        )


def _arrays(model: ir.Model, head: AnyHead) -> dict[str, np.ndarray]:
    values = ((name, model.graph.initializers[name].const_value) for name in head.initializers)
    return {name: tensor.numpy() for name, tensor in values if tensor is not None}


def _said_of_head(task: Task, is_new: bool, before: int, count: int, has_classes: bool, choice: str) -> str:
    """A note on the head of a file that had ``before`` classes, for data with ``count``."""
    layers = task.called.rsplit(" ", 1)[0]
    if not is_new and choice == KEEP:
        others = f" for {before} classes, of which the data have {count}" if count < before else ""
        return f"head: {layers} stays{others}, as head='keep' (--head keep) says"
    if task.kind == "values":
        values = f"{task.classes} value{'s' * (task.classes != 1)}"
        if not is_new:
            return f"head: {layers} stays, as the file gives {values} for each sample"
        return f"head: {task.called} re-initialized for {values}; the file had {before}"
    if has_classes and not is_new:
        return f"head: {layers} stays, as the file's {task.classes} classes are those of the data"
    if not is_new:
        return f"head: {layers} stays, as the loss compares each of its scores with a target of its own"
    of_scores = "one score of each pixel" if task.kind == "masks" else f"{task.classes} scores"
    what = f"{task.classes} classes" if has_classes else of_scores
    same = " too, and does not say that they are these (head='keep', --head keep, keeps it)" if before == task.classes else ""
    return f"head: {task.called} re-initialized for {what}; the file had {before}{same if choice == AUTO else ''}"


def _said(task: Task, names: Sequence[str] | None = None) -> list[str]:
    notes = []
    outputs = [task.outputs] if isinstance(task.outputs, str) else task.outputs
    if task.kind == "questions":
        which = f" ({', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)})" if names else ""
        notes.append(
            f"task: yes or no for each of {task.classes} labels{which}, as {task.reason}: {task.loss.name} of '{task.outputs}', "
            f"{', '.join(task.metrics)}"
        )
    elif task.kind not in ("classes", "values"):
        of_pixels = "yes or no for each pixel" if task.is_yes_or_no else "a class for each pixel"
        what = of_pixels if task.kind == "masks" else "boxes of objects"
        read = " and ".join(f"'{name}'" for name in outputs)
        notes.append(f"task: {what}: {task.loss.name} of {read}, {', '.join(task.metrics)}")
    if task.doubt is not None:
        notes.append(task.doubt)
    if isinstance(task.loss, losses.Mixed):
        changes = ImageAugmentation(mixup=task.loss.mixup, cutmix=task.loss.cutmix)
        notes.append(f"augment: {changes.text()}, in the graph")
    return notes


def _with_adapters(
    model: ir.Model, head: AnyHead | None, settings: Mapping[str, Any] | str | Path, seed: int, notes: list[str]
) -> ir.Model:
    """A model whose adapters train, and its head if given; a note tells their share of the numbers."""
    trained = () if head is None else head.initializers
    before = {name: value.const_value for name, value in model.graph.initializers.items() if value.const_value is not None}
    if isinstance(settings, Mapping):
        model = lora(model, also_trained=trained, seed=seed, **settings)
    else:
        model = load_peft(model, settings, also_trained=trained)
    listed = read_adapters(model.metadata_props)
    sizes = [
        value.const_value.size for name in listed.trained if (value := model.graph.initializers[name]).const_value is not None
    ]
    whole = sum(tensor.size for tensor in before.values())
    origin = "" if isinstance(settings, Mapping) else f" of {settings}"
    notes.append(
        f"adapters: {listed.adapters[-1].variant}{origin} beside {len(listed.adapters)} layers; "
        f"{'' if head is None else 'with the head '}{sum(sizes):,} numbers train, and the other "
        f"{whole - sum(before[name].size for name in trained):,} stay as they are"
    )
    return model


def _probe(model: ir.Model, task: Task, batch: str | None) -> Program:
    """A program of the unchanged model, to find the inputs that data must fill."""
    names, metrics = list(task.head.initializers) or None, [name for name in task.metrics if task.kind != "objects"]
    outputs = task.outputs if isinstance(task.outputs, str) else list(task.outputs)
    with quietly():
        return compile(model, loss=task.loss, optimizer="sgd", trainable=names, outputs=outputs, batch=batch, metrics=metrics)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings of a program that is only inspected or takes trial steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)
        warnings.simplefilter("ignore", UntrainedWeightsWarning)
        yield


@contextmanager
def folding_said() -> Iterator[None]:
    """Suppress the warning of folded batch normalization, which the notes of a transfer repeat."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"batch normalization was folded", ObjectiveWarning)
        yield


def _opened(probe: Program, task: Task, data: DataSource, options: Mapping[str, Any]) -> tuple[Dataset, DataSpec, str | None]:
    """The data, the inputs of the model, and a note if texts are cut to the model's length."""
    spec = _unbounded(DataSpec.by(probe), task)

    def opened(text: Text) -> Dataset:
        return open_source(data, spec, **{**options, "text": text})

    dataset, cut = within_the_model(probe, open_source(data, spec, **options), as_text(options.get("text")), opened)
    return dataset, spec, cut


def _unbounded(spec: DataSpec, task: Task) -> DataSpec:
    """Return the spec of a model whose head is not settled: any number of classes, or of values per sample."""
    if spec.label is None:
        return spec
    if task.kind in ("values", "questions"):
        if len(spec.label.extents) != 2:
            return spec
        return replace(spec, label=replace(spec.label, shape=(spec.label.extents[0], "values")))
    return replace(spec, label=replace(spec.label, maximum=None))


def _trainable(model: ir.Model, outputs: str | Sequence[str]) -> list[str]:
    """The weights that a loss of these values trains; those of other heads do not."""
    if adapters := read_adapters(model.metadata_props):
        return list(adapters.trained)
    weights = _weights(model)
    names = {outputs} if isinstance(outputs, str) else {*outputs}
    read = [value for node in model.graph for value in node.outputs if value.name in names]
    reached = reached_by_gradients(model.graph, read)
    return [name for name in weights if model.graph.initializers[name] in reached] or weights


def _weights(model: ir.Model) -> list[str]:
    return [name for name, kind in classify_initializers(model).items() if kind is InitializerKind.WEIGHT]


def _were_trained(model: ir.Model, weights: Collection[str], has_frozen: bool, notes: list[str]) -> bool | None:
    """Return True if weights were trained before, and note if not; None if unknown."""
    count, is_random = are_random(model, weights)
    if is_random:
        which = "the one layer" if count == 1 else f"all {count} layers"
        follows = "all layers learn at one rate"
        if has_frozen:
            follows = "what is frozen stays as it is all the same: leave out freeze_until (--freeze-until) to train it"
        notes.append(
            f"weights: they look random in {which} large enough to tell, so the file was not trained, or hardly; {follows}"
        )
    return None if is_random is None else not is_random


def _weights_in_order(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[str]]]:
    """Yield each node, in bodies too, with the names of the initializers that it reads or its bodies return.

    A value computed only from initializers, such as a transposed weight, counts as read at the node where it meets data.
    """
    computed: dict[ir.Value, list[str]] = {}
    for node in graph.all_nodes():
        inside = bodies(node)
        operands = [value for value in (*node.inputs, *(value for body in inside for value in body.outputs)) if value is not None]
        read = [
            name for value in operands for name in ([value.name or ""] if value.is_initializer() else computed.get(value, []))
        ]
        if not inside and all(value.is_initializer() or value in computed for value in operands):
            computed |= dict.fromkeys(node.outputs, read)
            read = []
        yield node, read


def _frozen(model: ir.Model, head: AnyHead, until: str | None, outputs: str | Sequence[str]) -> tuple[str, ...]:
    if until is None:
        return ()
    trainable = _trainable(model, outputs)
    wanted = set(head.initializers if until == HEAD else select_named(until, trainable, other_names(model.graph)))
    before: dict[str, None] = {}
    for node, read in _weights_in_order(model.graph):
        if node.name == until or wanted & set(read):
            known = set(trainable) - wanted
            return tuple(name for name in before if name in known)
        before |= dict.fromkeys(read)
    names = [*(node.name or "" for node in model.graph.all_nodes()), *trainable]
    near = suggestion(until, names)
    others = "or one of these" if near else f"or a weight, such as {', '.join(map(repr, [*trainable][:3]))}"
    raise ConfigurationError(
        f"freeze_until={until!r} is no node, and no name or pattern of a weight{near}: give 'head', {others}"
    )
