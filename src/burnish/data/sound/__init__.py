"""Sounds in .wav files: read, resampled, and made samples or log-mel spectrograms of, as a model takes them."""
