"""What opens each operator, one file per family; importing this registers the rules."""

from burnish.importer.open_batch.rules import (
    attention as attention,
)
from burnish.importer.open_batch.rules import (
    elements as elements,
)
from burnish.importer.open_batch.rules import (
    images as images,
)
from burnish.importer.open_batch.rules import (
    indexing as indexing,
)
from burnish.importer.open_batch.rules import (
    losses as losses,
)
from burnish.importer.open_batch.rules import (
    movement as movement,
)
from burnish.importer.open_batch.rules import (
    normalization as normalization,
)
from burnish.importer.open_batch.rules import (
    products as products,
)
from burnish.importer.open_batch.rules import (
    recurrent as recurrent,
)
from burnish.importer.open_batch.rules import (
    reductions as reductions,
)
from burnish.importer.open_batch.rules import (
    shapes as shapes,
)
