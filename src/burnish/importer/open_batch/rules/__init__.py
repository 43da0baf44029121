"""What opens each operator, one file per family; importing this registers the rules. What calls them is ``opening``."""

from burnish.importer.open_batch.rules import elements, layers, movement, products  # noqa: F401
