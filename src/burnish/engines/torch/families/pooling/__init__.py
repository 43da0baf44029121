"""Max pooling whose indices only its own gradient reads."""
