"""Keys under which the metadata of a model say what data it reads."""

PIXELS = "burnish.pixels"
"""What is done to the pixels of images."""
TEXT = "burnish.text"
"""How texts become tokens."""
