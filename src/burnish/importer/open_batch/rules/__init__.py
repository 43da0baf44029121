"""What opens each operator, by name: one file per family. Elementwise operators are opened by what their records say."""

from burnish.importer.open_batch.call import Rule
from burnish.importer.open_batch.rules import elements, layers, movement, products

RULES: dict[str, Rule] = {**elements.RULES, **layers.RULES, **movement.RULES, **products.RULES}
