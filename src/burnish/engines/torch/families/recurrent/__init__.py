"""Recurrent layers: one direction from its first frame to its last, and back again, in one call."""
