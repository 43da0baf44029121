"""Passes: rewrites of whole graphs, in place, one per file, and what asks for them: what to compute again, in which dtype.

What a single operator becomes is in ``burnish.ops``; what is only read off a graph, in ``burnish.analysis``;
what leads from a model to a program, in ``burnish.compiler``.
"""

from burnish.passes.complete_axes import complete_axes
from burnish.passes.compute_in_float32 import compute_in_float32, has_sixteen_bit_values
from burnish.passes.compute_integers import compute_integers
from burnish.passes.concatenate_padded_parts import concatenate_padded_parts
from burnish.passes.draw_dropout import draw_dropout
from burnish.passes.expand_gradients import expand_gradients, lower_what_has_no_gradient
from burnish.passes.expand_recurrent_layers import expand_recurrent_layers
from burnish.passes.fold_batch_normalization import fold_batch_normalization
from burnish.passes.fold_constants import fold_constants
from burnish.passes.fold_pruning import fold_pruning
from burnish.passes.fold_quantization import fold_quantization
from burnish.passes.fold_weight_normalization import fold_weight_normalization
from burnish.passes.gather_reordered_blocks import gather_reordered_blocks
from burnish.passes.hoist_gather import hoist_gather
from burnish.passes.join_updates import join_updates
from burnish.passes.merge_adapters import merge_adapters
from burnish.passes.merge_casts import merge_casts
from burnish.passes.merge_scalars import merge_scalars
from burnish.passes.mixed_precision import mix_precision
from burnish.passes.multiply_depthwise_rows import has_depthwise_rows, multiply_depthwise_rows
from burnish.passes.raise_scalar_ranks import raise_scalar_ranks
from burnish.passes.recognize_attention import recognize_attention
from burnish.passes.recognize_gelu import recognize_gelu
from burnish.passes.recognize_group_normalization import hold_group_normalization_constants, recognize_group_normalization
from burnish.passes.recognize_layer_normalization import recognize_layer_normalization
from burnish.passes.recognize_normalization import recognize_normalization, recognize_training_normalization
from burnish.passes.recognize_probabilities import recognize_probabilities
from burnish.passes.recognize_rms_normalization import recognize_rms_normalization
from burnish.passes.recompute import recompute_activations, run_in_order, wait_by_selection
from burnish.passes.remove_unused import remove_unused
from burnish.passes.simulate_quantization import refuse_lost_gradients, simulate_quantization
from burnish.passes.train_pruning import train_pruning
from burnish.passes.train_quantization import train_quantization
from burnish.passes.widen_reductions import widen_reductions

__all__ = [
    "complete_axes",
    "compute_in_float32",
    "compute_integers",
    "concatenate_padded_parts",
    "draw_dropout",
    "expand_gradients",
    "expand_recurrent_layers",
    "fold_batch_normalization",
    "fold_constants",
    "fold_pruning",
    "fold_quantization",
    "fold_weight_normalization",
    "gather_reordered_blocks",
    "has_depthwise_rows",
    "has_sixteen_bit_values",
    "hoist_gather",
    "hold_group_normalization_constants",
    "join_updates",
    "lower_what_has_no_gradient",
    "merge_adapters",
    "merge_casts",
    "merge_scalars",
    "mix_precision",
    "multiply_depthwise_rows",
    "raise_scalar_ranks",
    "recognize_attention",
    "recognize_gelu",
    "recognize_group_normalization",
    "recognize_layer_normalization",
    "recognize_normalization",
    "recognize_probabilities",
    "recognize_rms_normalization",
    "recognize_training_normalization",
    "recompute_activations",
    "refuse_lost_gradients",
    "remove_unused",
    "run_in_order",
    "simulate_quantization",
    "train_pruning",
    "train_quantization",
    "wait_by_selection",
    "widen_reductions",
]
