"""Sounds in .wav files, as samples or log-mel spectrograms."""
