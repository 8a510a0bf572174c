"""Sokoban without an environment around it: boards, levels, solvers, generation, level files.

A cell is its index in the board's text, row by row with one newline a row; a set of cells is the integer with those
bits. Sets move by shifting: `cells << 1` is every cell one to the right. Walls are the cells outside the floor, so
that nothing that is masked by the floor can leave the board.
"""
