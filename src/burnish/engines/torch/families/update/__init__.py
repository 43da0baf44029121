"""Updates of the state in place."""
