"""The way from worker to worker: how they meet, how numbers get across, and what happens when one is gone.

``joining`` makes the group of a run, ``process_group`` is its workers, and ``communicators`` what an engine sees of them.
``ordered_sums`` stands before it where sums are to be taken otherwise. Nothing here knows graphs.
"""
