"""Runners of one worker that look to a session like one of the whole run, where workers hold different parts of its state."""
