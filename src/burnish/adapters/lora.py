"""Insertion of adapters into a model: LoRA, DoRA and (IA)³."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from burnish.adapters.graph import Adapters, read_adapters
from burnish.adapters.integer_products import write_integer_products
from burnish.adapters.layers import Layer, added_bias, find_layers, select
from burnish.adapters.variants import VARIANTS, Adapter, name_in_peft, scaled_axis
from burnish.analysis.layer_selection import warn_of_bodies
from burnish.errors import ConfigurationError
from burnish.graph import Builder, Names, add_initializer, describe_node
from burnish.graph.names import module_in, other_names, select_named, separate_names
from burnish.importer import InitializerKind, Source, classify_initializers, load
from burnish.random import check_seed
from burnish.settings import suggestion
from burnish.validation import is_number, is_whole

RANK = 8


def lora(
    source: Source,
    patterns: str | Sequence[str] | None = None,
    rank: int = RANK,
    alpha: float | None = None,
    variant: str = "lora",
    *,
    dropout: float = 0.0,
    rslora: bool = False,
    feedforward: str | Sequence[str] = (),
    also_trained: str | Sequence[str] = (),
    seed: int = 0,
) -> ir.Model:
    """Return a model with adapters on some of its layers, which are then all that ``burnish.compile`` trains.

    For a weight W of n outputs and m inputs, and s = ``alpha / rank``:

    - ``lora`` (Hu et al. 2021): x W + s (x A) B, with A [m, rank] and B [rank, n].
    - ``dora`` (Liu et al. 2024): the same with the columns of W + s A B scaled to the lengths ``magnitude`` [n]. Their current
      lengths are constants in the backward pass (section 4.3).
    - ``ia3`` (Liu et al. 2022): the layer's output, with its bias, times ``scale`` [n]; or its input times ``scale`` [m] if
      ``feedforward`` matches.

    Layers are ``MatMul``, ``Gemm``, ``Conv`` and ``Gather`` (an embedding) whose weight is an initializer, or integers that are
    dequantized (``DequantizeLinear``, ``MatMulNBits``) or multiplied as integers (``MatMulInteger``, ``ConvInteger``), as in
    QLoRA. Outputs are unchanged at first: A is uniform in ``±1/√m`` (for Conv with the kernel in m), as PyTorch's
    ``kaiming_uniform_(a=√5)``, and B is zero; for embeddings A is zero and B standard normal; magnitudes are the lengths, and
    scales are 1.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        patterns: names or shell-style patterns of layers (``encoder.0.query`` for ``encoder.0.query.weight``), nodes or
            initializers. None: every adaptable ``MatMul``, ``Gemm`` and ``Conv`` whose weight is not trained.
        rank: rank of A and B; not for ``ia3``.
        alpha: numerator of the scaling; ``rank`` by default.
        variant: ``lora``, ``dora`` or ``ia3``.
        dropout: dropout rate of the inputs of A; not for embeddings.
        rslora: True to divide alpha by √rank (Kalajdzievski 2023).
        feedforward: patterns of layers whose inputs ``ia3`` scales.
        also_trained: names or patterns of initializers to train and store with the adapters, such as a new head.
        seed: seed of A, and of B for embeddings.

    Returns:
        A canonical model, with the adapters in its metadata. See ``docs/adapters.md``.

    Raises:
        ConfigurationError: a pattern matches nothing or something that cannot be adapted, an option does not fit, or a layer
            already has an adapter.
        ModelError: invalid ONNX model.
    """
    options = _options(rank, alpha, variant, dropout, rslora, feedforward)
    check_seed(seed)
    model = load(source)
    others = matching_weights(model, also_trained)

    def chosen(model: ir.Model) -> list[Layer]:
        return _unnamed(model, others) if patterns is None else select(model.graph, patterns, "patterns")

    write_integer_products(model, lambda trial: (layer.node.outputs[0].name or "" for layer in chosen(trial)))
    layers = chosen(model)
    if both := next((layer for layer in layers if layer.source.name in others), None):
        raise ConfigurationError(
            f"lora: also_trained matches '{both.source.name}', beside which an adapter is to stand, and which then stays as it "
            "is: leave its layer out of the patterns, or it out of also_trained"
        )
    scaled = set()
    if feedforward:
        scaled = {layer.node for layer in select(model.graph, feedforward, "feedforward")}
        _check_within(scaled, layers)
    return adapted(model, {layer: {**options, "feedforward": layer.node in scaled} for layer in layers}, others, seed)


def adapted(
    model: ir.Model, layers: Mapping[Layer, Mapping[str, object]], also_trained: Sequence[str] = (), seed: int = 0
) -> ir.Model:
    """Add adapters to layers of a canonical model, in place.

    Args:
        model: the model.
        layers: layers with their ``rank``, ``alpha``, ``variant``, ``dropout``, ``rslora`` and ``feedforward``.
        also_trained: other initializers to train.
        seed: seed of the initialization.

    Raises:
        ConfigurationError: a layer already has an adapter, or cannot have this one.
    """
    present = read_adapters(model.metadata_props)
    products = {adapter.product for adapter in present.adapters}
    for layer in layers:
        output = layer.node.outputs[0].name
        if output in products or layer.source.name in present.parameters:
            raise ConfigurationError(
                f"lora: the layer '{layer.name}' has an adapter, or belongs to one: put adapters beside the model without them, "
                "or merge them first (burnish.surgery.merge_adapters)"
            )
    names, generator = Names.of(model.graph), np.random.default_rng(seed)
    drawn: dict[str, dict[str, ir.Value]] = {}
    placed = [_placed(model, names, generator, layer, options, drawn) for layer, options in layers.items()]
    separate_names(model.graph)
    others = (*present.also_trained, *also_trained)
    called = other_names(model.graph) if others else {}
    unnamed = [name for name in others if called.get(name) and (module_in(name) is None or ".MatMul." in name)]
    renamed = {name: called[name][-1] for name in unnamed}
    Adapters((*present.adapters, *placed), others, {**renamed, **present.names}).write(model)
    return model


def _options(
    rank: int, alpha: float | None, variant: str, dropout: float, rslora: bool, feedforward: str | Sequence[str]
) -> dict[str, object]:
    if variant not in VARIANTS:
        raise ConfigurationError(
            f"lora: variant={variant!r}{suggestion(str(variant), VARIANTS)}: choose among {', '.join(map(repr, VARIANTS))}"
        )
    if not is_whole(rank) or rank < 1:
        raise ConfigurationError(f"lora: rank={rank!r}: give a whole number of 1 or more")
    has_rank = VARIANTS[variant].has_rank
    if not has_rank and (dropout or rslora or alpha is not None or rank != RANK):
        raise ConfigurationError(f"lora: variant='{variant}' has no rank: leave rank, alpha, dropout and rslora out")
    alpha = rank if alpha is None else alpha
    if not is_number(alpha) or alpha <= 0:
        raise ConfigurationError(f"lora: alpha={alpha!r}: give a number above 0; alpha / rank is what A B is multiplied by")
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ConfigurationError(f"lora: dropout={dropout!r}: give the share that is dropped, from 0 to below 1")
    if not isinstance(rslora, bool):
        raise ConfigurationError(f"lora: rslora={rslora!r}: give True or False")
    if has_rank and feedforward:
        raise ConfigurationError(f"lora: feedforward is for variant='ia3'; a '{variant}' reads and adds: leave it out")
    if not has_rank:
        return {"rank": 0, "alpha": 0.0, "variant": variant, "dropout": 0.0, "rslora": False}
    return {"rank": int(rank), "alpha": float(alpha), "variant": variant, "dropout": float(dropout), "rslora": rslora}


def _unnamed(model: ir.Model, others: Collection[str]) -> list[Layer]:
    layers, refused = find_layers(model.graph)
    chosen = [layer for layer in layers if layer.node.op_type != "Gather" and layer.source.name not in others]
    unknown = [layer for layer in chosen if layer.node.graph is not model.graph and _reads_unknown(layer)]
    why = "the shapes of what they read are not known: declare them in the bodies (value_info)"
    warn_of_bodies("lora", [layer.node for layer in unknown], why)
    chosen = [layer for layer in chosen if layer not in unknown]
    if not chosen:
        why = next((f" ({describe_node(node)}: {reason})" for node, reason in refused.items()), "")
        raise ConfigurationError(
            f"lora: the model has no MatMul, Gemm or Conv with a weight of its own that an adapter could stand beside{why}: name "
            "others with patterns, such as an embedding"
        )
    return chosen


def matching_weights(model: ir.Model, patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Return the weights that match patterns.

    Raises:
        ConfigurationError: a pattern matches none.
    """
    kinds = classify_initializers(model)
    weights = [name for name, kind in kinds.items() if kind in (InitializerKind.WEIGHT, InitializerKind.BUFFER)]
    aliases = other_names(model.graph) if patterns else {}
    chosen: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = select_named(pattern, weights, aliases)
        if not matching:
            known = [each for name in weights for each in (name, *aliases.get(name, ()))]
            raise ConfigurationError(f"lora: also_trained: '{pattern}' matches no weight{suggestion(pattern, known)}")
        chosen |= dict.fromkeys(matching)
    return tuple(chosen)


