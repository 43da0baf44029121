"""Runners of one worker that look to a session like one of the whole run, where workers hold different parts of its state.

They call the engine's own runner, which runs the graph. Which part a worker holds is decided in ``graphs``; what is sent goes by
``connection``.
"""
