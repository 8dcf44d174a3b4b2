"""Both quantizations from one read, in Gluon: the fast path of ``quantize_both`` on sm_90 and later, bit-equal to it.

                                    rowwise (M, K) row-major: 32 or more bytes of a row at once
          K columns         ---->   scale (M, K/32): 4 bytes of a row per tile of 128 columns
        +-----+-----+ ...
    128 |tile |tile |       in registers: a rowwise block lies in 4 neighbouring lanes (two shuffles for two rows),
   rows |     |     |       a colwise block in 2 lanes or 1
        +-----+-----+ ...
                            ---->   colwise (Mp, K) column-major: 128 bytes of a column are one line
                                    scale (Mp/32, K) column-major: 4 bytes of a column per tile
    A tile is four blocks of 32 rows of the colwise result, of any groups: each block has its own first row in x.

Grid     (experts * row tiles * column tiles,), in bands of column tiles (``tile_order``). Row tiles are an upper bound
         known without reading offs. Programs behind the last group write the rows of no group: zeros, in both results.
Writes   every byte of every output once: buffers may come from torch.empty.
Traffic  2 bytes read, 2 * (1 + 1/32) written per element.
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
from mxmoe.kernels.blocked_experts import from_blocked

# 128 registers: four programs on an SM at once, nothing spilled. Bands over all columns keep the rowwise scale bytes
# of a row together: 3 % faster than bands of 8 tiles, 15 % than bands of 4 (sectors of 32 bytes go to memory in parts).
CONFIG = Config(LR=4, WR=2, CBAND=65536, maxnreg=128)
# The rowwise half alone. H200, 2026-12-01, share of a copy, (131072, 7168) with 1, 128 groups | (16384, 5120) with 1,
# 8, 128: 0.993 0.980 | 0.946 0.923 0.858; four warps 1.000 0.985 | 0.962 0.942 0.800; bands of one column tile 0.871
# 0.867 | 0.910 0.891 0.848; the plain form 0.995 0.963 | 0.946 0.934 0.746.
CONFIG_ROWS = Config(LR=4, WR=2, W=2, CBAND=65536, maxnreg=96)

PLAIN_BY_WAY_OF_BLOCKED = 1 << 24
"""Elements of a matrix from which plain scales are written blocked first and put in order by a second launch.

