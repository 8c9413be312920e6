"""Weight layouts: the product of a matrix and one token's activations, which reads each weight once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from firsttoken.bench.layouts.case import Case, Measured, Setting
from firsttoken.bench.layouts.timing import Operation

TILE = 64
# Elements that fill one vector of 16 bytes in the shortest type: rows of a multiple need no padding.
VECTOR = 8
# The last one's rows do not fill whole vectors.
SHAPES = ((28672, 4096), (4096, 4096), (4096, 14336), (2048, 2048), (4096, 4097))


@dataclass(frozen=True)
class Product:
    """``y [rows] = W x``, W kept row by row, column by column, in square tiles, or in rows that begin at whole
    vectors."""

    layout: str
    rows: int
    columns: int

    def __call__(self, setting: Setting) -> Case:
        nbytes = self.rows * self.columns * setting.element_bytes
        copies = max(2, -(-setting.nbytes // nbytes))
        x = setting.random(self.columns)
        y = torch.empty(self.rows, device=setting.device, dtype=setting.torch_dtype)
        return Case([self._operation(setting, x, y) for _ in range(copies)], nbytes)

    def _operation(self, setting: Setting, x: torch.Tensor, y: torch.Tensor) -> Operation:
        if self.layout == "rows":
            rows = setting.random(self.rows, self.columns)
            return lambda: torch.mv(rows, x, out=y)
        if self.layout == "rows_padded":
            padded = setting.random(self.rows, -(-self.columns // VECTOR) * VECTOR)[:, : self.columns]
            return lambda: torch.mv(padded, x, out=y)
        if self.layout == "columns":
            columns = setting.random(self.columns, self.rows).t()
            return lambda: torch.mv(columns, x, out=y)
        tiles = setting.random(self.rows // TILE, self.columns // TILE, TILE, TILE)
        pieces = x.view(1, self.columns // TILE, TILE, 1)
        return lambda: torch.sum(tiles @ pieces, dim=1)


def measured() -> Iterator[Measured]:
    """The projections of an 8B and of a 1B model that differ most in shape, and one that is badly aligned."""
    for rows, columns in SHAPES:
        layouts = ["rows", "columns"]
        layouts.append("tiles" if columns % TILE == 0 else "rows_padded")
        for layout in layouts:
            yield Measured(
                f"weight {rows}x{columns}", layout, Product(layout, rows, columns), asked=("weight", (rows, columns), 0)
            )
