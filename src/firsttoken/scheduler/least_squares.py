"""Least squares for the few unknowns of a model of step times, without a library."""

from __future__ import annotations

from collections.abc import Sequence

Matrix = list[list[float]]
# Of a gradient, where columns and targets are scaled to about 1.
_TOLERANCE = 1e-9
_RIDGE = 1e-10


def nonnegative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The coefficients, none below 0, that bring ``rows`` times them nearest to ``targets``: Lawson and Hanson's way.

    All coefficients begin at 0. The one whose rise would help most is let go; the free ones are solved for; when that
    makes one negative, it goes back to 0. A column of zeros keeps coefficient 0.
    """
    width = len(rows[0])
    scale = [max(abs(row[column]) for row in rows) or 1.0 for column in range(width)]
    scaled = [[value / size for value, size in zip(row, scale, strict=True)] for row in rows]
    gram = [[sum(row[a] * row[b] for row in scaled) for b in range(width)] for a in range(width)]
    aim = [sum(row[a] * target for row, target in zip(scaled, targets, strict=True)) for a in range(width)]
    found = [0.0] * width
    free: list[int] = []
    for _ in range(3 * width):
        slope = [aim[a] - sum(gram[a][b] * found[b] for b in free) for a in range(width)]
        held = [a for a in range(width) if a not in free]
        best = max(held, key=lambda a: slope[a], default=-1)
        if best < 0 or slope[best] <= _TOLERANCE * len(rows):
            break
        free.append(best)
        _settle(gram, aim, found, free)
    return [value / size for value, size in zip(found, scale, strict=True)]


def _settle(gram: Matrix, aim: Sequence[float], found: list[float], free: list[int]) -> None:
    """Move the ``free`` coefficients to their best values, or as far as none falls below 0: that one is held again."""
    while free:
        wanted = solve([[gram[a][b] for b in free] for a in free], [aim[a] for a in free])
        if min(wanted) > 0:
            for a, value in zip(free, wanted, strict=True):
                found[a] = value
            return
        falling = [(a, value) for a, value in zip(free, wanted, strict=True) if value <= 0]
        step, stopper = min((found[a] / ((found[a] - value) or 1.0), a) for a, value in falling)
        for a, value in zip(free, wanted, strict=True):
            found[a] += step * (value - found[a])
        found[stopper] = 0.0
        free.remove(stopper)


def solve(matrix: Matrix, right: Sequence[float]) -> list[float]:
    """The solution of a symmetric positive system (Gauss, pivots on the diagonal; a little ridge keeps it solvable)."""
    size = len(right)
    work = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        work[pivot][pivot] += _RIDGE
        for below in range(pivot + 1, size):
            share = work[below][pivot] / work[pivot][pivot]
            if share:
                work[below] = [low - share * high for low, high in zip(work[below], work[pivot], strict=True)]
    solution = [0.0] * size
    for pivot in reversed(range(size)):
        rest = sum(work[pivot][b] * solution[b] for b in range(pivot + 1, size))
        solution[pivot] = (work[pivot][size] - rest) / work[pivot][pivot]
    return solution
