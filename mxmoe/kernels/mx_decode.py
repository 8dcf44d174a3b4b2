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

from ._e8m0 import scale_byte, scale_value, to_elem
from ._groups import last_end

INEXACT = tl.constexpr(1 << 20)
"""Exponent of a token that has no exact fp16 form."""


# --- tokens ----------------------------------------------------------------------------------------------------------
@triton.jit
def _token_values(x_ptr, s_ptr, at, cols, K, BLOCK: tl.constexpr, IN: tl.constexpr, EMAX, THRESH, FMAX, E5M2):
    """A piece of one token as fp32: as it is, rounded to MXFP8, or expanded from MXFP8."""
    x = tl.load(x_ptr + at + cols, mask=cols < K, other=0.0).to(tl.float32)
    if IN == "values":
        return x
    x = tl.reshape(x, (BLOCK // 32, 32))
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
    x16_ptr,  # (M, K) fp16: token * 2**shift
    xb_ptr,  # (M, K) bf16: token, if WRITE_BF16
    exp_ptr,  # (M,) int32: -shift, or INEXACT
    out_ptr,  # (M, N): rows of no group are set to zero
    x_ptr,  # (M, K)
    s_ptr,  # (M, ceil(K/32)) uint8, if IN is "mx"
    offs_ptr,  # (G,) int32
    M,
    N,
    K,
    G,
    stride_xm,
    stride_sm,
    G_POW2: tl.constexpr,
    IN: tl.constexpr,
    WRITE_BF16: tl.constexpr,
    EMAX: tl.constexpr,
    THRESH: tl.constexpr,
    FMAX: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. One program per row. A row of no group is a row of zeros in the result.
    m = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if m >= last_end(offs_ptr, G, M, G_POW2):
        zero = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
        for n in range(0, N, BLOCK):
            tl.store(out_ptr + m * N + n + c, zero, mask=n + c < N)
    else:
        # 2. Largest magnitude, as integer bits: above 0x7F7FFFFF it is Inf or NaN.
        largest = tl.zeros((BLOCK,), tl.int32)
        at = m * stride_xm
        s_row = s_ptr + m * stride_sm
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
            half = (v * factor).to(tl.float16)
            lost = tl.maximum(lost, (half.to(tl.float32) * back != v).to(tl.int32))
            tl.store(x16_ptr + m * K + k + c, half, mask=k + c < K)
            if WRITE_BF16:
                tl.store(xb_ptr + m * K + k + c, v.to(tl.bfloat16), mask=k + c < K)
        bad = (tl.max(lost, 0) != 0) | (exponent == 128)
        tl.store(exp_ptr + m, tl.where(bad, INEXACT, -shift))


# --- weights in registers --------------------------------------------------------------------------------------------
@triton.jit
def _expand_fp16(q, words, BN: tl.constexpr, BK: tl.constexpr):
    """e4m3 ``(BN, BK)`` times the scales packed in ``words`` ``(BN, BK/128)``: each byte is the high half of an fp16."""
    byte = (words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 0xFF
    scale = tl.reshape((byte << 8).to(tl.int16).to(tl.float16, bitcast=True), (BN, BK // 32))
    w = tl.reshape(q.to(tl.float16), (BN, BK // 32, 32)) * scale[:, :, None]
    return tl.reshape(w, (BN, BK))


@triton.jit
def _expand_bf16(q, byte, BN: tl.constexpr, BK: tl.constexpr):
    """e4m3 ``(BN, BK)`` times 2**(byte - 127), ``byte`` ``(BN, BK/32)``; 0 is 2**-127, 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 255, 0x7FC0, tl.where(b == 0, 0x0040, b << 7))
    scale = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    w = tl.reshape(q.to(tl.bfloat16), (BN, BK // 32, 32)) * scale[:, :, None]
    return tl.reshape(w, (BN, BK))


@triton.jit
def token_range(offs_ptr, g, M, G_POW2: tl.constexpr):
    """Start and end of group ``g``, safe for any content of offs (as ``groups.safe_ends``)."""
    i = tl.arange(0, G_POW2)
    ends = tl.load(offs_ptr + i, mask=i <= g, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    return tl.max(tl.where(i < g, ends, 0), 0), tl.max(ends, 0)


@triton.jit
def multiply_fp16(
    q_ptr, words_ptr, x_ptr, cols_in, tokens, n_words, K, k0, k1, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr
):
    """``(BN, BT)`` partial products, weights and tokens in fp16. q_ptr, x_ptr: one pointer per row."""
    kk = tl.arange(0, BK)
    kw = tl.arange(0, BK // 128)
    acc = tl.zeros((BN, BT), tl.float32)
    for k in range(k0, k1, BK):
        words = tl.load(words_ptr[:, None] + ((k // 128 + kw) * n_words)[None, :])
        if EVEN_K:
            q = tl.load(q_ptr[:, None] + (k + kk)[None, :])
            x = tl.load(x_ptr[None, :] + (k + kk)[:, None], mask=tokens[None, :], other=0.0)
        else:
            q = tl.load(q_ptr[:, None] + (k + kk)[None, :], mask=(k + kk < K)[None, :], other=0.0)
            x = tl.load(x_ptr[None, :] + (k + kk)[:, None], mask=tokens[None, :] & (k + kk < K)[:, None], other=0.0)
        acc = tl.dot(_expand_fp16(q, words, BN, BK), x, acc)
    return acc


@triton.jit
def multiply_bf16(
    q_ptr, s_ptr, x_ptr, tokens, K, k0, k1, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr
):
    """As ``multiply_fp16``, in bf16 and with the plain scale bytes (s_ptr: one pointer per row): right for any weights."""
    kk = tl.arange(0, BK)
    kb = tl.arange(0, BK // 32)
    acc = tl.zeros((BN, BT), tl.float32)
    for k in range(k0, k1, BK):
        if EVEN_K:
            byte = tl.load(s_ptr[:, None] + (k // 32 + kb)[None, :])
            q = tl.load(q_ptr[:, None] + (k + kk)[None, :])
            x = tl.load(x_ptr[None, :] + (k + kk)[:, None], mask=tokens[None, :], other=0.0)
        else:
            byte = tl.load(s_ptr[:, None] + (k // 32 + kb)[None, :], mask=(k + kb * 32 < K)[None, :], other=0)
            q = tl.load(q_ptr[:, None] + (k + kk)[None, :], mask=(k + kk < K)[None, :], other=0.0)
            x = tl.load(x_ptr[None, :] + (k + kk)[:, None], mask=tokens[None, :] & (k + kk < K)[:, None], other=0.0)
        acc = tl.dot(_expand_bf16(q, byte, BN, BK), x, acc)
    return acc


@triton.jit
def power_of_two(e):
    """2**e as a product of two normal fp32 numbers would give it, e in -252..254: two factors, multiplied one by one."""
    half = e >> 1
    return ((half + 127) << 23).to(tl.float32, bitcast=True), ((e - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["M", "G"])
def _mx_decode_kernel(
    out_ptr,  # (M, N), or (splits, M, N) fp32 partial sums
    q_ptr,  # (G, N, K) e4m3 or e5m2
    s_ptr,  # (G, N, ceil(K/32)) uint8
    words_ptr,  # (G, ceil(K/128), N) int32, if PACKED
    top_ptr,  # (G, N) uint8, if PACKED
    x16_ptr,  # (M, K) fp16
    xb_ptr,  # (M, K) bf16
    exp_ptr,  # (M,) int32
    bias_ptr,  # (G, N), if HAS_BIAS
    offs_ptr,  # (G,) int32
    M,
    N,
    K,
    G,
    stride_xb,
    split_k,  # K of one split, a multiple of BK
    G_POW2: tl.constexpr,
    E_HI: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    # 1. Which rows of the weights, which tokens. Nothing to do without tokens.
    g = tl.program_id(1)
    start, end = token_range(offs_ptr, g, M, G_POW2)
    if start >= end:
        return
    k0 = tl.program_id(2) * split_k
    k1 = tl.minimum(k0 + split_k, K)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)  # rows beyond N are read twice and not stored: no mask in the loop
    g64 = g.to(tl.int64)
    K32 = tl.cdiv(K, 32)
    q_row = q_ptr + (g64 * N + row) * K
    s_row = s_ptr + (g64 * N + row) * K32
    exact_rows = False
    top = tl.zeros((BN,), tl.int32)
    if PACKED:
        top = tl.load(top_ptr + g64 * N + row).to(tl.int32)
        exact_rows = tl.max(top, 0) < 255
        words_row = words_ptr + g64 * tl.cdiv(K, 128) * N + row
    else:
        words_row = s_row

    for t0 in range(start, end, BT):
        t = t0 + tl.arange(0, BT)
        tokens = t < end
        t64 = t.to(tl.int64)

        # 2. Products: fp16 if every weight row and every token of the tile is exact there.
        if PACKED:
            e = tl.load(exp_ptr + t, mask=tokens, other=0)
            exact = exact_rows & (tl.max(e, 0) < INEXACT)
            if exact:
                acc = multiply_fp16(
                    q_row, words_row, x16_ptr + t64 * K, n, tokens, N, K, k0, k1, BN, BT, BK, EVEN_K
                )
                # 3. Put the powers of two back.
                a, b = power_of_two((top - E_HI - 127)[:, None] + e[None, :])
                acc = acc * a * b
            else:
                acc = multiply_bf16(q_row, s_row, xb_ptr + t64 * stride_xb, tokens, K, k0, k1, BN, BT, BK, EVEN_K)
        else:
            acc = multiply_bf16(q_row, s_row, xb_ptr + t64 * stride_xb, tokens, K, k0, k1, BN, BT, BK, EVEN_K)

        # 4. Bias, one rounding, store.
        if HAS_BIAS:
            acc += tl.load(bias_ptr + g64 * N + row).to(tl.float32)[:, None]
        at = (tl.program_id(2).to(tl.int64) * M + t64)[None, :] * N + n[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=tokens[None, :] & (n < N)[:, None])