Stored directly, 4 bytes at a time, they cost 13 %: 1157 us against 1021 at (131072, 7168) on an H200, 2026-11-30;
walking eight tiles to store whole sectors gave 1141. Scales are a 32nd of the data: the second launch is cheap."""


@gluon.jit
def _tile(
    qr_ptr, sr_ptr, q_ptr, s_ptr, x_ptr, stash_c, stash_r, blocks, t, ct, expert, M, K8, MO, ld8, batch8, scale_ld,
    scale_k, sf_row_tiles, sf_slots, COLS: gl.constexpr, STASH_C: gl.constexpr, STASH_R: gl.constexpr,
    GROUPED: gl.constexpr, BLOCKED: gl.constexpr, EMAX: gl.constexpr, THRESH: gl.constexpr, E5M2: gl.constexpr,
    FP16: gl.constexpr, TR: gl.constexpr, TW: gl.constexpr, LR: gl.constexpr, WR: gl.constexpr, W: gl.constexpr,
    LOAD: gl.constexpr, EVICT: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """One tile of 128 rows. ``blocks``: what ``group_blocks`` says about it, in groups."""
    # 2. Coordinates: source rows, rows of the result, columns.
    BK: gl.constexpr = 2 * TW * (32 // LR) * (W // WR)
    out_row = t * 128
    out_rows = gl.minimum(gl.maximum(MO - out_row, 0), 128)
    if GROUPED:
        row, down, live, owed, search = blocks
        full = _gluon.all_equal(live, 32)
    else:
        row = out_row
        down = 0
        live = out_rows
        owed = out_rows
        search = 0
        full = True
    col = ct * BK
    cols = K8 * 8 - col
    x_tile = x_ptr + ((expert * batch8 + row.to(gl.int64) * ld8) * 8 + col)
    q_tile = q_ptr + ((expert * (K8 * 8) + col) * MO.to(gl.int64) // 16 * 16 + out_row)
    qr_tile = qr_ptr + ((expert * M + row) * (K8 * 8).to(gl.int64) + col)
    if BLOCKED:
        s_tile = s_ptr
        sr_tile = sr_ptr
        if not GROUPED:
            s_tile += (expert * (sf_row_tiles * sf_slots) + t) * 512
            sr_tile += (expert * sf_slots + t) * sf_row_tiles * 512
    else:
        s_tile = s_ptr + ((expert * (K8 * 8) + col) * scale_ld + out_row // 32)
        sr_tile = sr_ptr + ((expert * M + row) * scale_k + ct * (BK // 32))

    # 3. and 4. Load (rows and columns outside are 0), quantize, store. The loads are under way while the search for the
    # places of blocked scales goes on. Rows first: 122 registers, columns first 174.
    if full & (out_rows == 128) & (cols >= BK):
        w0, w1, w2, w3 = _gluon.load_words(
            x_tile, down, live, BK // 2, ld8, False, GROUPED, TR, TW, LR, WR, W, LOAD, EVICT
        )
        place, used_tiles = _gluon.places(t, search, GROUPED and BLOCKED)
        _gluon.store_rows(
            qr_tile, sr_tile, stash_r, w0, w1, w2, w3, K8, down, owed, col, BK, scale_k, place, sf_row_tiles,
            False, STASH_R, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, STORE,
        )  # fmt: skip
        if COLS:
            _gluon.store_cols(
                q_tile, s_tile, stash_c, w0, w1, w2, w3, MO // 16, 8, col, BK, scale_ld, place, sf_row_tiles,
                sf_slots, False, STASH_C, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, STORE,
            )  # fmt: skip
    else:
        w0, w1, w2, w3 = _gluon.load_words(
            x_tile, down, live, K8 * 4 - col // 2, ld8, True, GROUPED, TR, TW, LR, WR, W, LOAD, EVICT
        )
        place, used_tiles = _gluon.places(t, search, GROUPED and BLOCKED)
        _gluon.store_rows(
            qr_tile, sr_tile, stash_r, w0, w1, w2, w3, K8, down, owed, col, cols, scale_k, place, sf_row_tiles,
            True, STASH_R, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, STORE,
        )  # fmt: skip
        if COLS:
            _gluon.store_cols(
                q_tile, s_tile, stash_c, w0, w1, w2, w3, MO // 16, out_rows // 16, col, cols, scale_ld, place,
                sf_row_tiles, sf_slots, True, STASH_C, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W,
                STORE,
            )  # fmt: skip
    if GROUPED and BLOCKED:
        zero_from = used_tiles * sf_row_tiles
        zero_to = sf_slots * sf_row_tiles
        _gluon.zero_missing_rows(sr_ptr, place, sf_row_tiles, col, BK // 32, W)
        _gluon.zero_tiles(sr_ptr, zero_from, zero_to, W)
        if COLS:
            _gluon.zero_missing_cols(s_ptr, place, sf_row_tiles, col, BK, W)
            _gluon.zero_tiles(s_ptr, zero_from, zero_to, W)


@gluon.jit(
    do_not_specialize=[
        "M", "K8", "MO", "G", "ld8", "batch8", "scale_ld", "row_tiles", "col_tiles", "sf_row_tiles", "sf_slots",
    ]
)  # fmt: skip
def _quantize_both_kernel(
    qr_ptr,  # (experts, M, K) uint8
    sr_ptr,  # plain: (experts, M, ceil(K/32)) uint8; blocked: 512-byte tiles
    q_ptr,  # (experts, K, MO) uint8, colwise qdata transposed
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
    COLS: gl.constexpr,  # False: the rowwise result only
    GROUPED: gl.constexpr,
    G_POW2: gl.constexpr,
    BLOCKED: gl.constexpr,
    K128: gl.constexpr,  # K % 128 == 0
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
    SC: gl.constexpr,
    BAND: gl.constexpr,
    CBAND: gl.constexpr,
    LOAD: gl.constexpr,
    EVICT: gl.constexpr,
    STORE: gl.constexpr,
):
    BK: gl.constexpr = 2 * TW * (32 // LR) * (W // WR)
    STASH_C: gl.constexpr = SR > 1 and not BLOCKED
    STASH_R: gl.constexpr = SC > 1 and not BLOCKED
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    # 1. Which tiles are mine? SR below each other or SC side by side.
    pid = gl.program_id(0)
    high = (row_tiles + SR - 1) // SR
    wide = (col_tiles + SC - 1) // SC
    expert = (pid // (high * wide)).to(gl.int64)
    t, ct = _gluon.tile_order(pid % (high * wide), high, wide, BAND, CBAND)
    t = t * SR
    ct = ct * SC
    if ALIGNED:
        scale_ld = scale_ld // 4 * 4
    if K128:  # the compiler then sees that four scale bytes of a row are one aligned word
        scale_k = K8 // 16 * 4
    else:
        scale_k = (K8 + 3) // 4
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
                qr_ptr, sr_ptr, q_ptr, s_ptr, x_ptr, stash.index(i), 0, mine, t + i, ct, expert, M, K8 + zero,
                MO + zero, ld8 + zero, batch8, scale_ld, scale_k, sf_row_tiles, sf_slots, COLS, STASH_C, STASH_R,
                GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, LOAD, EVICT, STORE,
            )  # fmt: skip
        col = ct * BK
        s_tile = s_ptr + ((expert * (K8 * 8) + col) * scale_ld + t * 4)
        _gluon.flush_cols(s_tile, stash, scale_ld - t * 4, K8 * 8 - col, scale_ld, ALIGNED, SR, BK // 2, W)
    else:
        if GROUPED:
            if COLS:
                blocks = _gluon.group_blocks(offs_ptr, padded_ptr, t, G, M, pid == 0, BLOCKED, G_POW2, W)
            else:
                blocks = _gluon.group_blocks(offs_ptr, padded_ptr, t, G, M, False, BLOCKED, G_POW2, W)
        if SC > 1:
            stash = gl.allocate_shared_memory(gl.int32, [SC, 32, BK // 32], shared)
            for j in range(gl.minimum(col_tiles - ct, SC)):
                zero = _gluon.hidden_zero(j)
                _tile(
                    qr_ptr, sr_ptr, q_ptr, s_ptr, x_ptr, 0, stash.index(j), blocks, t, ct + j, expert, M, K8 + zero,
                    MO + zero, ld8 + zero, batch8, scale_ld, scale_k, sf_row_tiles, sf_slots, COLS, STASH_C, STASH_R,
                    GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16, TR, TW, LR, WR, W, LOAD, EVICT, STORE,
                )  # fmt: skip
            if STASH_R:
                if GROUPED:
                    row, down, _, owed, _ = blocks
                else:
                    row = t * 128
                    down = 0
                    owed = gl.minimum(M - row, 128)
                first = ct * (BK // 32)
                sr_tile = sr_ptr + ((expert * M + row) * scale_k + first)
                _gluon.flush_rows(sr_tile, stash, down, owed, scale_k - first, scale_k, GROUPED, SC, 32, BK // 32, W)
        else:
            _tile(
                qr_ptr, sr_ptr, q_ptr, s_ptr, x_ptr, 0, 0, blocks, t, ct, expert, M, K8, MO, ld8, batch8, scale_ld,
                scale_k, sf_row_tiles, sf_slots, COLS, STASH_C, STASH_R, GROUPED, BLOCKED, EMAX, THRESH, E5M2, FP16,
                TR, TW, LR, WR, W, LOAD, EVICT, STORE,
            )  # fmt: skip


def supported(
    x: Tensor,
    offs: Tensor | None,
    blocked: bool,
    elem_dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
) -> bool:
    """Whether :func:`quantize_both` of this module takes ``x``. Sizes, strides, dtypes and alignment only."""
    del blocked, elem_dtype  # every one of them
    return _gluon.supported_input(x, offs, capability)


def quantize_both(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str, config: Config = CONFIG
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch. ``supported`` must hold; for the contract see ``mxmoe.kernels.quantize_both``."""
    *experts, m, k = x.shape
    if not blocked and offs is None and x.ndim == 2 and x.numel() >= PLAIN_BY_WAY_OF_BLOCKED:
        q_row, s_row, q_col, s_col, padded = quantize_both(x, None, True, elem_dtype, scale_mode, config)
        s_row = from_blocked(s_row, m, shapes.cdiv(k, BLOCK))
        return q_row, s_row, q_col, from_blocked(s_col, k, shapes.cdiv(m, BLOCK)).mT, padded
    return _launch(x, offs, blocked, elem_dtype, scale_mode, config, True)


