"""What opens each operator, one file per family; importing this registers the rules. What calls them is ``opening``."""

from burnish.importer.open_batch.rules import (  # noqa: F401
    attention,
    elements,
    images,
    indexing,
    losses,
    movement,
    normalization,
    products,
    recurrent,
    reductions,
    shapes,
)
