"""What operators of the standard do with the axes of their operands, one file per family. What asks them is ``analysis``."""

from burnish.sample_axes.rules import bodies, elements, indexing, movement, numbers, products

__all__ = ["bodies", "elements", "indexing", "movement", "numbers", "products"]
