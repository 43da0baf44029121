"""How workers meet, how numbers get from one to another, and what happens when one is gone. Nothing here knows graphs."""
