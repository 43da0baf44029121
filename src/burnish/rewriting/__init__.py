"""Passes: rewrites of whole graphs, in place, one per file, and what asks for them: what to compute again, in which dtype.

What a single operator becomes is in ``burnish.operators``; what is only read off a graph, in ``burnish.analysis``;
what leads from a model to a program, in ``burnish.compiler``.
"""

from burnish.rewriting.complete_axes import complete_axes
from burnish.rewriting.compute_in_float32 import compute_in_float32, has_sixteen_bit_values
from burnish.rewriting.compute_integers import compute_integers
from burnish.rewriting.concatenate_padded_parts import concatenate_padded_parts
from burnish.rewriting.draw_dropout import draw_dropout
from burnish.rewriting.expand_gradients import expand_gradients, lower_what_has_no_gradient
from burnish.rewriting.expand_recurrent_layers import expand_recurrent_layers
from burnish.rewriting.fold_batch_normalization import fold_batch_normalization
from burnish.rewriting.fold_constants import fold_constants
from burnish.rewriting.fold_pruning import fold_pruning
from burnish.rewriting.fold_quantization import fold_quantization
from burnish.rewriting.fold_weight_normalization import fold_weight_normalization
from burnish.rewriting.gather_reordered_blocks import gather_reordered_blocks
from burnish.rewriting.hoist_gather import hoist_gather
from burnish.rewriting.join_updates import join_updates
from burnish.rewriting.merge_adapters import merge_adapters
from burnish.rewriting.merge_casts import merge_casts
from burnish.rewriting.merge_scalars import merge_scalars
from burnish.rewriting.mixed_precision import mix_precision
from burnish.rewriting.multiply_depthwise_rows import has_depthwise_rows, multiply_depthwise_rows
from burnish.rewriting.raise_scalar_ranks import raise_scalar_ranks
from burnish.rewriting.recognize_attention import recognize_attention
from burnish.rewriting.recognize_gelu import recognize_gelu
from burnish.rewriting.recognize_group_normalization import hold_group_normalization_constants, recognize_group_normalization
from burnish.rewriting.recognize_layer_normalization import recognize_layer_normalization
from burnish.rewriting.recognize_normalization import recognize_normalization, recognize_training_normalization
from burnish.rewriting.recognize_probabilities import recognize_probabilities
from burnish.rewriting.recognize_rms_normalization import recognize_rms_normalization
from burnish.rewriting.recompute import recompute_activations, run_in_order, wait_by_selection
from burnish.rewriting.remove_unused import remove_unused
from burnish.rewriting.simulate_quantization import refuse_lost_gradients, simulate_quantization
from burnish.rewriting.train_pruning import train_pruning
from burnish.rewriting.train_quantization import train_quantization
from burnish.rewriting.widen_reductions import widen_reductions

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
