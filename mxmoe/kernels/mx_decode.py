"""Grouped GEMM of few tokens per group against MXFP8 weights: the decode path of chips without MXFP8 tensor cores.

    weights of group g (N, K) e4m3          tokens of group g            out (M, N)
          K                                   (BT, K) 16 bit
      +--------------+                        +------------+             +------+
      | BN x BK tile | 1 byte per element  x  | BT x BK    |.T  ---->    | BT   | rows of g, columns of the tile
      |   -> fp16    | expanded in registers  +------------+             +------+
      +--------------+
      first operand of the mma: from shared memory straight into its registers, never written back

Weights are expanded to fp16 where that is exact, else to bf16; a program decides for its own tile, from facts that are
on the device. Exact in fp16: q * 2**e with e = byte - top + E_HI, where ``top`` is the largest scale byte of the weight
row among its non-zero blocks and every other one lies at most E_HI - E_LO below (``pack_weight`` finds out once, when
the weights are loaded; a row that spans more says so, and its tile is expanded to bf16). Tokens likewise: ``_rows_kernel``
multiplies each by the power of two that brings its largest value to 2**15, and marks a token that does not come back
unchanged. The epilogue puts both powers back. Products are the same numbers either way, and so are their sums: fp16 and
bf16 differ by powers of two.

Grid     (N tiles, G, splits of K). A group without tokens costs one load. Groups with more than BT tokens loop.
Writes   every element of out once: rows beyond offs[-1] are zeros (``_rows_kernel``); split partial sums are added in a
         fixed order by ``_sum_splits_kernel``. No atomics: two runs are bit-equal.
Traffic  1 + 1/32 bytes per weight, once per BT tokens; tokens from L2, BT/BN of the weights' elements.
Index    int64 for group, row and token bases; 32 bit inside one row.
Source   ``docs/serving.md``; ``docs/numerics.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ..formats import E4M3, elem_format
from ._e8m0 import scale_byte, scale_value, to_elem
from ._groups import last_end

WINDOW = {
    ("fp16", torch.float8_e4m3fn): (-15, 7),
    ("fp16", torch.float8_e5m2): (-8, 0),
    ("bf16", torch.float8_e4m3fn): (3, 112),
}
"""Powers of two that leave every element of a dtype exact: 2**-9 * 2**-15 is the smallest fp16, 448 * 2**7 < 65504."""
INEXACT = tl.constexpr(1 << 20)
"""Exponent of a token that has no exact fp16 form."""


# --- order of the contraction ----------------------------------------------------------------------------------------
# wgmma takes its first operand from registers as pairs (2t, 2t + 1) and (2t + 8, 2t + 9) of 16 columns per thread t. In
# fp8 those are two pieces of two bytes, too small for ldmatrix. The order of a contraction is free, so thread t takes
# bytes 4t .. 4t + 3 instead, and the tokens are stored in the order that this makes of the columns:
#     column   0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
#     place    0  1  8  9 |  2  3 10 11 |  4  5 12 13 |  6  7 14 15
@triton.jit
def permuted(c):
    """Place of column ``c`` among the 16 it belongs to."""
    return (c // 16) * 16 + (c // 2) % 2 * 8 + (c // 4) % 4 * 2 + c % 2


@triton.jit
def permute_tile(q, BN: tl.constexpr, BK: tl.constexpr):
    """Columns of a weight tile in the order of ``permuted``: a renaming of registers."""
    return tl.reshape(tl.permute(tl.reshape(q, (BN, BK // 16, 4, 2, 2)), (0, 1, 3, 2, 4)), (BN, BK))


# --- tokens ----------------------------------------------------------------------------------------------------------
@triton.jit
def _token_values(x_ptr, s_ptr, at, cols, K, BLOCK: tl.constexpr, IN: tl.constexpr, EMAX, THRESH, FMAX, E5M2):
    """A piece of one token as fp32: as it is, rounded to MXFP8, or expanded from MXFP8."""
    x = tl.load(x_ptr + at + cols, mask=cols < K, other=0.0)
    if IN == "values":
        return x.to(tl.bfloat16).to(tl.float32)  # activations="bf16" is what it says for fp16 and fp32 tokens too
    else:
        x = tl.reshape(x.to(tl.float32), (BLOCK // 32, 32))
        if IN == "quantize":
            byte = scale_byte(tl.max(tl.abs(x), 1), EMAX, THRESH)
            # NaN loses against numbers in tl.max: a block with one is found by x != x.
            byte = tl.where(tl.max((x != x).to(tl.int32), 1) != 0, 255, byte)
            inv = ((254 - byte) << 23).to(tl.float32, bitcast=True)
            x = to_elem(x * tl.where(byte == 255, 0.0, inv)[:, None], E5M2, FMAX).to(tl.float32)
        else:
            tl.static_assert(IN == "mx")
            blocks = tl.min(tl.reshape(cols, (BLOCK // 32, 32)), 1) // 32
            byte = tl.load(s_ptr + blocks, mask=blocks * 32 < K, other=0).to(tl.int32)
        return tl.reshape(x * scale_value(byte)[:, None], (BLOCK,))


@triton.jit(do_not_specialize=["M", "G"])
def _rows_kernel(
    x16_ptr,  # (M, K) fp16: token * 2**shift, if FP16
    xb_ptr,  # (M, K) bf16: token, if BF16
    exp_ptr,  # (M,) int32: -shift, or INEXACT; if FP16
    out_ptr,  # (M, N): rows of no group are set to zero
    x_ptr,  # (M, K), or (T, K) with index
    s_ptr,  # (M or T, ceil(K/32)) uint8, if IN is "mx"
    index_ptr,  # (M,) int32 or int64: TOP_K times the row of x, if TOP_K
    offs_ptr,  # (G,) int32
    M,
    N,
    K,
    G,
    stride_xm,
    stride_sm,
    G_POW2: tl.constexpr,
    TOP_K: tl.constexpr,  # 0: row m is row m of x
    IN: tl.constexpr,
    FP16: tl.constexpr,
    PERM: tl.constexpr,  # columns of x16 in the order of ``permuted``
    BF16: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    PDL: tl.constexpr,
    EMAX: tl.constexpr,
    THRESH: tl.constexpr,
    FMAX: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. One program per row. A row of no group is a row of zeros in the result.
    if PDL:
        gdc_launch_dependents()
    m = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if m >= last_end(offs_ptr, G, M, G_POW2):
        if ZERO_TAIL:
            zero = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            for n in range(0, N, BLOCK):
                tl.store(out_ptr + m * N + n + c, zero, mask=n + c < N)
        return
    source = m
    if TOP_K:
        source = (tl.load(index_ptr + m) // TOP_K).to(tl.int64)
    at = source * stride_xm
    s_row = s_ptr + source * stride_sm
    factor = 1.0
    back = 1.0
    shift = 0
    exponent = 0
    if FP16:
        # 2. Largest magnitude, as integer bits: above 0x7F7FFFFF it is Inf or NaN.
        largest = tl.zeros((BLOCK,), tl.int32)
        for k in range(0, K, BLOCK):
            v = _token_values(x_ptr, s_row, at, k + c, K, BLOCK, IN, EMAX, THRESH, FMAX, E5M2)
            largest = tl.maximum(largest, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        exponent = (tl.max(largest, 0) >> 23) - 127
        shift = tl.minimum(tl.maximum(15 - exponent, -112), 120)
        factor = ((shift + 127) << 23).to(tl.float32, bitcast=True)
        back = ((127 - shift) << 23).to(tl.float32, bitcast=True)

    # 3. Round, and see whether it comes back.
    lost = tl.zeros((BLOCK,), tl.int32)
    for k in range(0, K, BLOCK):
        v = _token_values(x_ptr, s_row, at, k + c, K, BLOCK, IN, EMAX, THRESH, FMAX, E5M2)
        if FP16:
            half = (v * factor).to(tl.float16)
            lost = tl.maximum(lost, (half.to(tl.float32) * back != v).to(tl.int32))
            if PERM:
                tl.store(x16_ptr + m * K + k + permuted(c), half, mask=k + c < K)
            else:
                tl.store(x16_ptr + m * K + k + c, half, mask=k + c < K)
        if BF16:
            tl.store(xb_ptr + m * K + k + c, v.to(tl.bfloat16), mask=k + c < K)
    if FP16:
        bad = (tl.max(lost, 0) != 0) | (exponent == 128)
        tl.store(exp_ptr + m, tl.where(bad, INEXACT, -shift))


# --- weights in registers --------------------------------------------------------------------------------------------
# The scale of a tile is loaded as bytes (BN, BK/32) and nothing is computed from arange: then Triton moves the layout of
# the dot operand up to the loads, and a weight goes shared memory -> ldmatrix -> cvt -> mul -> mma. With a shift by
# arange in between, it stays below, and every expanded tile takes a trip through shared memory (519 instructions in the
# loop instead of 352).
_E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 lo, hi, a, b;
    prmt.b32 lo, $2, 0, 0x1404;
    prmt.b32 hi, $2, 0, 0x3424;
    shr.u32 a, lo, 4;
    shr.u32 b, hi, 4;
    and.b32 a, a, 0x07F007F0;
    and.b32 b, b, 0x07F007F0;
    lop3.b32 $0, lo, 0x80008000, a, 0xEA;
    lop3.b32 $1, hi, 0x80008000, b, 0xEA;
}""")


