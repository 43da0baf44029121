"""Text datasets: reading, tokenization, padding, and targets of language models.

These modules do not depend on models or losses.
"""
