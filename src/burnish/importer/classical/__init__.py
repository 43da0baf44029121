"""Operators of classical toolkits, the domain ``ai.onnx.ml`` that skl2onnx and its kin write, as standard operators.

``features`` has what prepares data, ``linear`` the linear models, ``scores`` what is done to their scores, ``inference`` the
dtypes and shapes that the standard's inference leaves out, ``zip_maps`` the dictionaries at the end of classifiers,
``class_labels`` what a classifier calls its classes, and ``preprocessing`` which constants of such a file are no weights. What
has no equal among standard operators, such as trees and tables of strings, stays as it is: ONNX Runtime runs it, and no gradient
passes through.
"""

from burnish.importer.classical.attributes import CLASSICAL_DOMAIN
from burnish.importer.classical.class_labels import CLASS_NUMBERS, CLASSES, note_class_labels
from burnish.importer.classical.inference import declare_outputs, stand_in_for_classical
from burnish.importer.classical.preprocessing import hold_preprocessing
from burnish.importer.classical.replace import replace_classical_operators
from burnish.importer.classical.zip_maps import restore_zip_maps, without_zip_maps

__all__ = [
    "CLASSES",
    "CLASSICAL_DOMAIN",
    "CLASS_NUMBERS",
    "declare_outputs",
    "hold_preprocessing",
    "note_class_labels",
    "replace_classical_operators",
    "restore_zip_maps",
    "stand_in_for_classical",
    "without_zip_maps",
]
