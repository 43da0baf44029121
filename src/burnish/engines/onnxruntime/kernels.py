"""Burnish's own kernels on ONNX Runtime: the library of their operators, and the graph passes that call them."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from burnish.engines.onnxruntime.failures import has_bfloat16
from burnish.errors import EngineError, KernelWarning
from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_uses
from burnish.graph.stage import Pass, Stage, rewrite, rewrite_graph
from burnish.graph.uses import remove_unread_nodes, remove_unused, sort
from burnish.kernels import compiling
from burnish.kernels.building import SWITCHED_OFF, build_library, cores, find_built, first_line, is_switched_off, level_of
from burnish.kernels.convolution.channels_last import use_channels_last
from burnish.kernels.elementwise.fusion import fuse_elementwise, join_groups
from burnish.kernels.indexing import use_gather_kernels
from burnish.kernels.normalization import (
    FUSED_BATCH_NORM,
    FUSED_BATCH_NORM_APPLY,
    FUSED_BATCH_NORM_GRAD,
    FUSED_BATCH_NORM_GRAD_APPLY,
    FUSED_BATCH_NORM_GRAD_SUMS,
    FUSED_STANDARDIZE,
    FUSED_STANDARDIZE_GRAD,
)
from burnish.kernels.normalization.fusion import SYNCHRONIZED, fuse_batch_normalization, fuse_synchronized
from burnish.kernels.normalization.row_fusion import fuse_normalization
from burnish.kernels.recurrent import (
    FUSED_GRU_STEPS,
    FUSED_GRU_STEPS_GRAD,
    FUSED_LSTM_STEPS,
    FUSED_LSTM_STEPS_GRAD,
    use_recurrent_kernels,
)
from burnish.kernels.softmax import use_cross_entropy_kernels
from burnish.operators.activation import CLIP_GRAD, RELU_GRAD
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD
from burnish.operators.indexing import GATHER_GRAD
from burnish.operators.loss import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_GRAD
from burnish.operators.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING
from burnish.operators.normalization.standardize import ROOT_MEAN_SQUARE_NORMALIZE, STANDARDIZE, STANDARDIZE_GRAD
from burnish.operators.pooling import MAX_POOL_GRAD
from burnish.operators.recurrent import GRU_STEPS, GRU_STEPS_GRAD, LSTM_STEPS, LSTM_STEPS_GRAD
from burnish.operators.semantic import SemanticOperator
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.warn import warn

IMAGES = (CONV_INPUT_GRAD, CONV_WEIGHT_GRAD, MAX_POOL_GRAD)
COUNTING = (SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_GRAD)
"""Kernels that also count labels, which workers exchange."""
ROWS = (STANDARDIZE, STANDARDIZE_GRAD, ROOT_MEAN_SQUARE_NORMALIZE, *COUNTING)
RECURRENT = (LSTM_STEPS, LSTM_STEPS_GRAD, GRU_STEPS, GRU_STEPS_GRAD)
PARTS = (*COUNTING, *SYNCHRONIZED)
"""Kernels that gain nothing, or lose, if a graph is cut at its exchanges."""
OPERATORS = (BATCH_NORM_TRAINING, BATCH_NORM_GRAD, *SYNCHRONIZED, CLIP_GRAD, RELU_GRAD, GATHER_GRAD, *IMAGES, *ROWS, *RECURRENT)
"""The semantic operators with kernels, for some or all of their nodes."""

_WITH_OPTIONAL_OPERANDS = (
    FUSED_BATCH_NORM,
    FUSED_BATCH_NORM_APPLY,
    FUSED_BATCH_NORM_GRAD,
    FUSED_BATCH_NORM_GRAD_APPLY,
    FUSED_BATCH_NORM_GRAD_SUMS,
    FUSED_STANDARDIZE,
    FUSED_STANDARDIZE_GRAD,
    FUSED_LSTM_STEPS,
    FUSED_LSTM_STEPS_GRAD,
    FUSED_GRU_STEPS,
    FUSED_GRU_STEPS_GRAD,
)

SOURCE = Path(__file__).parent / "native" / "operators.cpp"


@dataclass(frozen=True)
class Library:
    """The operator library of an engine, or the reason why there is none.

    Attributes:
        path: path of the library; None if standard operators run instead.
        reason: reason why there is none, as a clause; None if there is one.
        remedy: the way to get one, as a sentence without its full stop; None if it is not needed.
    """

    path: Path | None
    reason: str | None = None
    remedy: str | None = None

    @property
    def level(self) -> str:
        """The instruction set of the library, or the best one of this processor, such as ``avx512``."""
        return compiling.cpu_level() if self.path is None else level_of(self.path, SOURCE)


def find_library() -> Library:
    """Return the library built by the installation or an earlier run. A damaged one in the cache is rebuilt.

    Warns:
        KernelWarning: a cached library must not be loaded, or cannot be rebuilt.
    """
    if is_switched_off():
        return Library(None, SWITCHED_OFF)
    try:
        path = find_built(SOURCE)
        if path is not None:
            _check_loads(path)
            return Library(path)
    except (OSError, RuntimeError) as error:
        reason = first_line(error)
        warn(KernelWarning(f"{reason}. Standard operators run instead, which take longer"))
        return Library(None, reason)
    if not sys.platform.startswith(("linux", "darwin")):
        return Library(None, f"they do not run on {platform.system()} yet")
    reason = f"no library for this processor ({compiling.cpu_level()}) came with the installation"
    build = "build them once with OnnxRuntimeEngine(kernels=True) or --kernels"
    if compiling.find_compiler() is None:
        return Library(None, f"{reason}, and there is no C++ compiler", f"Install g++ or clang++, and {build}")
    return Library(None, reason, build.replace("b", "B", 1))


def build_operators() -> Library:
    """Return the library, built if necessary.

    Raises:
        EngineError: it cannot be built.
    """
    if is_switched_off():
        return Library(None, SWITCHED_OFF)
    try:
        path = build_library(SOURCE)
        _check_loads(path)
    except (OSError, RuntimeError) as error:
        raise EngineError(
            f"kernels=True: the kernels could not be built ({first_line(error)}); kernels=False goes without them"
        ) from error
    return Library(path)


def _check_loads(library: Path) -> None:
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(library))
    except Exception as error:  # the errors of ONNX Runtime have no common base class
        raise RuntimeError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load the kernels in '{library}' ({first_line(error)}); remove the "
            "file, or install burnish again"
        ) from error


@functools.cache
def tell_of_missing(reason: str, remedy: str) -> None:
    """Report on stderr, once per process, that sessions run standard operators because kernels are missing."""
    print(
        f"burnish: kernels are missing ({reason}), so steps take up to three times as long. {remedy}. "
        "BURNISH_KERNELS=off hides this line.",
        file=sys.stderr,
    )


@dataclass(frozen=True)
class Calling:
    """The context of the passes that call kernels.

    Attributes:
        threads: number of threads of the kernels.
        outputs: names of the graph's outputs.
    """

    threads: int
    outputs: tuple[str | None, ...]


def _keep_for_kernels(model: ir.Model, *kept: SemanticOperator) -> bool:
    """Lower the semantic operators without kernels, except ``kept``, which a later pass may replace."""
    called = {node.op_type for node in model.graph if node.domain == BURNISH_DOMAIN}
    return lower_semantic_operators(model, keep=called - {operator.name for operator in OPERATORS} | {item.name for item in kept})


def _leave_out_missing_operands(graph: ir.Graph) -> bool:
    changed = False
    for node in list(graph):
        if any(operator.is_of(node) for operator in _WITH_OPTIONAL_OPERANDS) and "present" not in node.attributes:
            _leave_out_what_is_missing(graph, node)
            changed = True
    return changed


ONNXRUNTIME_KERNELS: Stage[Calling] = Stage(
    "ONNXRUNTIME",
    (
        rewrite_graph(fuse_batch_normalization),
        rewrite_graph(fuse_synchronized),
        rewrite_graph(fuse_normalization),
        rewrite_graph(use_cross_entropy_kernels),
        Pass("use_recurrent_kernels", lambda model, context: use_recurrent_kernels(model.graph, context.threads)),
        Pass("use_gather_kernels", lambda model, context: use_gather_kernels(model.graph, context.threads)),
        rewrite_graph(sort, reason="TopologicalSortPass makes the same call"),
        Pass("lower_all_but_images", lambda model, _: _keep_for_kernels(model, *IMAGES)),
        Pass("use_channels_last", lambda model, context: use_channels_last(model.graph, context.threads)),
        # No kernel computes values for unused nodes.
        rewrite_graph(remove_unread_nodes, reason="RemoveUnusedNodesPass takes as long as the graph has outputs, for each node"),
        Pass("leave_out_missing_operands", lambda model, _: _leave_out_missing_operands(model.graph)),
        Pass("lower_what_no_kernel_takes", lambda model, _: _keep_for_kernels(model)),
        rewrite_graph(fuse_elementwise),
        rewrite_graph(join_groups),
        Pass("name_outputs", lambda model, context: _name_outputs(model.graph, context.outputs)),
        rewrite(remove_unused),
    ),
    settles=False,
)
"""Passes that call our kernels in a graph, and lower the other semantic operators."""


def call_kernels(model: ir.Model, threads: int | None = None) -> None:
    """Call kernels in a graph if possible, in place; lower the other semantic operators.

    Args:
        model: the model.
        threads: number of threads of the kernels; None for all cores.
    """
    if has_bfloat16(model):  # ONNX Runtime cannot load these, and its error names the standard operator
        lower_semantic_operators(model)
        return
    ONNXRUNTIME_KERNELS.run(model, Calling(int(threads or cores()), tuple(value.name for value in model.graph.outputs)))
    model.opset_imports[BURNISH_DOMAIN] = 1


def _name_outputs(graph: ir.Graph, names: Sequence[str | None]) -> bool:
    changed = False
    for place, (value, name) in enumerate(zip(list(graph.outputs), names, strict=True)):
        if value.name != name and value.producer() is not None and value.name not in names:
            value.name = name
            changed = True
        elif value.name != name:  # other outputs, and inputs, keep their names
            builder = Builder(graph)
            copy = builder.op("Identity", builder.tensor(value)).value
            copy.name = name
            graph.outputs[place] = copy
            changed = True
    return changed


def _leave_out_what_is_missing(graph: ir.Graph, node: ir.Node) -> None:
    """List a node's present operands in an attribute and remove absent ones; remove outputs that the kernel leaves out."""
    outputs = list(node.outputs)
    keeps_flow = FUSED_BATCH_NORM_GRAD.is_of(node) or FUSED_BATCH_NORM_GRAD_SUMS.is_of(node)
    if keeps_flow and not outputs[-1].uses() and not outputs[-1].is_graph_output():
        outputs.pop()
    if FUSED_STANDARDIZE_GRAD.is_of(node) and not attribute_value(node, "parameters", 0):
        outputs = outputs[:1]
    attributes = {
        **node.attributes,
        "present": ir.AttrInt64s("present", [int(value is not None) for value in node.inputs]),
        "output_count": ir.AttrInt64("output_count", len(outputs)),
    }
    operands = [value for value in node.inputs if value is not None]
    replacement = ir.Node(node.domain, node.op_type, operands, list(attributes.values()), num_outputs=len(outputs))
    replacement.metadata_props.update(node.metadata_props)
    graph.insert_before(node, replacement)
    for value, new in zip(outputs, replacement.outputs, strict=True):
        new.type, new.shape = value.type, value.shape
        name = value.name
        replace_uses(value, new)
        value.name, new.name = None, name
    graph.remove(node, safe=True)
