"""The stages of ``benchmarks/gpu.py``, one file each, and what they share.

``campaign`` runs stages in processes of their own and imports the standard library alone, so that it can say what is missing.
"""