def _check_within(nodes: set[ir.Node], layers: Sequence[Layer]) -> None:
    missing = nodes.difference(layer.node for layer in layers)
    if missing:
        raise ConfigurationError(
            f"lora: feedforward matches {describe_node(next(iter(missing)))}, which patterns does not: let patterns match it too"
        )


def _placed(
    model: ir.Model,
    names: Names,
    generator: np.random.Generator,
    layer: Layer,
    options: Mapping[str, object],
    drawn: dict[str, dict[str, ir.Value]],
) -> Adapter:
    """Add an adapter to a layer; nodes with one layer name share its parameters."""
    graph, node, variant = model.graph, layer.node, VARIANTS[str(options["variant"])]
    place = node.graph
    assert isinstance(place, ir.Graph)
    place.opset_imports.update(graph.opset_imports)  # for branches and loop bodies
    _check_fits(layer, options)
    parameters = drawn.get(layer.name)
    if parameters is None:
        begun = variant.initial(
            layer, int(str(options["rank"])), bool(options["feedforward"]), generator, model.opset_imports[""]
        )
        arrays = {part: array.astype(layer.dtype.numpy()) for part, array in begun.items()}
        called = {part: f"{layer.name}.{name_in_peft(variant, part, node.op_type)}" for part in arrays}
        parameters = {part: add_initializer(graph, names.take(called[part]), array) for part, array in arrays.items()}
        drawn[layer.name] = parameters
    bias = added_bias(node) if not variant.has_rank and not options["feedforward"] else None
    base = node if bias is None else bias[0]
    base_output = base.outputs[0]
    adapter = Adapter(
        layer=layer.name,
        operator=node.op_type,
        weight=layer.source.name or "",
        product=node.outputs[0].name or "",
        base_output=base_output.name or "",
        output=base_output.name or "",
        parameters={part: value.name or "" for part, value in parameters.items()},
        spatial=len(layer.kernel),
        **options,  # type: ignore[arg-type]
    )
    readers = tuple(base_output.uses())
    if adapter.feedforward:
        return _with_scaled_input(place, names, adapter, layer, parameters["scale"])
    nodes = list(place)
    following = nodes.index(base) + 1
    builder = Builder(place, before=nodes[following] if following < len(nodes) else None)
    result = variant.emit(
        builder, adapter, layer, base_output, {part: builder.tensor(value) for part, value in parameters.items()}
    )
    result.value.type, result.value.shape = base_output.type, base_output.shape
    return _standing_in(place, names, adapter, base_output, result.value, readers)


