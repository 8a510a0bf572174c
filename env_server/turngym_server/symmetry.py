"""Grids that are the same once turned and mirrored."""

from collections.abc import Sequence


def least_symmetry(rows: Sequence[str]) -> str:
    """The least, as text with a newline between rows, of the 8 ways to turn and mirror rows of equal length."""
    transposed = ["".join(column) for column in zip(*rows, strict=True)]
    forms: list[str] = []
    for form in (rows, transposed):
        mirrored = [row[::-1] for row in form]
        forms += ("\n".join(form), "\n".join(form[::-1]), "\n".join(mirrored), "\n".join(mirrored[::-1]))
    return min(forms)
