"""Frozen lakes without an environment around them: cells, drawing, and exact values of play."""
