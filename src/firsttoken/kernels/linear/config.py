"""Choices of the small linear kernels: which kernel, what tile, how many parts of K. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from firsttoken.core.errors import ConfigError

OpKind = Literal["plain", "residual", "gated", "head"]
"""What follows the product: nothing, the residual add, SiLU(gate) * up, or logits with their best index."""
OP_KINDS: tuple[OpKind, ...] = ("plain", "residual", "gated", "head")
BlockM = Literal[1, 8, 16, 32, 64]

RowBucket = Literal["1", "2-8", "9-16", "17-32", "33-64"]
BUCKET_ROWS: dict[RowBucket, BlockM] = {"1": 1, "2-8": 8, "9-16": 16, "17-32": 32, "33-64": 64}
"""The most rows of each bucket: a tile's rows."""
MAX_ROWS = max(BUCKET_ROWS.values())

# sm_90 lends a program 227 KiB; a little is the compiler's own.
_SHARED_BYTES = 224 << 10
# A warp's registers hold 32 * 255 words; sums and both weight tiles live there.
_FMA_ELEMENTS_PER_WARP = 2048
_DOT_ELEMENTS_PER_WARP = 8192
# Half of a warp's sums at most, so that the epilogue has as many words again.
_DOT_SUMS_PER_WARP = 2048

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class LinearConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one product is computed.

    ``kernel`` is ``fma`` (one row, CUDA cores) or ``dot`` (2 to 64 rows, tensor cores). A program owns ``block_n``
    columns of the result and takes ``block_k`` of K at a time. ``stages`` is the depth of asynchronous copies; for
    ``fma`` 0 means a double buffer in registers. ``dot`` alone has ``block_m`` (8 to 64 rows), ``split_k`` (programs
    that share a tile's K) and ``prefetch`` (the first weights are in registers before the wait).
    """

    kernel: Literal["fma", "dot"]
    block_n: Annotated[int, msgspec.Meta(ge=1, le=256)]
    block_k: Annotated[int, msgspec.Meta(ge=16, le=8192)]
    warps: Literal[1, 2, 4, 8, 16]
    stages: Annotated[int, msgspec.Meta(ge=0, le=32)]
    block_m: BlockM = 1
    split_k: Annotated[int, msgspec.Meta(ge=1, le=32)] = 1
    prefetch: bool = False

    def tiles(self, n: int) -> int:
        """Programs that divide the ``n`` columns: so many partial sums of squares or best candidates a row are
        written."""
        return -(-n // self.block_n)

    def workspace_floats(self, n: int) -> int:
        """float32 values that the parts of K leave for each other; 0 without a split."""
        return self.tiles(n) * self.split_k * self.block_n * self.block_m if self.split_k > 1 else 0

    def shared_bytes(self) -> int:
        """Shared memory of the tiles in flight."""
        rows = self.block_n + (self.block_m if self.kernel == "dot" else 1)
        # A prefetched tile comes from registers, and wide tensor instructions want it in shared memory too.
        tiles = (self.stages if self.stages > 1 else 0) + (1 if self.prefetch and self.block_m >= 16 else 0)
        return tiles * rows * self.block_k * 2

    def check(self, kind: OpKind, n: int, k: int) -> None:
        """Raise `ConfigError` where the kernel cannot compute ``kind`` over weights ``[n, k]`` with these choices."""
        if problem := self._problem(kind, n, k):
            raise ConfigError(f"linear config {self} does not fit a {kind} product over weights [{n}, {k}]: {problem}")

    def _problem(self, kind: OpKind, n: int, k: int) -> str | None:
        if self.block_n & (self.block_n - 1) or self.block_k & (self.block_k - 1):
            return "block_n and block_k must be powers of two"
        if kind == "gated" and self.block_n < 2:
            return "a gated product needs pairs of rows, so block_n must be at least 2"
        if (needed := self.shared_bytes()) > _SHARED_BYTES:
            return f"its {self.stages} stages need {needed} bytes of shared memory of {_SHARED_BYTES}"
        if self.kernel != "dot" and (self.block_m != 1 or self.split_k != 1 or self.prefetch):
            return "block_m, split_k and prefetch are settings of the dot kernel"
        # A tile that holds the whole of K has no second one beside it.
        fma = _FMA_ELEMENTS_PER_WARP * (2 if k <= self.block_k else 1)
        limit = _DOT_ELEMENTS_PER_WARP if self.kernel == "dot" else fma
        if self.block_n * self.block_k > limit * self.warps:
            return f"a tile of {self.block_n * self.block_k} elements does not fit the registers of {self.warps} warps"
        return self._dot_problem(k) if self.kernel == "dot" else None

    def _dot_problem(self, k: int) -> str | None:
        if self.block_m == 1:
            return "block_m must be 8, 16, 32 or 64"
        if self.block_n < 16:
            return "block_n must be at least 16"
        if self.stages == 0:
            return "stages must be at least 1"
        if self.block_n * self.block_m > _DOT_SUMS_PER_WARP * self.warps:
            return f"sums of {self.block_n} x {self.block_m} do not fit the registers of {self.warps} warps"
        blocks = -(-k // self.block_k)
        span = -(-blocks // self.split_k)
        if (self.split_k - 1) * span >= blocks:
            return f"split_k = {self.split_k} leaves parts without any of the {blocks} blocks of K"
        return None


def row_bucket(rows: int) -> RowBucket:
    """The bucket whose configs serve ``rows`` rows; raises `ConfigError` beyond 64."""
    if not 1 <= rows <= MAX_ROWS:
        raise ConfigError(f"small linear kernels take 1 to {MAX_ROWS} rows, got {rows}: use torch.mm for more")
    return next(bucket for bucket, most in BUCKET_ROWS.items() if rows <= most)


def default_config(kind: OpKind, n: int, k: int, rows: int) -> LinearConfig:
    """A good choice where none was measured; fits any ``n`` and ``k``."""
    block_m = BUCKET_ROWS[row_bucket(rows)]
    if block_m == 1:
        return _default_fma(kind, n, k)
    return _default_few(n, k, block_m) if block_m <= 16 else _default_many(n, k, block_m)


def _power_of_two(at_least: int) -> int:
    return 1 << max(at_least - 1, 0).bit_length()


def _default_fma(kind: OpKind, n: int, k: int) -> LinearConfig:
    """Long rows in few steps, and at least two programs for each of a large GPU's 132 multiprocessors."""
    if k <= 2048:
        block_k = max(_power_of_two(k), 64)
    else:
        block_k = next((size for size in (2048, 1024, 512) if k % size == 0), 1024)
    block_n = 16
    while block_n > 2 and (n < block_n * 264 or block_n * block_k > 8192):
        block_n //= 2
    # The head's product is so long that its start costs nothing; asynchronous copies then read fastest.
    if kind == "head" and k % 512 == 0 and k > 512:
        return LinearConfig("fma", 16, 512, 8, 4)
    return LinearConfig("fma", block_n, block_k, 4, 0)


def _default_few(n: int, k: int, block_m: BlockM) -> LinearConfig:
    """Tiles of 64 rows of W; K is split until the GPU is full."""
    block_n = 64 if n >= 64 * 44 else 32 if n >= 32 * 44 else 16
    block_k = next((size for size in (128, 64) if k % size == 0), 128)
    split_k = _default_split(-(-n // block_n), -(-k // block_k), least_blocks=4)
    return LinearConfig("dot", block_n, block_k, 4, 5, block_m=block_m, split_k=split_k)


def _default_many(n: int, k: int, block_m: BlockM) -> LinearConfig:
    """Long blocks of K; in parts only where tiles are few, for the sums that parts leave each other are many."""
    block_k = 128 if k % 128 == 0 or k % 64 else 64
    blocks = -(-k // block_k)
    if n >= 128 * 100:
        return LinearConfig("dot", 128, block_k, 8, 4, block_m=block_m)
    block_n = 64 if n >= 64 * 12 else 32
    tiles = -(-n // block_n)
    # Measured: 64 programs with 32 blocks each are better than 128 with 16.
    split_k = _default_split(tiles, blocks, least_blocks=32 if tiles >= 64 else 4)
    return LinearConfig("dot", block_n, block_k, 4, 4, block_m=block_m, split_k=split_k)


def _default_split(tiles: int, blocks: int, least_blocks: int) -> int:
    """Parts of K that give at least 100 programs, if each then has ``least_blocks`` blocks of K or more."""
    split_k = 1
    for parts in (2, 3, 4, 6, 8):
        span = -(-blocks // parts)
        if tiles * split_k < 100 and span >= least_blocks and (parts - 1) * span < blocks:
            split_k = parts
    return split_k
