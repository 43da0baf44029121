"""The way from worker to worker: how they meet, how numbers get across, and what happens when one is gone.

``process_group`` is the workers of a run; ``communicators`` is what an engine sees of them. ``ordered_sums`` and ``power_sgd``
stand before it where sums are to be taken otherwise. Nothing here knows graphs.
"""
