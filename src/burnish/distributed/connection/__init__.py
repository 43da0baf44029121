"""How workers meet, how numbers get from one to another, and what happens when one is gone.

``joining`` makes the group of a run, ``process_group`` is its workers, and ``communicators`` is how an engine reaches them.
Nothing here knows graphs.
"""
