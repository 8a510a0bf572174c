"""Scores agents on held-out instances."""