def quantize_rowwise(
    x: Tensor,
    offs: Tensor | None,
    blocked: bool,
    elem_dtype: torch.dtype,
    scale_mode: str,
    config: Config = CONFIG_ROWS,
) -> tuple[Tensor, Tensor]:
    """Launch of the rowwise half; for the contract see ``mxmoe.kernels.quantize_rowwise``."""
    q_row, s_row, *_ = _launch(x, offs, blocked, elem_dtype, scale_mode, config, False)
    return q_row, s_row


def _launch(
    x: Tensor,
    offs: Tensor | None,
    blocked: bool,
    elem_dtype: torch.dtype,
    scale_mode: str,
    config: Config,
    cols: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``cols`` False: the last three results are empty."""
    *experts, m, k = x.shape
    if blocked:
        config = config._replace(SR=1)  # blocked scale bytes lie together anyway
    g = 0 if offs is None else offs.numel()
    groups = None if offs is None else g
    qr_shape, sr_shape = shapes.rowwise(x.shape)
    qc_shape, sc_shape = shapes.colwise(x.shape) if offs is None else shapes.colwise_groups(m, k, g)
    mo = qc_shape[-2]
    sc_strides = shapes.column_major(sc_shape)
    if blocked:
        sr_shape = shapes.rowwise_blocked_scale(x.shape, groups)
        sc_shape = shapes.colwise_blocked_scale(x.shape, groups)
        sc_strides = shapes.row_major(sc_shape)
    slots = sc_shape[-1] // 4
    if not cols:
        qc_shape, sc_shape, sc_strides = (0, 0), (0, 0), (1, 1)
    q_row = x.new_empty(qr_shape, dtype=torch.uint8)
    s_row = x.new_empty(sr_shape, dtype=torch.uint8)
    q_col = torch.empty_strided(qc_shape, shapes.column_major(qc_shape), dtype=torch.uint8, device=x.device)
    s_col = torch.empty_strided(sc_shape, sc_strides, dtype=torch.uint8, device=x.device)
    padded = x.new_empty(g if cols else 0, dtype=torch.int32)
    row_tiles = _gluon.row_tile_count(m, offs)
    col_tiles = shapes.cdiv(shapes.round_up(k, _gluon.TILE_ROWS) if blocked else k, config.cols)
    sf_row_tiles = shapes.cdiv(k, _gluon.TILE_ROWS)
    sf_slots = slots if blocked and offs is not None else shapes.cdiv(mo, _gluon.TILE_ROWS)
    programs = (experts[0] if experts else 1) * shapes.cdiv(row_tiles, config.SR)
    programs *= shapes.cdiv(col_tiles, config.SC)
    _quantize_both_kernel[(programs,)](
        q_row,
        s_row,
        q_col,
        s_col,
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
        COLS=cols,
        GROUPED=offs is not None,
        G_POW2=_gluon.group_slots(offs),
        BLOCKED=blocked,
        K128=k % 128 == 0,
        FP16=x.dtype == torch.float16,
        num_warps=config.W,
        **_gluon.constants(elem_dtype, scale_mode),
        **config._asdict(),
    )
    return q_row.view(elem_dtype), s_row, q_col.view(elem_dtype), s_col, padded
