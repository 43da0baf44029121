"""Mixed precision: where its casts stand, and what is computed in float32 instead."""
