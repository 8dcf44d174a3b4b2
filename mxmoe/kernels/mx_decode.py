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
the weights are loaded; a row that spans more says so). Tokens likewise: ``_rows_kernel`` multiplies each by the power
of two that brings its largest value to 2**15, and marks a token that does not come back unchanged. The epilogue puts
both powers back. A tile with such a row or token is computed again in bf16: the same numbers, and the same sums, since
fp16 and bf16 differ by powers of two only.

Tokens are gathered by the multiplication, not in front of it: with top-k routing each is prepared once, not k times.

Grid     ``_rows_kernel``: one program per row of x, and one that lists the tiles. ``_mx_decode_kernel``: (N tiles,
         token tiles, splits of K); token tiles are an upper bound known without reading offs, those beyond the list
         leave at once. Groups without tokens have no tile. N tiles come first: programs in flight then read
         neighbouring rows of one expert (the other way round: 115 us instead of 108 at 8 tokens, 156 instead of 135
         at 32).
Writes   every element of out once: rows beyond offs[-1] are zeros (``_rows_kernel``); split partial sums are added in a
         fixed order by ``_sum_splits_kernel``. No atomics: two runs are bit-equal.
Traffic  1 + 1/32 bytes per weight, once per BT tokens; tokens from L2, 2 BT / BN bytes per weight.
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

from .. import device
from ..formats import E4M3, elem_format
from ._e8m0 import scale_byte, scale_value, to_elem
from ._gemm import tma_ready
from ._groups import group_bounds
from ._offline import Case
from ._pdl import dependent_launch, early

WINDOW = {torch.float8_e4m3fn: (-15, 7), torch.float8_e5m2: (-8, 0)}
"""Powers of two that leave every element of a dtype exact in fp16 (2**-24 to 65504)."""
INEXACT = tl.constexpr(1 << 20)
"""Exponent of a token that has no exact fp16 form."""


