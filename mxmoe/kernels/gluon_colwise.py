"""Colwise quantization in Gluon: the fast path of ``quantize_colwise`` on sm_90 and later, bit-equal to it.

          K columns                  qdata, column-major                  scale, column-major
        +-----+-----+ ...           K                                    K
    128 |tile |tile |             +------+------+- ... Mp              +----+----+- ... Mp/32
   rows |     |     |             | tile': 128 bytes of a column are   |  4 bytes of a column per tile
        +-----+-----+             | one line, written at once          |
    128 |     |                   |
                                  a tile is four blocks of 32 rows of the result, of any groups: each block has its own
                                  first row in x

Grid     (experts * row tiles * column tiles,), in bands of column tiles (``tile_order``). Row tiles are an upper bound
         known without reading offs. Programs behind the last group zero the tail of the result.
Writes   every byte of every output once: buffers may come from torch.empty.
Traffic  2 bytes read, 1 + 1/32 written per element.
Index    int64 up to the tile, int32 inside it (``supported`` bounds the strides).
Source   ``_gluon.py`` for the ownership of a tile; ``docs/layouts.md`` for the blocked scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxmoe import shapes
from mxmoe.formats import BLOCK
from mxmoe.kernels import _gluon
from mxmoe.kernels._gluon import Config

# 100 registers, four programs on an SM at once: with a cap of 96 there are five, and plain scales take 3 % longer.
CONFIG = Config(CBAND=1)
CONFIG_BLOCKED = Config(LR=4, WR=2, CBAND=1, maxnreg=96)


@gluon.jit
def _tile(
    q_ptr, s_ptr, x_ptr, stash_c, blocks, t, ct, expert, M, K8, MO, ld8, batch8, scale_ld, sf_row_tiles, sf_slots,
    STASH_C: gl.constexpr, GROUPED: gl.constexpr, BLOCKED: gl.constexpr, EMAX: gl.constexpr, THRESH: gl.constexpr,
    E5M2: gl.constexpr, FP16: gl.constexpr, TR: gl.constexpr, TW: gl.constexpr, LR: gl.constexpr, WR: gl.constexpr,
    W: gl.constexpr, LOAD: gl.constexpr, EVICT: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """One tile of 128 rows. ``blocks``: what ``group_blocks`` says about it, in groups."""
    # 2. Coordinates: source rows, rows of the result, columns.
    BK: gl.constexpr = 2 * TW * (32 // LR) * (W // WR)
    out_row = t * 128
    out_rows = gl.minimum(gl.maximum(MO - out_row, 0), 128)
    if GROUPED:
        row, down, live, _, search = blocks
        full = _gluon.all_equal(live, 32)
    else:
        row = out_row
        down = 0
        live = out_rows
        search = 0
        full = True
    col = ct * BK
    cols = K8 * 8 - col
    x_tile = x_ptr + ((expert * batch8 + row.to(gl.int64) * ld8) * 8 + col)
    q_tile = q_ptr + ((expert * (K8 * 8) + col) * MO.to(gl.int64) // 16 * 16 + out_row)
    if BLOCKED:
        s_tile = s_ptr
        if not GROUPED:
            s_tile += (expert * (sf_row_tiles * sf_slots) + t) * 512
    else:
        s_tile = s_ptr + ((expert * (K8 * 8) + col) * scale_ld + out_row // 32)

    # 3. and 4. Load (rows and columns outside are 0), quantize, store. The loads are under way while the search for the
    # places of blocked scales goes on.
    if full & (out_rows == 128) & (cols >= BK):
        w0, w1, w2, w3 = _gluon.load_words(
            x_tile, down, live, BK // 2, ld8, False, GROUPED, TR, TW, LR, WR, W, LOAD, EVICT
        )
        place, used_tiles = _gluon.places(t, search, GROUPED and BLOCKED)
        _gluon.store_cols(
            q_tile, s_tile, stash_c, w0, w1, w2, w3, MO // 16, 8, col, BK, scale_ld, place, sf_row_tiles,
            sf_slots, False, STASH_C, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, STORE,
        )  # fmt: skip
    else:
        w0, w1, w2, w3 = _gluon.load_words(
            x_tile, down, live, K8 * 4 - col // 2, ld8, True, GROUPED, TR, TW, LR, WR, W, LOAD, EVICT
        )
        place, used_tiles = _gluon.places(t, search, GROUPED and BLOCKED)
        _gluon.store_cols(
            q_tile, s_tile, stash_c, w0, w1, w2, w3, MO // 16, out_rows // 16, col, cols, scale_ld, place, sf_row_tiles,
            sf_slots, True, STASH_C, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, STORE,
        )  # fmt: skip
    if GROUPED and BLOCKED:
        _gluon.zero_missing_cols(s_ptr, place, sf_row_tiles, col, BK, W)
        _gluon.zero_tiles(s_ptr, used_tiles * sf_row_tiles, sf_slots * sf_row_tiles, W)


@gluon.jit(
    do_not_specialize=[
        "M", "K8", "MO", "G", "ld8", "batch8", "scale_ld", "row_tiles", "col_tiles", "sf_row_tiles", "sf_slots",
    ]
)  # fmt: skip
def _quantize_colwise_kernel(
    q_ptr,  # (experts, K, MO) uint8, qdata transposed
    s_ptr,  # plain: (experts, K, ceil(MO/32)) uint8; blocked: 512-byte tiles
    padded_ptr,  # (G,) int32, group ends in MO
    x_ptr,  # (experts, M, K) bf16 or fp16
    offs_ptr,  # (G,) int32, group ends in M
    M,
    K8,  # K / 8
    MO,  # rows of the result: M, or padded; a multiple of 16
    G,
    ld8,  # row stride of x / 8
    batch8,  # expert stride of x / 8
    scale_ld,  # ceil(MO / 32)
    row_tiles,  # tiles of 128 rows
    col_tiles,  # tiles of the configuration's columns
    sf_row_tiles,  # ceil(K / 128): row tiles of the blocked scale
    sf_slots,  # 128-row tiles that the blocked buffer has
    ALIGNED: gl.constexpr,  # scale_ld is a multiple of 4
    GROUPED: gl.constexpr,
    G_POW2: gl.constexpr,
    BLOCKED: gl.constexpr,
    EMAX: gl.constexpr,
    THRESH: gl.constexpr,
    E5M2: gl.constexpr,
    FP16: gl.constexpr,
    TR: gl.constexpr,
    TW: gl.constexpr,
    LR: gl.constexpr,
    WR: gl.constexpr,
    W: gl.constexpr,
    SR: gl.constexpr,
    SC: gl.constexpr,  # of no use here
    BAND: gl.constexpr,
    CBAND: gl.constexpr,
    LOAD: gl.constexpr,
    EVICT: gl.constexpr,
    STORE: gl.constexpr,
):
    BK: gl.constexpr = 2 * TW * (32 // LR) * (W // WR)
    STASH_C: gl.constexpr = SR > 1 and not BLOCKED
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    # 1. Which tiles are mine? SR below each other.
    pid = gl.program_id(0)
    high = (row_tiles + SR - 1) // SR
    expert = (pid // (high * col_tiles)).to(gl.int64)
    t, ct = _gluon.tile_order(pid % (high * col_tiles), high, col_tiles, BAND, CBAND)
    t = t * SR
    if ALIGNED:
        scale_ld = scale_ld // 4 * 4
    blocks = 0
    if SR > 1:
        stash = gl.allocate_shared_memory(gl.int32, [SR, 4, BK // 2], shared)
        for i in range(gl.minimum(row_tiles - t, SR)):
            zero = _gluon.hidden_zero(i)
            if GROUPED:
                mine = _gluon.group_blocks(offs_ptr, padded_ptr, t + i, G, M, (pid == 0) & (i == 0), BLOCKED, G_POW2, W)
            else:
                mine = 0
            _tile(
                q_ptr, s_ptr, x_ptr, stash.index(i), mine, t + i, ct, expert, M, K8 + zero, MO + zero, ld8 + zero,
                batch8, scale_ld, sf_row_tiles, sf_slots, STASH_C, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW,
                LR, WR, W, LOAD, EVICT, STORE,
            )  # fmt: skip
        col = ct * BK
        s_tile = s_ptr + ((expert * (K8 * 8) + col) * scale_ld + t * 4)
        _gluon.flush_cols(s_tile, stash, scale_ld - t * 4, K8 * 8 - col, scale_ld, ALIGNED, SR, BK // 2, W)
    else:
        if GROUPED:
            blocks = _gluon.group_blocks(offs_ptr, padded_ptr, t, G, M, pid == 0, BLOCKED, G_POW2, W)
        _tile(
            q_ptr, s_ptr, x_ptr, 0, blocks, t, ct, expert, M, K8, MO, ld8, batch8, scale_ld, sf_row_tiles, sf_slots,
            STASH_C, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, LOAD, EVICT, STORE,
        )  # fmt: skip


def supported(
    x: Tensor,
    offs: Tensor | None,
    blocked: bool,
    elem_dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
) -> bool:
    """Whether :func:`quantize_colwise` of this module takes ``x``. Sizes, strides, dtypes and alignment only."""
    del blocked, elem_dtype  # every one of them
    return _gluon.supported_input(x, offs, capability)


def quantize_colwise(
    x: Tensor,
    offs: Tensor | None,
    blocked: bool,
    elem_dtype: torch.dtype,
    scale_mode: str,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch. ``supported`` must hold; for the contract see ``mxmoe.kernels.quantize_colwise``."""
    config = config or (CONFIG_BLOCKED if blocked else CONFIG)
    if blocked:
        config = config._replace(SR=1)  # blocked scale bytes lie together anyway
    *experts, m, k = x.shape
    g = 0 if offs is None else offs.numel()
    qshape, sshape = shapes.colwise(x.shape) if offs is None else shapes.colwise_groups(m, k, g)
    mo = qshape[-2]
    q = torch.empty_strided(qshape, shapes.column_major(qshape), dtype=torch.uint8, device=x.device)
    if blocked:
        scale = x.new_empty(shapes.colwise_blocked_scale(x.shape, None if offs is None else g), dtype=torch.uint8)
    else:
        scale = torch.empty_strided(sshape, shapes.column_major(sshape), dtype=torch.uint8, device=x.device)
    padded = x.new_empty(g, dtype=torch.int32)
    row_tiles = _gluon.row_tile_count(m, offs)
    col_tiles = shapes.cdiv(shapes.round_up(k, _gluon.TILE_ROWS) if blocked else k, config.cols)
    sf_row_tiles = shapes.cdiv(k, _gluon.TILE_ROWS)
    sf_slots = scale.shape[-1] // 4 if blocked and offs is not None else shapes.cdiv(mo, _gluon.TILE_ROWS)
    programs = (experts[0] if experts else 1) * shapes.cdiv(row_tiles, config.SR)
    programs *= col_tiles
    _quantize_colwise_kernel[(programs,)](
        q,
        scale,
        padded,
        x,
        offs,
        m,
        k // 8,
        mo,
        g,
        x.stride(-2) // 8,
        x.stride(0) // 8 if experts else 0,
        shapes.cdiv(mo, BLOCK),
        row_tiles,
        col_tiles,
        sf_row_tiles,
        sf_slots,
        ALIGNED=shapes.cdiv(mo, BLOCK) % 4 == 0,
        GROUPED=offs is not None,
        G_POW2=_gluon.group_slots(offs),
        BLOCKED=blocked,
        FP16=x.dtype == torch.float16,
        num_warps=config.W,
        **_gluon.constants(elem_dtype, scale_mode),
        **config._asdict(),
    )
    return q.view(elem_dtype), scale, padded
