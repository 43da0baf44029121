"""Keys under which the metadata of a model say what data it reads."""

COLUMNS = "burnish.columns"
"""Which columns of a table were read, and the categories of those of text."""
PIXELS = "burnish.pixels"
"""What is done to the pixels of images."""
TEXT = "burnish.text"
"""How texts become tokens."""