@triton.jit
def _times_scale(q, scale, BN: tl.constexpr, BK: tl.constexpr):
    """``(BN, BK)`` times ``(BN, BK/32)``, each scale on 32 columns."""
    return tl.reshape(tl.reshape(q, (BN, BK // 32, 32)) * scale[:, :, None], (BN, BK))


@triton.jit
def expand_packed(q, byte, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr):
    """Weights of a row that ``pack_weight`` found exact. ``byte``: high byte of an fp16, or exponent of a bf16."""
    if FORM == "fp16":
        return _times_scale(q.to(tl.float16), (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True), BN, BK)
    else:
        # Sign and seven bits of an e4m3, put where a bf16 has them, are its value times 2**-120, subnormals included.
        tl.static_assert(FORM == "bf16")
        small = tl.inline_asm_elementwise(_E4M3_TO_BF16, "=r,=r,r", [q], dtype=tl.bfloat16, is_pure=True, pack=4)
        return _times_scale(small, (byte.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True), BN, BK)


@triton.jit
def expand_any(q, byte, BN: tl.constexpr, BK: tl.constexpr):
    """Any weights, in bf16: e4m3 or e5m2 times 2**(byte - 127); byte 0 is 2**-127, 255 is NaN."""
    b = byte.to(tl.int16)
    bits = tl.where(b == 255, 0x7FC0, tl.where(b == 0, 0x0040, b << 7)).to(tl.int16)
    return _times_scale(q.to(tl.bfloat16), bits.to(tl.bfloat16, bitcast=True), BN, BK)


@triton.jit
def token_range(offs_ptr, g, M, G, G_POW2: tl.constexpr):
    """Start and end of group ``g``, safe for any content of offs (as ``groups.safe_ends``); g = G: the tail's start twice."""
    i = tl.arange(0, G_POW2)
    ends = tl.load(offs_ptr + i, mask=(i <= g) & (i < G), other=0)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    return tl.max(tl.where(i < g, ends, 0), 0), tl.max(ends, 0)


@triton.jit
def load_tile(row_ptr, cols, K, EVEN: tl.constexpr):
    """Weights ``(BN, BK)``: one pointer per row."""
    if EVEN:
        return tl.load(row_ptr[:, None] + cols[None, :])
    else:
        return tl.load(row_ptr[:, None] + cols[None, :], mask=(cols < K)[None, :], other=0.0)


@triton.jit
def load_tokens(row_ptr, cols, tokens, K, EVEN: tl.constexpr):
    """Tokens ``(BK, BT)``: one pointer per token; zeros for those beyond the group, which costs no traffic."""
    if EVEN:
        return tl.load(row_ptr[None, :] + cols[:, None], mask=tokens[None, :], other=0.0)
    else:
        return tl.load(row_ptr[None, :] + cols[:, None], mask=tokens[None, :] & (cols < K)[:, None], other=0.0)


@triton.jit
def multiply_packed(
    q_row,
    p_row,  # packed scales: 4 bytes per row and 128 columns
    x_row,
    q_desc,
    x_desc,
    r0,  # first row of the tile in q_desc
    t0,  # first token of the tile in x_desc
    tokens,
    N,
    K,
    k0,
    k1,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    FORM: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_X: tl.constexpr,
    PERM: tl.constexpr,
):
    """``(BN, BT)`` sums over ``k0 .. k1`` of weights that are exact in FORM."""
    tl.static_assert(BK == 128)
    cols = tl.arange(0, BK)
    b = tl.arange(0, 4)
    acc = tl.zeros((BN, BT), tl.float32)
    for k in range(k0, k1, BK):
        byte = tl.load(p_row[:, None] + ((k // 128) * N * 4 + b)[None, :])
        if TMA_Q:
            q = q_desc.load([r0, k])
        else:
            q = load_tile(q_row, k + cols, K, EVEN)
        if PERM:
            q = permute_tile(q, BN, BK)
        if TMA_X:
            x = x_desc.load([t0, k]).T
        else:
            x = load_tokens(x_row, k + cols, tokens, K, EVEN)
        acc = tl.dot(expand_packed(q, byte, BN, BK, FORM), x, acc)
    return acc


@triton.jit
def multiply_any(
    q_row,
    s_row,  # plain scales: K32 bytes per row
    x_row,
    tokens,
    K,
    k0,
    k1,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``(BN, BT)`` sums over ``k0 .. k1`` in bf16, with the plain scale bytes: right for any weights."""
    cols = tl.arange(0, BK)
    b = tl.arange(0, BK // 32)
    acc = tl.zeros((BN, BT), tl.float32)
    for k in tl.range(k0, k1, BK, num_stages=STAGES):
        if EVEN:
            byte = tl.load(s_row[:, None] + (k // 32 + b)[None, :])
        else:
            byte = tl.load(s_row[:, None] + (k // 32 + b)[None, :], mask=(k + b * 32 < K)[None, :], other=0)
        q = load_tile(q_row, k + cols, K, EVEN)
        x = load_tokens(x_row, k + cols, tokens, K, EVEN)
        acc = tl.dot(expand_any(q, byte, BN, BK), x, acc)
    return acc


@triton.jit
def times_power_of_two(x, e):
    """``x * 2**e`` by two factors that are normal fp32 numbers each. Below 2**-252 nothing of an x <= 2**48 is left."""
    e = tl.maximum(e, -252)
    half = e >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((e - half + 127) << 23).to(tl.float32, bitcast=True)
    return x * first * second


@triton.jit
def tile_product(
    q_ptr,
    s_ptr,
    p_ptr,
    top_ptr,
    x16_ptr,
    xb_ptr,
    q_desc,
    x_desc,
    exp_ptr,
    g,
    row,  # (BN,) rows of the weights, all of them rows that exist
    r0,  # row of q_desc that is row[0]
    t0,
    end,
    N,
    K,
    stride_xb,
    k0,
    k1,
    FORM: tl.constexpr,
    E_HI: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_X: tl.constexpr,
    PERM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weight rows ``(BN, k0..k1)`` of group g times tokens ``t0 .. t0 + BT``: ``(BN, BT)`` fp32."""
    t = t0 + tl.arange(0, BT)
    tokens = t < end
    t64 = t.to(tl.int64)
    g_row = g.to(tl.int64) * N + row
    q_row = q_ptr + g_row * K
    s_row = s_ptr + g_row * tl.cdiv(K, 32)
    xb_row = xb_ptr + t64 * stride_xb
    if FORM == "any":
        return multiply_any(q_row, s_row, xb_row, tokens, K, k0, k1, BN, BT, BK, EVEN, STAGES)
    else:
        # The fast form if every weight row and every token of the tile is exact in it. Else small steps: rare, and a
        # second pipelined loop would take the registers of the first.
        top = tl.load(top_ptr + g_row).to(tl.int32)
        exact = tl.max(top, 0) < 255
        e = (top - (127 + E_HI))[:, None] + tl.zeros((BN, BT), tl.int32)
        x_row = xb_row
        if FORM == "bf16":
            e += 120
        if FORM == "fp16":
            token_e = tl.load(exp_ptr + t, mask=tokens, other=0)
            exact = exact & (tl.max(token_e, 0) < INEXACT)
            e += token_e[None, :]
            x_row = x16_ptr + t64 * K
        if exact:
            p_row = p_ptr + (g.to(tl.int64) * tl.cdiv(K, 128) * N + row) * 4
            acc = multiply_packed(
                q_row, p_row, x_row, q_desc, x_desc, r0, t0, tokens, N, K, k0, k1, BN, BT, BK, EVEN, FORM, TMA_Q, TMA_X, PERM
            )
            acc = times_power_of_two(acc, e)
        else:
            acc = multiply_any(q_row, s_row, xb_row, tokens, K, k0, k1, BN, BT, 32, False, 1)
        return acc


@triton.jit
def zero_rows(out_ptr, first, M, n, N, BN: tl.constexpr, BT: tl.constexpr):
    """Columns n of rows ``first .. M`` of out ``(M, N)``."""
    zero = tl.zeros((BN, BT), out_ptr.dtype.element_ty)
    for t0 in range(first, M, BT):
        t = t0 + tl.arange(0, BT)
        at = t.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptr + at, zero, mask=(t < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["M", "G"])
def _mx_decode_kernel(
    out_ptr,  # (M, N), or (splits, M, N) fp32 partial sums
    q_ptr,  # (G, N, K) e4m3 or e5m2
    s_ptr,  # (G, N, ceil(K/32)) uint8
    p_ptr,  # (G, ceil(K/128), N, 4) uint8, unless FORM is "any"
    top_ptr,  # (G, N) uint8, unless FORM is "any"
    x16_ptr,  # (M, K) fp16, if FORM is "fp16"
    xb_ptr,  # (M, K) bf16
    q_desc,  # (G * N, K) as boxes (BN, BK), if TMA_Q
    x_desc,  # (M, K) of FORM as boxes (BT, BK), if TMA_X
    exp_ptr,  # (M,) int32, if FORM is "fp16"
    bias_ptr,  # (G, N), if HAS_BIAS
    offs_ptr,  # (G,) int32
    M,
    N,
    K,
    G,
    stride_xb,
    split_k,  # K of one split, a multiple of BK
    G_POW2: tl.constexpr,
    FORM: tl.constexpr,
    E_HI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_TAIL: tl.constexpr,  # rows of no group are set to zero here, by one more group of programs
    EVEN: tl.constexpr,  # K is a multiple of BK
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_X: tl.constexpr,
    PERM: tl.constexpr,  # x16 is in the order of ``permuted``
    PDL: tl.constexpr,  # started before the tokens are written
    STAGES: tl.constexpr,
):
    # 1. Which rows of the weights, which tokens. Nothing to do without tokens.
    g = tl.program_id(1)
    start, end = token_range(offs_ptr, g, M, G, G_POW2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if ZERO_TAIL:
        if g == G:
            zero_rows(out_ptr, end, M, n, N, BN, BT)
            return
    if start >= end:
        return

    # 2. Coordinates. Rows beyond N are read twice and not stored: no mask in the loop.
    k0 = tl.program_id(2) * split_k
    k1 = tl.minimum(k0 + split_k, K)
    row = tl.minimum(n, N - 1)
    r0 = g * N + tl.program_id(0) * BN
    if PDL:
        gdc_wait()
    for t0 in range(start, end, BT):
        # 3. Multiply.
        acc = tile_product(
            q_ptr, s_ptr, p_ptr, top_ptr, x16_ptr, xb_ptr, q_desc, x_desc, exp_ptr, g, row, r0, t0, end, N, K, stride_xb,
            k0, k1, FORM, E_HI, EVEN, BN, BT, BK, TMA_Q, TMA_X, PERM, STAGES,
        )  # fmt: skip

        # 4. Bias, one rounding, store.
        if HAS_BIAS:
            acc += tl.load(bias_ptr + g.to(tl.int64) * N + row).to(tl.float32)[:, None]
        t = t0 + tl.arange(0, BT)
        at = (tl.program_id(2).to(tl.int64) * M + t)[None, :] * N + n[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(t < end)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["M", "G"])
def _sum_splits_kernel(
    out_ptr,  # (M, N)
    part_ptr,  # (splits, M, N) fp32
    bias_ptr,  # (G, N), if HAS_BIAS
    offs_ptr,  # (G,) int32
    M,
    N,
    G,
    G_POW2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One row, BLOCK columns. Splits are added in their order; rows of no group are zeros.
    m = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, G_POW2)
    ends = tl.load(offs_ptr + i, mask=i < G, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    total = tl.zeros((BLOCK,), tl.float32)
    if m < tl.max(ends, 0):
        for split in tl.static_range(SPLITS):
            at = (split * M + m).to(tl.int64) * N
            total += tl.load(part_ptr + at + n, mask=n < N, other=0.0)
        if HAS_BIAS:
            g = tl.min(tl.where((i < G) & (ends > m), i, G), 0)  # the first group that ends beyond m
            total += tl.load(bias_ptr + g.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


# --- launch ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Tile and schedule of one launch."""

    tokens: int  # BT: tokens of a tile
    rows: int  # BN: weight rows of a tile
    warps: int
    stages: int
    tma_q: bool = False
    tma_x: bool = False
    perm: bool = False
    pdl: bool = False


@dataclass(frozen=True)
class PackedWeight:
    """What ``pack_weight`` found out about a weight ``(G, N, K)`` when it was loaded.

    | field | shape | dtype | meaning |
    |---|---|---|---|
    | ``form`` | | | "fp16" or "bf16" |
    | ``scale`` | ``(G, ceil(K/128), N, 4)`` | uint8 | exponents relative to ``top``, ready to be shifted into place |
    | ``top`` | ``(G, N)`` | uint8 | largest scale byte of the row; 255: the row is not exact in ``form`` |
    """

    form: str
    scale: Tensor
    top: Tensor


BK = 128
PROGRAMS = 1024
"""Split K until there are about this many programs: 132 SMs with six to eight each."""
MIN_SPLIT = 512
"""K of a split, at least: four steps of the pipeline."""


def choose_config(m: int, g: int, k: int) -> Config:
    """By mean tokens per group: M and G are known without reading offs."""
    mean = m / max(g, 1)
    if k % 16:
        return Config(16 if mean <= 12 else 32, 64, 2, 4)
    if mean <= 2:
        return Config(8, 128, 4, 4, tma_q=True)
    if mean <= 12:
        return Config(16, 64, 2, 4, tma_q=True)
    if mean <= 24:
        return Config(32, 64, 4, 4, tma_q=True, tma_x=True, perm=True)
    if mean <= 48:
        return Config(64, 64, 4, 4, tma_q=True, tma_x=True, perm=True)
    return Config(128, 128, 8, 4, tma_q=True, tma_x=True, perm=True)


def choose_splits(m: int, g: int, n: int, k: int, config: Config) -> int:
    """Splits of K: 1 as soon as N tiles and groups that can have tokens fill the chip."""
    programs = triton.cdiv(n, config.rows) * min(g, m)
    return max(1, min(PROGRAMS // programs, k // MIN_SPLIT)) if programs else 1


def _tma_ready(t: Tensor) -> bool:
    """Base and row stride are multiples of 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(-1) == 1


def _desc(t: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, BK])


@dataclass(frozen=True)
class Rows:
    """Tokens in the forms that the tiles take. ``prepared``: ``_rows_kernel`` ran, and wrote the tail."""

    fp16: Tensor  # (M, K), if the weights are packed for fp16
    bf16: Tensor  # (M, K)
    exponent: Tensor  # (M,)
    prepared: bool
    permuted: bool
    pdl: bool
    groups_pow2: int

    def constants(self, q: Tensor, packed: PackedWeight | None, c: Config) -> dict[str, object]:
        """Keyword arguments of a launch that follow from operands and configuration."""
        fast = packed is not None
        q2 = q.view(-1, q.shape[-1])
        pdl = self.pdl and self.prepared
        return {
            "G_POW2": self.groups_pow2,
            "FORM": packed.form if packed is not None else "any",
            "E_HI": WINDOW[packed.form, q.dtype][1] if packed is not None else 0,
            "EVEN": q.shape[-1] % BK == 0,
            "TMA_Q": c.tma_q and fast and _tma_ready(q2),
            "TMA_X": c.tma_x and fast and _tma_ready(self.operand(packed)),
            "PERM": self.permuted,
            "PDL": pdl,
            "STAGES": c.stages,
            "num_warps": c.warps,
            "num_stages": c.stages,
            **({"launch_pdl": True} if pdl else {}),
        }

    def operand(self, packed: PackedWeight | None) -> Tensor:
        """The tokens of the fast form."""
        return self.fp16 if packed is not None and packed.form == "fp16" else self.bf16


def prepare_rows(
    a: Tensor,
    a_scale: Tensor | None,
    index: Tensor | None,
    top_k: int,
    offs: Tensor,
    packed: PackedWeight | None,
    quantize: tuple[torch.dtype, str] | None,
    out: Tensor,
    zero_tail: bool,
    c: Config,
) -> Rows:
    """Gather, round and scale tokens as the tiles need them; nothing is launched if they are right as they are."""
    m, k = out.shape[0], a.shape[1]
    g = offs.numel()
    fp16 = packed is not None and packed.form == "fp16"
    kind = "mx" if a_scale is not None else "quantize" if quantize is not None else "values"
    permuted = c.perm and fp16 and k % 16 == 0
    pow2 = triton.next_power_of_2(g)
    pdl = c.pdl and a.is_cuda
    high = kind != "values" or a.dtype != torch.bfloat16 or index is not None
    if not (fp16 or high):
        return Rows(a, a if a.stride(-1) == 1 else a.contiguous(), offs, False, False, False, pow2)
    a = a if a.stride(-1) == 1 else a.contiguous()
    elem = elem_format(a.dtype if kind == "mx" else quantize[0] if quantize is not None else E4M3.dtype)
    x16 = a.new_empty((m, k), dtype=torch.float16) if fp16 else a
    exponent = a.new_empty((m,), dtype=torch.int32) if fp16 else offs
    xb = a.new_empty((m, k), dtype=torch.bfloat16) if high else a
    _rows_kernel[(m,)](
        x16,
        xb,
        exponent,
        out,
        a,
        a_scale if a_scale is not None else a,
        index if index is not None else offs,
        offs,
        m,
        out.shape[1],
        k,
        g,
        a.stride(0),
        a_scale.stride(0) if a_scale is not None else 0,
        G_POW2=pow2,
        TOP_K=top_k if index is not None else 0,
        IN=kind,
        FP16=fp16,
        PERM=permuted,
        BF16=high,
        ZERO_TAIL=zero_tail,
        PDL=pdl,
        EMAX=elem.emax,
        THRESH=elem.threshold(quantize[1] if quantize is not None else "rceil"),
        FMAX=elem.max,
        E5M2=elem.dtype == torch.float8_e5m2,
        BLOCK=min(max(triton.next_power_of_2(k), 128), 2048),
        num_warps=4,
    )
    return Rows(x16, xb, exponent, True, permuted, pdl, pow2)


def launch_arguments(q: Tensor, scale: Tensor, packed: PackedWeight | None, rows: Rows, c: Config) -> tuple[object, ...]:
    """Weights and tokens, as both kernels take them."""
    constants = rows.constants(q, packed, c)
    x = rows.operand(packed)
    return (
        q,
        scale,
        packed.scale if packed is not None else scale,
        packed.top if packed is not None else scale,
        rows.fp16,
        rows.bf16,
        _desc(q.view(-1, q.shape[-1]), c.rows) if constants["TMA_Q"] else q,
        _desc(x, c.tokens) if constants["TMA_X"] else x,
        rows.exponent,
    )


def mx_decode_m_groups(
    a: Tensor,
    a_scale: Tensor | None,
    index: Tensor | None,
    top_k: int,
    b_q: Tensor,
    b_scale: Tensor,
    packed: PackedWeight | None,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    quantize: tuple[torch.dtype, str] | None = None,
    config: Config | None = None,
    splits: int | None = None,
) -> Tensor:
    """Launch. ``a (M, K)``, ``b_q (G, N, K)`` with ``b_scale (G, N, ceil(K/32))`` uint8, ``offs (G,)`` -> ``(M, N)``.

    ``a`` is used in bf16, rounded to MXFP8 first if ``quantize`` = (elem_dtype, scale_mode), or is MXFP8 already and
    comes with ``a_scale (M, ceil(K/32))``. With ``index (M,)``, row m is row ``index[m] // top_k`` of a ``(T, K)``.
    ``packed``: exact fast forms; None expands every tile to bf16. Weights and scales are contiguous.
    """
    m = a.shape[0] if index is None else index.shape[0]
    g, n, k = b_q.shape
    out = a.new_empty((m, n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    c = config or choose_config(m, g, k)
    splits = splits or choose_splits(m, g, n, k, c)
    split_k = triton.cdiv(triton.cdiv(k, BK), splits) * BK
    splits = triton.cdiv(k, split_k)
    rows = prepare_rows(a, a_scale, index, top_k, offs, packed, quantize, out, splits == 1, c)
    bias = bias.contiguous() if bias is not None else None
    zero_tail = splits == 1 and not rows.prepared
    target = out if splits == 1 else out.new_empty((splits, m, n), dtype=torch.float32)
    _mx_decode_kernel[(triton.cdiv(n, c.rows), g + zero_tail, splits)](
        target,
        *launch_arguments(b_q, b_scale, packed, rows, c),
        bias if bias is not None else offs,
        offs,
        m,
        n,
        k,
        g,
        rows.bf16.stride(0),
        split_k,
        HAS_BIAS=bias is not None and splits == 1,
        ZERO_TAIL=zero_tail,
        BN=c.rows,
        BT=c.tokens,
        BK=BK,
        **rows.constants(b_q, packed, c),
    )
    if splits > 1:
        block = min(triton.next_power_of_2(n), 1024)
        _sum_splits_kernel[(m, triton.cdiv(n, block))](
            out,
            target,
            bias if bias is not None else offs,
            offs,
            m,
            n,
            g,
            G_POW2=rows.groups_pow2,
            HAS_BIAS=bias is not None,
            SPLITS=splits,
            BLOCK=block,
        )
    return out
