"""Connections of workers: how they meet, exchange numbers, and detect a lost worker. Nothing here depends on graphs."""
