"""Federated training of digits: a Flower app."""