def _standing_in(
    graph: ir.Graph,
    names: Names,
    adapter: Adapter,
    base_output: ir.Value,
    result: ir.Value,
    readers: Sequence[tuple[ir.Node, int]],
) -> Adapter:
    name = base_output.name or ""
    for reader, index in readers:
        reader.replace_input_with(index, result)
    for index, output in enumerate(graph.outputs):
        if output is base_output:
            graph.outputs[index] = result
    result.name = None
    base_output.name = names.take(f"{name}:base")
    result.name = name
    product = base_output.name if adapter.product == name else adapter.product
    return Adapter(**{**vars(adapter), "product": product, "base_output": base_output.name, "output": name})


def _with_scaled_input(graph: ir.Graph, names: Names, adapter: Adapter, layer: Layer, scale: ir.Value) -> Adapter:
    builder, node = Builder(graph, before=layer.node), layer.node
    read = node.inputs[0]
    assert read is not None
    along = scaled_axis(builder, builder.tensor(scale), layer, of_inputs=True)
    product = builder.tensor(read) * along
    product.value.name = names.take(f"{adapter.layer}.scaled_input")
    node.replace_input_with(0, product.value)
    return adapter


def _check_fits(layer: Layer, options: Mapping[str, object]) -> None:
    VARIANTS[str(options["variant"])].check_layer(layer, int(str(options["rank"])))
    if layer.node.op_type == "Gather" and options["feedforward"]:
        raise ConfigurationError(
            f"lora: feedforward matches {describe_node(layer.node)}, which reads indices: leave it out of feedforward"
        )
    if _reads_unknown(layer):
        raise ConfigurationError(
            f"lora: {describe_node(layer.node)} reads a value whose shape is not known: declare it in the model's value_info"
        )


def _reads_unknown(layer: Layer) -> bool:
    return layer.node.op_type == "MatMul" and layer.node.inputs[0] is not None and layer.node.inputs[0].shape is None