# --- order of the contraction ----------------------------------------------------------------------------------------
# wgmma takes its first operand from registers as pairs (2t, 2t + 1) and (2t + 8, 2t + 9) of 16 columns per thread t. In
# fp8 those are two pieces of two bytes, too small for ldmatrix (64 loads of two bytes instead of 8 in the loop). The
# order of a contraction is free, so thread t takes bytes 4t .. 4t + 3 instead, and the tokens are stored in the order
# that this makes of the columns:
#     column   0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
#     place    0  1  8  9 |  2  3 10 11 |  4  5 12 13 |  6  7 14 15
@triton.jit
def permute_columns(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Columns of ``(ROWS, COLS)`` moved to their places; for a tile of weights a renaming of registers."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, COLS // 16, 4, 2, 2)), (0, 1, 3, 2, 4)), (ROWS, COLS))


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


@triton.jit
def _list_tiles(tiles_ptr, offs_ptr, M, G, bound, G_POW2: tl.constexpr, BT: tl.constexpr):
    """Token tiles of all groups one behind the other: (group, first token, end of group); group -1 behind the last."""
    g = tl.arange(0, G_POW2)
    starts, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    count = tl.cdiv(sizes, BT)
    first = tl.cumsum(count, 0) - count
    for j in range(tl.max(count, 0)):
        at = tiles_ptr + (first + j) * 3
        tl.store(at, g, mask=j < count)
        tl.store(at + 1, starts + j * BT, mask=j < count)
        tl.store(at + 2, ends, mask=j < count)
    for y in range(tl.sum(count, 0), bound, G_POW2):
        tl.store(tiles_ptr + (y + g) * 3, -1, mask=y + g < bound)


@triton.jit(do_not_specialize=["M", "G", "bound", "share"])
def _rows_kernel(
    x16_ptr,  # (T, K) fp16: token * 2**shift, if FP16
    xb_ptr,  # (T, K) bf16: token, if BF16
    exp_ptr,  # (T,) int32: -shift, or INEXACT; if FP16
    out_ptr,  # (M, N): rows of no group are set to zero, if ZERO_TAIL
    tiles_ptr,  # (bound, 3) int32, if LIST
    x_ptr,  # (T, K)
    s_ptr,  # (T, ceil(K/32)) uint8, if IN is "mx"
    offs_ptr,  # (G,) int32
    M,
    N,
    K,
    G,
    bound,
    share,  # rows of out for each program, ceil(M / T)
    stride_xm,
    stride_sm,
    G_POW2: tl.constexpr,
    LIST: tl.constexpr,
    IN: tl.constexpr,
    FP16: tl.constexpr,
    PERM: tl.constexpr,  # columns of x16 in the order of ``permute_columns``
    BF16: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,  # started early: 1, x was there before; 2, x is what the kernel before writes
    ONCE: tl.constexpr,  # K <= BLOCK: a row stays in registers
    EMAX: tl.constexpr,
    THRESH: tl.constexpr,
    FMAX: tl.constexpr,
    E5M2: tl.constexpr,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. Program 0 lists the tiles, the others take one row each.
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    if LIST:
        if t == 0:
            if WAIT:
                gdc_wait()
            _list_tiles(tiles_ptr, offs_ptr, M, G, bound, G_POW2, BT)
            return
        t -= 1
    c = tl.arange(0, BLOCK)
    at = t * stride_xm
    s_row = s_ptr + t * stride_sm
    if WAIT == 2:
        gdc_wait()
    if FP16 or BF16:
        # 2. Largest magnitude, as integer bits: above 0x7F7FFFFF it is Inf or NaN. Rows of no group are read as well:
        # whether a token is one is known later than x.
        v = _token_values(x_ptr, s_row, at, c, K, BLOCK, IN, EMAX, THRESH, FMAX, E5M2)
        factor = 1.0
        back = 1.0
        shift = 0
        exponent = 0
        if FP16:
            largest = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            if not ONCE:
                for k in range(BLOCK, K, BLOCK):
                    more = _token_values(x_ptr, s_row, at, k + c, K, BLOCK, IN, EMAX, THRESH, FMAX, E5M2)
                    largest = tl.maximum(largest, more.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            exponent = (tl.max(largest, 0) >> 23) - 127
            shift = tl.minimum(tl.maximum(15 - exponent, -112), 120)
            factor = ((shift + 127) << 23).to(tl.float32, bitcast=True)
            back = ((127 - shift) << 23).to(tl.float32, bitcast=True)

        # 3. Round, and see whether it comes back.
        if WAIT == 1:
            gdc_wait()  # before anything is written
        lost = tl.zeros((BLOCK,), tl.int32)
        for k in range(0, BLOCK if ONCE else K, BLOCK):
            if not ONCE:
                v = _token_values(x_ptr, s_row, at, k + c, K, BLOCK, IN, EMAX, THRESH, FMAX, E5M2)
            if FP16:
                half = (v * factor).to(tl.float16)
                lost = tl.maximum(lost, (half.to(tl.float32) * back != v).to(tl.int32))
                if PERM:
                    half = tl.reshape(permute_columns(tl.reshape(half, (1, BLOCK)), 1, BLOCK), (BLOCK,))
                tl.store(x16_ptr + t * K + k + c, half, mask=k + c < K)
            if BF16:
                tl.store(xb_ptr + t * K + k + c, v.to(tl.bfloat16), mask=k + c < K)
        if FP16:
            bad = (tl.max(lost, 0) != 0) | (exponent == 128)
            tl.store(exp_ptr + t, tl.where(bad, INEXACT, -shift))

    # 4. A row of no group is a row of zeros in the result.
    if WAIT == 1 and not (FP16 or BF16):
        gdc_wait()
    if ZERO_TAIL:
        g = tl.arange(0, G_POW2)
        ends = tl.load(offs_ptr + g, mask=g < G, other=0)
        end = tl.max(tl.minimum(tl.maximum(ends, 0), M), 0)
        zero = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
        first = tl.maximum(t * share, end)
        row = out_ptr + first * N
        for _ in range(first, tl.minimum(t * share + share, M)):
            for n in range(0, N, BLOCK):
                tl.store(row + n + c, zero, mask=n + c < N)
            row += N


# --- weights in registers --------------------------------------------------------------------------------------------
# The scale of a tile is loaded as bytes (BN, BK/32) and nothing is computed from arange: then Triton moves the layout
# of the dot operand up to the loads, and a weight goes shared memory -> ldmatrix -> cvt -> mul -> mma. With a shift by
# arange in between, it stays below, and every expanded tile takes a trip through shared memory (519 instructions in
# the loop instead of 352).
@triton.jit
def _times_scale(q, scale, BN: tl.constexpr, BK: tl.constexpr):
    """``(BN, BK)`` times ``(BN, BK/32)``, each scale on 32 columns."""
    return tl.reshape(tl.reshape(q, (BN, BK // 32, 32)) * scale[:, :, None], (BN, BK))


@triton.jit
def _half(q):
    """e4m3 or e5m2 as fp16, exactly. Before sm_89 there is no conversion from e4m3: its bytes come as uint8."""
    if q.dtype == tl.uint8:
        # Sign and seven bits put where an fp16 has them are the value times 2**-8, subnormals included (NaN is 480).
        bits = ((q & 0x80).to(tl.int16) << 8) | ((q & 0x7F).to(tl.int16) << 7)
        return bits.to(tl.float16, bitcast=True) * tl.full((1,), 256.0, tl.float16)
    else:
        return q.to(tl.float16)


@triton.jit
def expand_fp16(q, byte, BN: tl.constexpr, BK: tl.constexpr):
    """Weights of a row that ``pack_weight`` found exact. ``byte``: high byte of the fp16 2**e."""
    return _times_scale(_half(q), (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True), BN, BK)


@triton.jit
def expand_any(q, byte, BN: tl.constexpr, BK: tl.constexpr):
    """Any weights, in bf16: e4m3 or e5m2 times 2**(byte - 127); byte 0 is 2**-127, 255 is NaN."""
    b = byte.to(tl.int16)
    bits = tl.where(b == 255, 0x7FC0, tl.where(b == 0, 0x0040, b << 7)).to(tl.int16)
    scale = bits.to(tl.bfloat16, bitcast=True)
    if q.dtype == tl.uint8:
        half = tl.where((q & 0x7F) == 0x7F, float("nan"), _half(q).to(tl.float32))
        return _times_scale(half.to(tl.bfloat16), scale, BN, BK)
    else:
        return _times_scale(q.to(tl.bfloat16), scale, BN, BK)


@triton.jit
def _load_weights(row_ptr, cols, K, EVEN: tl.constexpr):
    """``(BN, BK)``: one pointer per row."""
    if EVEN:
        return tl.load(row_ptr[:, None] + cols[None, :])
    else:
        return tl.load(row_ptr[:, None] + cols[None, :], mask=(cols < K)[None, :], other=0.0)


@triton.jit
def _load_tokens(row_ptr, cols, tokens, K, EVEN: tl.constexpr):
    """``(BK, BT)``: one pointer per token; zeros for those beyond the group, which costs no traffic."""
    if EVEN:
        return tl.load(row_ptr[None, :] + cols[:, None], mask=tokens[None, :], other=0.0)
    else:
        return tl.load(row_ptr[None, :] + cols[:, None], mask=tokens[None, :] & (cols < K)[:, None], other=0.0)


@triton.jit
def _multiply_fp16(
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
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_X: tl.constexpr,
    PERM: tl.constexpr,
):
    """``(BN, BT)`` sums over ``k0 .. k1`` of weights and tokens that are exact in fp16."""
    WORDS: tl.constexpr = BK // 128
    cols = tl.arange(0, BK)
    word = tl.arange(0, WORDS)[None, :, None]
    b = tl.arange(0, 4)[None, None, :]
    acc = tl.zeros((BN, BT), tl.float32)
    for k in range(k0, k1, BK):
        if WORDS == 1:
            byte = tl.load(p_row[:, None] + ((k // 128) * N * 4 + tl.arange(0, 4))[None, :])
        else:
            at = (k // 128 + word) * N * 4 + b
            byte = tl.reshape(tl.load(p_row[:, None, None] + at, mask=k + word * 128 < K, other=0), (BN, BK // 32))
        if TMA_Q:
            q = q_desc.load([r0, k])
        else:
            q = _load_weights(q_row, k + cols, K, EVEN)
        if PERM:
            q = permute_columns(q, BN, BK)
        if TMA_X:
            x = x_desc.load([t0, k]).T
        else:
            x = _load_tokens(x_row, k + cols, tokens, K, EVEN)
        acc = tl.dot(expand_fp16(q, byte, BN, BK), x, acc)
    return acc


@triton.jit
def _multiply_any(
    q_row,
    s_row,  # plain scales: K32 bytes per row
    x_row,
    tokens,
    K,
    k0,
    k1,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
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
        q = _load_weights(q_row, k + cols, K, EVEN)
        x = _load_tokens(x_row, k + cols, tokens, K, EVEN)
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
def _prefetch(address, nbytes):
    """Bring ``nbytes`` at a multiple of 16 to L2, both multiples of 16. One thread asks for all of it."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def find_tile(tiles_ptr, q_ptr, N, K, BN: tl.constexpr, PDL: tl.constexpr, READY: tl.constexpr, PREFETCH: tl.constexpr):
    """Group, first token and end of the group of this program; waits for the kernel before."""
    tile = tiles_ptr + tl.program_id(1) * 3
    if PDL and not READY:
        gdc_wait()
        gdc_launch_dependents()
    g = tl.load(tile)
    t0 = tl.load(tile + 1)
    end = tl.load(tile + 2)
    if PDL and READY:
        if PREFETCH:  # the memory has nothing else to do while tokens are prepared
            n = tl.program_id(0) * BN
            if g >= 0:
                rows = tl.minimum(BN, N - n)
                _prefetch((q_ptr + (g.to(tl.int64) * N + n) * K).to(tl.int64), (rows * K).to(tl.int32))
        gdc_wait()
        gdc_launch_dependents()
    return g, t0, end


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
    index_ptr,
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
    PACKED: tl.constexpr,
    E_HI: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_X: tl.constexpr,
    PERM: tl.constexpr,
    STAGES: tl.constexpr,
    TOP_K: tl.constexpr,  # 0: token t is row t of x
):
    """Weight rows ``(BN, k0..k1)`` of group g times tokens ``t0 .. t0 + BT``: ``(BN, BT)`` fp32."""
    t = t0 + tl.arange(0, BT)
    tokens = t < end
    if TOP_K:
        t = tl.load(index_ptr + t, mask=tokens, other=0) // TOP_K
    t64 = t.to(tl.int64)
    g_row = g.to(tl.int64) * N + row
    q_row = q_ptr + g_row * K
    s_row = s_ptr + g_row * tl.cdiv(K, 32)
    xb_row = xb_ptr + t64 * stride_xb
    if PACKED:
        # Optimistic: whether the tile is exact is known only after the loop has started, and it nearly always is.
        top = tl.load(top_ptr + g_row).to(tl.int32)
        e = tl.load(exp_ptr + t, mask=tokens, other=0)
        p_row = p_ptr + (g.to(tl.int64) * tl.cdiv(K, 128) * N + row) * 4
        acc = _multiply_fp16(
            q_row, p_row, x16_ptr + t64 * K, q_desc, x_desc, r0, t0, tokens, N, K, k0, k1, EVEN, BN, BT, BK,
            TMA_Q, TMA_X, PERM,
        )  # fmt: skip
        acc = times_power_of_two(acc, (top - (127 + E_HI))[:, None] + e[None, :])
        if (tl.max(top, 0) == 255) | (tl.max(e, 0) == INEXACT):
            # In small steps and not pipelined: rare, and not worth registers of the loop above.
            acc = _multiply_any(q_row, s_row, xb_row, tokens, K, k0, k1, False, BN, BT, 32, 1)
        return acc
    else:
        return _multiply_any(q_row, s_row, xb_row, tokens, K, k0, k1, EVEN, BN, BT, BK, STAGES)


@triton.jit(do_not_specialize=["M"])
def _mx_decode_kernel(
    out_ptr,  # (M, N), or (splits, M, N) fp32 partial sums
    q_ptr,  # (G, N, K) e4m3 or e5m2; before sm_89 e4m3 as uint8
    s_ptr,  # (G, N, ceil(K/32)) uint8
    p_ptr,  # (G, ceil(K/128), N, 4) uint8, if PACKED
    top_ptr,  # (G, N) uint8, if PACKED
    x16_ptr,  # (T, K) fp16, if PACKED
    xb_ptr,  # (T, K) bf16
    q_desc,  # (G * N, K) as boxes (BN, BK), if TMA_Q
    x_desc,  # (T, K) fp16 as boxes (BT, BK), if TMA_X
    exp_ptr,  # (T,) int32, if PACKED
    tiles_ptr,  # (token tiles, 3) int32
    index_ptr,  # (M,) int32 or int64: TOP_K times the row of x, if TOP_K
    bias_ptr,  # (G, N), if HAS_BIAS
    M,
    N,
    K,
    stride_xb,
    split_k,  # K of one split, a multiple of BK
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    E_HI: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BK
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_X: tl.constexpr,
    PERM: tl.constexpr,  # x16 is in the order of ``permute_columns``
    PDL: tl.constexpr,  # started before ``_rows_kernel`` is done
    READY: tl.constexpr,  # the tiles were listed by an earlier launch, which is complete
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    TOP_K: tl.constexpr,
):
    # 1. Which tokens, which rows of the weights.
    g, t0, end = find_tile(tiles_ptr, q_ptr, N, K, BN, PDL, READY, PREFETCH)
    if g < 0:
        return

    # 2. Coordinates. Rows beyond N are read twice and not stored: no mask in the loop.
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    r0 = g * N + tl.program_id(0) * BN
    k0 = tl.program_id(2) * split_k
    k1 = tl.minimum(k0 + split_k, K)

    # 3. Multiply.
    acc = tile_product(
        q_ptr, s_ptr, p_ptr, top_ptr, x16_ptr, xb_ptr, q_desc, x_desc, exp_ptr, index_ptr, g, row, r0, t0, end, N,
        K, stride_xb, k0, k1, PACKED, E_HI, EVEN, BN, BT, BK, TMA_Q, TMA_X, PERM, STAGES, TOP_K,
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

    tokens: int  # BT
    rows: int  # BN: weight rows of a tile
    warps: int
    stages: int
    tma_q: bool = False
    tma_x: bool = False
    perm: bool = False  # with 4 warps or more, where Triton chooses wgmma
    pdl: bool = True
    step: int = 128  # BK
    prefetch: bool = False  # weights to L2 while waiting for tokens, where tiles are known early; not measured


@dataclass(frozen=True)
class PackedWeight:
    """What ``pack_weight`` found out about a weight ``(G, N, K)`` when it was loaded.

    | field | shape | dtype | meaning |
    |---|---|---|---|
    | ``scale`` | ``(G, ceil(K/128), N, 4)`` | uint8 | high bytes of fp16 powers of two relative to ``top`` |
    | ``top`` | ``(G, N)`` | uint8 | largest scale byte of the row; 255: the row is not exact in fp16 |
    """

    scale: Tensor
    top: Tensor


PROGRAMS = 1024
"""Split K until there are about this many programs: 132 SMs with six to eight each."""
MIN_SPLIT = 512
"""K of a split, at least: four steps of the pipeline."""
MAX_ROW = 8192
"""Longest token that ``_rows_kernel`` keeps in registers."""
WARP_ROW = 512
"""Elements of a token for each warp of ``_rows_kernel`` (16 per thread; reasoned, not measured)."""


def choose_config(m: int, g: int, k: int, where: torch.device, packed: bool) -> Config:
    """By mean tokens per group and K: known without reading offs. Tiles leave room for groups of twice the mean."""
    mean = m / max(g, 1)
    # wgmma and tcgen05; the interpreter takes the same road.
    wide = device.capability(where)[0] in ((0, 9, 10) if where.type == "cpu" else (9, 10))
    if not (wide and packed) or k % 16:
        return Config(16 if mean <= 8 else 32, 64, 2, 4)
    if mean <= 2:
        return Config(8, 64, 2, 3, tma_q=True, step=256)
    if mean <= 12:
        if k < 1536:
            return Config(16, 64, 2, 4, tma_q=True)
        return Config(16, 128, 4, 3, tma_q=True, perm=True, step=256)
    if mean <= 24:
        return Config(32, 128, 4, 4, tma_q=True, perm=True)
    return Config(64, 128, 4, 3, tma_q=True, tma_x=True, perm=True)


def token_tiles(m: int, g: int, config: Config) -> int:
    """Upper bound of the token tiles of any offs."""
    return max(1, min(m, g + m // config.tokens))


def choose_splits(m: int, g: int, n: int, k: int, config: Config) -> int:
    """Splits of K: 1 as soon as N tiles and groups that can have tokens fill the chip."""
    programs = triton.cdiv(n, config.rows) * min(g, m)
    return max(1, min(PROGRAMS // programs, k // MIN_SPLIT)) if programs else 1


@dataclass(frozen=True)
class Rows:
    """What ``_rows_kernel`` made of the tokens, and the list of tiles."""

    fp16: Tensor  # (T, K), with packed weights
    bf16: Tensor  # (T, K)
    exponent: Tensor  # (T,)
    tiles: Tensor  # (token tiles, 3)
    ready: bool  # tiles are of an earlier launch


@dataclass(frozen=True)
class Chain:
    """Where a launch stands in a chain whose kernels start early: see ``_pdl.py``.

    | field | meaning |
    |---|---|
    | ``after`` | 0: nothing is known of the kernel before; 1: it belongs to the chain; 2: and it writes the tokens |
    | ``zero_tail`` | rows of no group are set to zero; False: nobody reads them |
    | ``tiles``, ``tile_tokens`` | tiles of BT tokens that a launch in front of the kernel before has listed |
    """

    after: int = 0
    zero_tail: bool = True
    tiles: Tensor | None = None
    tile_tokens: int = 0


ALONE = Chain()


def prepare_rows(
    a: Tensor,
    a_scale: Tensor | None,
    offs: Tensor,
    packed: bool,
    quantize: tuple[torch.dtype, str] | None,
    out: Tensor,
    zero_tail: bool,
    c: Config,
    chain: Chain = ALONE,
) -> Rows:
    """Round and scale tokens as the tiles need them, list the tiles, zero the tail of ``out``."""
    (t, k), m, g = a.shape, out.shape[0], offs.numel()
    copied = a.stride(-1) != 1
    a = a.contiguous() if copied else a
    kind = "mx" if a_scale is not None else "quantize" if quantize is not None else "values"
    elem = elem_format(a.dtype if kind == "mx" else quantize[0] if quantize is not None else E4M3.dtype)
    high = kind != "values" or a.dtype != torch.bfloat16  # bf16 tokens are not in memory yet
    x16 = a.new_empty((t, k), dtype=torch.float16) if packed else a
    exponent = a.new_empty((t,), dtype=torch.int32) if packed else offs
    xb = a.new_empty((t, k), dtype=torch.bfloat16) if high else a
    bound = token_tiles(m, g, c)
    ready = chain.tiles is not None and chain.tile_tokens == c.tokens
    tiles = chain.tiles if chain.tiles is not None and ready else offs.new_empty((bound, 3))
    block = min(max(triton.next_power_of_2(k), 128), MAX_ROW)
    pdl = _pdl(c, a)
    wait = chain.after if pdl and not copied else 0  # a copy is the kernel before, and writes what is read first
    _rows_kernel[(t + (not ready),)](
        x16,
        xb,
        exponent,
        out,
        tiles,
        a,
        a_scale if a_scale is not None else a,
        offs,
        m,
        out.shape[1],
        k,
        g,
        bound,
        triton.cdiv(m, t),
        a.stride(0),
        a_scale.stride(0) if a_scale is not None else 0,
        G_POW2=triton.next_power_of_2(g),
        LIST=not ready,
        IN=kind,
        FP16=packed,
        PERM=_permuted(c, k, packed),
        BF16=high,
        ZERO_TAIL=zero_tail and chain.zero_tail,
        PDL=pdl,
        WAIT=wait,
        ONCE=k <= block,
        EMAX=elem.emax,
        THRESH=elem.threshold(quantize[1] if quantize is not None else "rceil"),
        FMAX=elem.max,
        E5M2=elem.dtype == torch.float8_e5m2,
        BT=c.tokens,
        BLOCK=block,
        num_warps=min(max(block // WARP_ROW, 1), 8),
        **early(wait > 0),
    )
    return Rows(x16, xb, exponent, tiles, ready)


def _pdl(c: Config, t: Tensor) -> bool:
    return c.pdl and dependent_launch(t.device)


def _permuted(c: Config, k: int, packed: bool) -> bool:
    return c.perm and packed and k % 16 == 0


def operands(
    q: Tensor, scale: Tensor, packed: PackedWeight | None, rows: Rows, index: Tensor | None, top_k: int, c: Config
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Weights and tokens as a kernel takes them, and the constants that follow from them."""
    k = q.shape[-1]
    e_hi = WINDOW[q.dtype][1]
    if (0, 0) < device.capability(q.device) < (8, 9) and q.dtype == torch.float8_e4m3fn:
        q = q.view(torch.uint8)
    flat = q.view(-1, k)
    tma_q = c.tma_q and packed is not None and tma_ready(flat)
    tma_x = c.tma_x and packed is not None and index is None and tma_ready(rows.fp16)
    pdl = _pdl(c, q)
    arguments = (
        q,
        scale,
        packed.scale if packed is not None else scale,
        packed.top if packed is not None else scale,
        rows.fp16,
        rows.bf16,
        TensorDescriptor(flat, list(flat.shape), [k, 1], [c.rows, c.step]) if tma_q else q,
        TensorDescriptor(rows.fp16, list(rows.fp16.shape), [k, 1], [c.tokens, c.step]) if tma_x else rows.fp16,
        rows.exponent,
        rows.tiles,
        index if index is not None else rows.tiles,
    )
    constants = {
        "PACKED": packed is not None,
        "E_HI": e_hi,
        "EVEN": k % c.step == 0,
        "BN": c.rows,
        "BT": c.tokens,
        "BK": c.step,
        "TMA_Q": tma_q,
        "TMA_X": tma_x,
        "PERM": _permuted(c, k, packed is not None),
        "PDL": pdl,
        "READY": rows.ready,
        "PREFETCH": c.prefetch and k % 16 == 0 and q.data_ptr() % 16 == 0,
        "STAGES": c.stages,
        "TOP_K": top_k if index is not None else 0,
        "num_warps": c.warps,
        "num_stages": c.stages,
        **early(pdl),
    }
    return arguments, constants


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
    chain: Chain = ALONE,
) -> Tensor:
    """Launch. ``a (M, K)``, ``b_q (G, N, K)`` with ``b_scale (G, N, ceil(K/32))`` uint8, ``offs (G,)`` -> ``(M, N)``.

    ``a`` is used in bf16, rounded to MXFP8 first if ``quantize`` = (elem_dtype, scale_mode), or is MXFP8 already and
    comes with ``a_scale (M, ceil(K/32))``. With ``index (M,)``, row m is row ``index[m] // top_k`` of a ``(T, K)``.
    ``packed``: fp16 where it is exact; None expands every tile to bf16. Weights and scales are contiguous.
    """
    m = a.shape[0] if index is None else index.shape[0]
    g, n, k = b_q.shape
    out = a.new_empty((m, n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    c = config or choose_config(m, g, k, a.device, packed is not None)
    splits = splits or choose_splits(m, g, n, k, c)
    split_k = triton.cdiv(triton.cdiv(k, c.step), splits) * c.step
    splits = triton.cdiv(k, split_k)
    rows = prepare_rows(a, a_scale, offs, packed is not None, quantize, out, splits == 1, c, chain)
    bias = bias.contiguous() if bias is not None else None
    target = out if splits == 1 else out.new_empty((splits, m, n), dtype=torch.float32)
    arguments, constants = operands(b_q, b_scale, packed, rows, index, top_k, c)
    _mx_decode_kernel[(triton.cdiv(n, c.rows), rows.tiles.shape[0], splits)](
        target,
        *arguments,
        bias if bias is not None else offs,
        m,
        n,
        k,
        rows.bf16.stride(0),
        split_k,
        HAS_BIAS=bias is not None and splits == 1,
        **constants,
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
            G_POW2=triton.next_power_of_2(g),
            HAS_BIAS=bias is not None,
            SPLITS=splits,
            BLOCK=block,
        )
    return out


def _case(tokens: int, packed: bool = True, k: int = 2048, index: bool = False) -> object:
    e, n = 8, 256
    q = torch.zeros(e, n, k, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(e, n, k // 32, dtype=torch.uint8)
    facts = PackedWeight(torch.zeros(e, -(-k // 128), n, 4, dtype=torch.uint8), torch.zeros(e, n, dtype=torch.uint8))
    x, offs = torch.zeros(tokens * e, k, dtype=torch.bfloat16), torch.zeros(e, dtype=torch.int32)
    rows = torch.zeros(tokens * e, dtype=torch.int32) if index else None
    weight = facts if packed else None
    return mx_decode_m_groups(x, None, rows, 2, q, scale, weight, offs, None, torch.bfloat16, splits=1)


OFFLINE = [
    Case("1 token", lambda: _case(1), expect={"cuda:90": r"mma\.sync"}),
    Case("8 tokens", lambda: _case(8), expect={"cuda:90": r"wgmma"}),
    Case("8 tokens, short K", lambda: _case(8, k=768), expect={"cuda:90": r"mma\.sync"}),
    Case("16 tokens, gathered", lambda: _case(16, index=True), expect={"cuda:90": r"wgmma"}, spills=16),
    Case("64 tokens", lambda: _case(64), expect={"cuda:90": r"wgmma"}),
    Case("8 tokens, no facts", lambda: _case(8, packed=False), expect={"cuda:90": r"mma"}),
]
