"""Expand column-major values in Gluon: the fast path of ``dequantize`` on sm_90 and later, bit-equal to it.

        qdata, column-major                scale, column-major             out (M, K), row-major
       K                                    K                                     K columns
     +------+------+- ... Mp              +----+----+- ... Mp/32               +-----+-----+ ...
     | tile': 128 bytes of a column are   |  4 bytes of a column per tile  128 |tile |tile |
     | one line, read at once             |                     ---->     rows |     |     |
     +------+                             +----+                               +-----+-----+
    A tile is four blocks of 32 padded rows, of any groups: each block has its own first row in the result. A thread
    owns 16 rows x 8 columns: it reads 16 bytes of 8 columns and writes 16 bytes of 16 rows, nothing passes through
    shared memory.

Grid     (batch * row tiles * column tiles / SC,), in bands of column tiles (``_gluon.tile_order``). Row tiles are an
         upper bound known without reading offs. Padding rows are dropped; behind the last group the blocks walk the
         rows of no group, which become zero.
Writes   every element of the result once.
Traffic  1 + 1/32 bytes read, 2 written per element.
Index    int64 up to the tile, int32 inside it (``supported`` bounds the strides).
Source   ``_gluon.py`` for the ownership of a tile; ``docs/numerics.md``; PTX ISA, ``cvt``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxmoe import shapes
from mxmoe.kernels import _gluon
from mxmoe.kernels._gluon import Config
from mxmoe.kernels.fake_quantize import row_major_output

# H200, 2026-12-01, share of a copy, (131072, 7168) with 0, 1, 128 groups | (16384, 5120) with 0, 1, 8, 128:
#     this form, bands over all columns     0.852 0.840 0.873 | 0.887 0.885 0.847 0.845
#     bands of one column tile              0.814 0.817 0.807 | 0.842 0.841 0.817 0.806
#     the plain form                        0.883 0.839 0.814 | 0.900 0.877 0.850 0.594
# Eight warps, 80 registers, two column tiles a program, evict_first: less. So groups come here, and what has none stays
# with the plain form.
CONFIG = Config(CBAND=65536)


@gluon.constexpr_function
def _expand_asm(e5m2, fp16):
    """Four bytes of a column ($4) and of the next ($5), their fp32 scales ($6, $7) -> one word of each row ($0..$3).

    fp8 -> fp16 -> fp32 and the product are exact (it may be subnormal); one rounding to the result follows.
    """
    widen = "cvt.rn.f16x2.e5m2x2" if e5m2 else "cvt.rn.f16x2.e4m3x2"
    narrow = "cvt.rn.f16x2.f32" if fp16 else "cvt.rn.bf16x2.f32"
    text = "{ .reg .b32 p<2>, f<4>; .reg .f32 l, h; .reg .b16 b<4>, s0, s1;"
    text += "prmt.b32 p0, $4, $5, 0x5140; prmt.b32 p1, $4, $5, 0x7362; mov.b32 {b0, b1}, p0; mov.b32 {b2, b3}, p1;"
    for i in range(4):
        text += f"{widen} f{i}, b{i}; mov.b32 {{s0, s1}}, f{i}; cvt.f32.f16 l, s0; cvt.f32.f16 h, s1;"
        text += f"mul.f32 l, l, $6; mul.f32 h, h, $7; {narrow} ${i}, h, l;"
    return text + "}"


@gluon.jit
def _expand(even, odd, scale_even, scale_odd, E5M2: gl.constexpr, FP16: gl.constexpr):
    """Words of four bytes of the even and the odd columns -> words of two values, rows 4r .. 4r+3."""
    return gl.inline_asm_elementwise(
        _expand_asm(E5M2, FP16),
        "=r,=r,=r,=r,r,r,f,f",
        [even, odd, scale_even, scale_odd],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scale_value(byte):
    """2**(byte - 127) as fp32: byte 0 is the subnormal 2**-127, byte 255 is NaN."""
    bits = gl.maximum(byte.to(gl.int32) << 23, 0x00400000)
    return gl.where(bits == 0x7F800000, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _move_tile(
    out_ptr, q_ptr, s_ptr, down, live, owed, cols, ldq16, lds, ldo8, MASKED: gl.constexpr, GROUPED: gl.constexpr,
    E5M2: gl.constexpr, FP16: gl.constexpr, TR: gl.constexpr, TW: gl.constexpr, LR: gl.constexpr, WR: gl.constexpr,
    W: gl.constexpr, LOAD: gl.constexpr, EVICT: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Load, expand and store one tile. Pointers at its first element; ``ldq16``, ``ldo8``: strides in 16 bytes."""
    R4: gl.constexpr = TR * LR * WR
    KW: gl.constexpr = TW * (32 // LR) * (W // WR)
    L: gl.constexpr = _gluon.words_layout(TR, TW, LR, WR, W)
    L3: gl.constexpr = _gluon.row_blocks_layout(TR, TW, LR, WR, W)
    LD: gl.constexpr = _gluon.down_layout(TR, TW, LR, WR, W)
    LS: gl.constexpr = gl.SliceLayout(1, L3)

    # 3. Load. Whole blocks of 32 rows are read (without groups whole vectors of 16): the padding is there.
    b = gl.arange(0, R4 // 8, layout=gl.SliceLayout(1, LS))[:, None]
    cs = gl.arange(0, KW, layout=gl.SliceLayout(0, LS))[None, :]
    at_s = s_ptr + (cs * (2 * lds) + b)
    r4 = gl.arange(0, R4, layout=gl.SliceLayout(1, LD))[:, None]
    c = gl.arange(0, KW, layout=gl.SliceLayout(0, LD))[None, :]
    at_q = q_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (c * (ldq16 * 8) + r4)
    if MASKED:
        inside = 2 * c < cols
        inside_s = 2 * cs < cols
        if GROUPED:
            inside = inside & (_gluon.of_block(r4 // 8, live[0], live[1], live[2], live[3]) > 0)
            inside_s = inside_s & (_gluon.of_block(b, live[0], live[1], live[2], live[3]) > 0)
        else:
            inside = inside & (r4 < live // 16 * 4)
            inside_s = inside_s & (b * 32 < live)
        even = gl.load(at_q, mask=inside, other=0, cache_modifier=LOAD, eviction_policy=EVICT)
        odd = gl.load(at_q + ldq16 * 4, mask=inside, other=0, cache_modifier=LOAD, eviction_policy=EVICT)
        byte_even = gl.load(at_s, mask=inside_s, other=0)
        byte_odd = gl.load(at_s + lds, mask=inside_s, other=0)
    else:
        even = gl.load(at_q, cache_modifier=LOAD, eviction_policy=EVICT)
        odd = gl.load(at_q + ldq16 * 4, cache_modifier=LOAD, eviction_policy=EVICT)
        byte_even = gl.load(at_s)
        byte_odd = gl.load(at_s + lds)

    # 4. Expand, store.
    y0, y1, y2, y3 = _expand(
        gl.convert_layout(even.reshape([R4 // 8, 8, KW]), L3),
        gl.convert_layout(odd.reshape([R4 // 8, 8, KW]), L3),
        gl.expand_dims(_scale_value(byte_even), 1),
        gl.expand_dims(_scale_value(byte_odd), 1),
        E5M2,
        FP16,
    )
    r4 = gl.arange(0, R4, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, KW, layout=gl.SliceLayout(0, L))[None, :]
    row, left = _gluon.source_rows(r4, down, owed, GROUPED)
    at = out_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (row * (ldo8 * 4) + c)
    step = ldo8 * 4
    inside = c < cols // 8 * 4  # the compiler sees that a vector is in or out
    _store_row(at, y0, (left > 0) & inside, MASKED, R4, KW, L, STORE)
    _store_row(at + step, y1, (left > 1) & inside, MASKED, R4, KW, L, STORE)
    _store_row(at + step * 2, y2, (left > 2) & inside, MASKED, R4, KW, L, STORE)
    _store_row(at + step * 3, y3, (left > 3) & inside, MASKED, R4, KW, L, STORE)


@gluon.jit
def _store_row(
    at, y, keep, MASKED: gl.constexpr, R4: gl.constexpr, KW: gl.constexpr, L: gl.constexpr, STORE: gl.constexpr
):
    y = gl.convert_layout(y.reshape([R4, KW]), L, assert_trivial=True)
    if MASKED:
        gl.store(at, y, mask=keep, cache_modifier=STORE)
    else:
        gl.store(at, y, cache_modifier=STORE)


@gluon.jit(
    do_not_specialize=[
        "M", "K8", "MP", "G", "ldq16", "batchq16", "lds", "batchs", "ldo8", "batcho8", "row_tiles", "col_tiles",
    ]
)  # fmt: skip
def _dequantize_kernel(
    out_ptr,  # (batch, M, K) bf16 or fp16, last stride 1
    q_ptr,  # (batch, MP, K) uint8, stride of the rows 1
    s_ptr,  # (batch, ceil(MP/32), K) uint8, stride of the blocks 1
    offs_ptr,  # (G,) int32, group ends in M
    M,
    K8,  # K / 8
    MP,  # rows of qdata: M, or padded; a multiple of 16
    G,
    ldq16,  # column stride of qdata / 16
    batchq16,
    lds,  # column stride of scale
    batchs,
    ldo8,  # row stride of the result / 8
    batcho8,
    row_tiles,  # tiles of 128 rows
    col_tiles,  # tiles of the configuration's columns
    GROUPED: gl.constexpr,
    G_POW2: gl.constexpr,
    E5M2: gl.constexpr,
    FP16: gl.constexpr,
    TR: gl.constexpr,
    TW: gl.constexpr,
    LR: gl.constexpr,
    WR: gl.constexpr,
    W: gl.constexpr,
    SR: gl.constexpr,  # of no use here
    SC: gl.constexpr,  # column tiles of a program, for one search of its groups
    BAND: gl.constexpr,
    CBAND: gl.constexpr,
    LOAD: gl.constexpr,
    EVICT: gl.constexpr,
    STORE: gl.constexpr,
):
    # 1. Which tiles are mine?
    BK: gl.constexpr = 2 * TW * (32 // LR) * (W // WR)
    pid = gl.program_id(0)
    wide = (col_tiles + SC - 1) // SC
    batch = (pid // (row_tiles * wide)).to(gl.int64)
    t, ct = _gluon.tile_order(pid % (row_tiles * wide), row_tiles, wide, BAND, CBAND)
    ct = ct * SC

    # 2. Coordinates: rows of the result, which of them have values, columns.
    if GROUPED:
        row, down, live, owed, _ = _gluon.group_blocks(offs_ptr, offs_ptr, t, G, M, False, False, G_POW2, W)
        some = owed[0] > 0  # blocks behind the rows of no group have none
        full = _gluon.all_equal(live, 32)
    else:
        row = t * 128
        down = 0
        live = gl.minimum(MP - row, 128)
        owed = live
        some = True
        full = live == 128
    if some:
        for j in range(gl.minimum(col_tiles - ct, SC)):
            col = (ct + j) * BK
            cols = K8 * 8 - col
            out_tile = out_ptr + ((batch * batcho8 + row.to(gl.int64) * ldo8) * 8 + col)
            q_tile = q_ptr + ((batch * batchq16 + col * ldq16.to(gl.int64)) * 16 + t * 128)
            s_tile = s_ptr + (batch * batchs + col * lds.to(gl.int64) + t * 4)
            if full & (cols >= BK):
                _move_tile(
                    out_tile, q_tile, s_tile, down, live, owed, BK, ldq16, lds, ldo8, False, GROUPED, E5M2, FP16, TR,
                    TW, LR, WR, W, LOAD, EVICT, STORE,
                )  # fmt: skip
            else:
                _move_tile(
                    out_tile, q_tile, s_tile, down, live, owed, cols, ldq16, lds, ldo8, True, GROUPED, E5M2, FP16, TR,
                    TW, LR, WR, W, LOAD, EVICT, STORE,
                )  # fmt: skip


def supported(
    qdata: Tensor,
    scale: Tensor,
    block: str,
    source_offs: Tensor | None,
    rows: int,
    out_dtype: torch.dtype,
    row_stride: int | None = None,
    capability: tuple[int, int] | None = None,
) -> bool:
    """Whether :func:`dequantize` of this module takes them. Sizes, strides, dtypes and alignment only.

    ``rows``: of the result, with groups. ``capability``: of the device, None: not asked here.
    """
    if capability is not None and capability[0] < _gluon.MIN_CAPABILITY:
        return False
    if block != "colwise" or qdata.ndim not in (2, 3) or out_dtype not in (torch.bfloat16, torch.float16):
        return False
    mp, k = qdata.shape[-2:]
    m = mp if source_offs is None else rows
    if qdata.numel() == 0 or m == 0 or mp % _gluon.LOAD_BYTES:
        return False
    if qdata.stride(-2) != 1 or any(s % _gluon.LOAD_BYTES or s < 0 for s in (*qdata.stride()[:-2], qdata.stride(-1))):
        return False
    if qdata.data_ptr() % _gluon.LOAD_BYTES or (scale.stride(-2) != 1 and scale.shape[-2] > 1):
        return False
    ldo = k if row_stride is None else row_stride
    if k % 8 or ldo % 8:
        return False
    if source_offs is not None:
        groups = source_offs.numel()
        if qdata.ndim != 2 or not 0 < groups <= _gluon.MAX_GROUPS or not source_offs.is_contiguous():
            return False
        if mp < shapes.padded_rows(rows, groups):  # whatever offs say, blocks lie inside qdata
            return False
    # Inside a tile, offsets are int32: 128 rows of the result, 256 columns of qdata and scale.
    reach = max(128 * ldo, 256 * qdata.stride(-1), 256 * abs(scale.stride(-1)))
    return bool(reach <= _gluon.INT32_MAX and max(m, mp) <= _gluon.INT32_MAX - 2**16)


def dequantize(
    qdata: Tensor,
    scale: Tensor,
    source_offs: Tensor | None,
    rows: int,
    out_dtype: torch.dtype,
    row_stride: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Launch. ``supported`` must hold; for the contract see ``mxmoe.kernels.dequantize``."""
    config = config or CONFIG
    *lead, mp, k = qdata.shape
    m = mp if source_offs is None else rows
    out = row_major_output((*lead, m, k), out_dtype, qdata.device, row_stride)
    row_tiles = _gluon.row_tile_count(m, source_offs)
    col_tiles = shapes.cdiv(k, config.cols)
    batch = lead[0] if lead else 1
    _dequantize_kernel[(batch * row_tiles * shapes.cdiv(col_tiles, config.SC),)](
        out,
        qdata.view(torch.uint8),
        scale,
        source_offs,
        m,
        k // 8,
        mp,
        0 if source_offs is None else source_offs.numel(),
        qdata.stride(-1) // 16,
        qdata.stride(0) // 16 if lead else 0,
        scale.stride(-1),
        scale.stride(0) if lead else 0,
        out.stride(-2) // 8,
        out.stride(0) // 8 if lead else 0,
        row_tiles,
        col_tiles,
        GROUPED=source_offs is not None,
        G_POW2=_gluon.group_slots(source_offs),
        E5M2=qdata.dtype == torch.float8_e5m2,
        FP16=out_dtype == torch.float16,
        num_warps=config.W,
        **config._asdict(),
    )
    return out
