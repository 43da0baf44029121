"""Text as data: what reads it, what makes tokens of it, how tokens are padded, and what a language model learns of them.

What a model computes of tokens is no business of these files, nor is how its loss compares.
"""
