"""Recurrent layers: the steps of a direction from its first frame to its last, and back again, as one kernel each."""
