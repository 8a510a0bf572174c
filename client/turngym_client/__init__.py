"""The client of turngym environment servers."""
