"""Gate and up projection of few tokens per group and SwiGLU in one launch: ``weight * silu(x @ gate.T) * (x @ up.T)``.

    weights of group g (2I, K)              tokens of group g           out (M, I)
      +--------------+  gate rows i         +------------+             +------+
      | BN x BK tile |                   x  | BT x BK    |.T  ---->    | BT   | silu(gate) * up, rounded once
      +--------------+                      +------------+             +------+
      | BN x BK tile |  up rows I + i        read twice, mostly from L2
      +--------------+

Grid     (tiles of I, token tiles) as in ``mx_decode.py``.
Writes   every element of out once: rows beyond offs[-1] are zeros, written by ``_rows_kernel``.
Traffic  1 + 1/32 bytes per weight, once per BT tokens; the (M, 2I) intermediate never exists.
Index    int64 for group, row and token bases.
Source   ``mx_decode.py``: tiles, forms and exactness are the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._offline import Case
from .mx_decode import (
    ALONE,
    Chain,
    Config,
    PackedWeight,
    choose_config,
    choose_splits,
    find_tile,
    mx_decode_m_groups,
    operands,
    prepare_rows,
    tile_product,
)


@triton.jit(do_not_specialize=["M"])
def _mx_decode_swiglu_kernel(
    out_ptr,  # (M, I)
    q_ptr,  # (G, 2I, K) e4m3 or e5m2: gate rows, then up rows
    s_ptr,  # (G, 2I, ceil(K/32)) uint8
    p_ptr,  # (G, ceil(K/128), 2I, 4) uint8, if PACKED
    top_ptr,  # (G, 2I) uint8, if PACKED
    x16_ptr,  # (T, K) fp16, if PACKED
    xb_ptr,  # (T, K) bf16
    q_desc,  # (G * 2I, K) as boxes (BN, BK), if TMA_Q
    x_desc,  # (T, K) fp16 as boxes (BT, BK), if TMA_X
    exp_ptr,  # (T,) int32, if PACKED
    tiles_ptr,  # (token tiles, 3) int32
    index_ptr,  # (M,) int32 or int64: TOP_K times the row of x, if TOP_K
    weight_ptr,  # (T * k,) routing weights, if WEIGHTED
    order_ptr,  # (M,) int32: slot of every row, if WEIGHTED
    M,
    N,  # 2I
    K,
    stride_xb,
    WEIGHTED: tl.constexpr,
    PACKED: tl.constexpr,
    E_HI: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_X: tl.constexpr,
    PERM: tl.constexpr,
    PDL: tl.constexpr,
    READY: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    TOP_K: tl.constexpr,
):
    # 1. Which tokens, which columns.
    g, t0, end = find_tile(tiles_ptr, q_ptr, N, K, BN, PDL, READY, PREFETCH)
    if g < 0:
        return

    # 2. Coordinates.
    I = N // 2  # noqa: E741
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(i, I - 1)
    r0 = g * N + tl.program_id(0) * BN

    # 3. Two products. One after the other: both at once would need the registers of two pipelines.
    gate = tile_product(
        q_ptr, s_ptr, p_ptr, top_ptr, x16_ptr, xb_ptr, q_desc, x_desc, exp_ptr, index_ptr, g, row, r0, t0, end, N,
        K, stride_xb, 0, K, PACKED, E_HI, EVEN, BN, BT, BK, TMA_Q, TMA_X, PERM, STAGES, TOP_K,
    )  # fmt: skip
    up = tile_product(
        q_ptr, s_ptr, p_ptr, top_ptr, x16_ptr, xb_ptr, q_desc, x_desc, exp_ptr, index_ptr, g, row + I, r0 + I, t0,
        end, N, K, stride_xb, 0, K, PACKED, E_HI, EVEN, BN, BT, BK, TMA_Q, TMA_X, PERM, STAGES, TOP_K,
    )  # fmt: skip

    # 4. SwiGLU in fp32, one rounding, store.
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    t = t0 + tl.arange(0, BT)
    if WEIGHTED:
        slot = tl.load(order_ptr + t, mask=t < end, other=0)
        hidden *= tl.load(weight_ptr + slot).to(tl.float32)[None, :]
    at = t.to(tl.int64)[None, :] * I + i[:, None]
    tl.store(out_ptr + at, hidden.to(out_ptr.dtype.element_ty), mask=(t < end)[None, :] & (i < I)[:, None])


def fits(m: int, g: int, n: int, k: int, where: torch.device, packed: bool) -> bool:
    """Whether one launch fills the chip: K is not split here."""
    return choose_splits(m, g, n // 2, k, choose_config(m, g, k, where, packed)) == 1


def mx_decode_swiglu(
    a: Tensor,
    a_scale: Tensor | None,
    index: Tensor | None,
    top_k: int,
    b_q: Tensor,
    b_scale: Tensor,
    packed: PackedWeight | None,
    offs: Tensor,
    weights: Tensor | None,
    order: Tensor | None,
    out_dtype: torch.dtype,
    quantize: tuple[torch.dtype, str] | None = None,
    config: Config | None = None,
) -> Tensor:
    """Launch. ``a (M, K)``, ``b_q (G, 2I, K)`` gate rows then up rows -> ``(M, I)``; see ``mx_decode_m_groups``.

    ``weights (T, k)`` and ``order (M,)``: each row is multiplied by its routing weight.
    """
    args = (a, a_scale, index, top_k, b_q, b_scale, packed, offs, weights, order, out_dtype, quantize, config)
    return _swiglu(*args, ALONE)[0]


def _swiglu(
    a: Tensor,
    a_scale: Tensor | None,
    index: Tensor | None,
    top_k: int,
    b_q: Tensor,
    b_scale: Tensor,
    packed: PackedWeight | None,
    offs: Tensor,
    weights: Tensor | None,
    order: Tensor | None,
    out_dtype: torch.dtype,
    quantize: tuple[torch.dtype, str] | None,
    config: Config | None,
    chain: Chain,
) -> tuple[Tensor, Chain]:
    """``mx_decode_swiglu`` within a chain, and how the chain goes on."""
    m = a.shape[0] if index is None else index.shape[0]
    g, n, k = b_q.shape
    out = a.new_empty((m, n // 2), dtype=out_dtype)
    if out.numel() == 0:
        return out, ALONE
    c = config or choose_config(m, g, k, a.device, packed is not None)
    rows = prepare_rows(a, a_scale, offs, packed is not None, quantize, out, True, c, chain)
    arguments, constants = operands(b_q, b_scale, packed, rows, index, top_k, c)
    _mx_decode_swiglu_kernel[(triton.cdiv(n // 2, c.rows), rows.tiles.shape[0])](
        out,
        *arguments,
        weights if weights is not None else offs,
        order if order is not None else offs,
        m,
        n,
        k,
        rows.bf16.stride(0),
        WEIGHTED=weights is not None,
        **constants,
    )
    return out, Chain(2, chain.zero_tail, rows.tiles, c.tokens)


def mx_decode_mlp(
    x: Tensor,
    order: Tensor,
    weights: Tensor,
    up: tuple[Tensor, Tensor, PackedWeight | None],
    down: tuple[Tensor, Tensor, PackedWeight | None],
    offs: Tensor,
    quantize: tuple[torch.dtype, str] | None = None,
    up_config: Config | None = None,
    down_config: Config | None = None,
    after_route: bool = True,
) -> Tensor:
    """Launch both projections as one chain: ``x (T, K)``, routed ``order (M,)`` -> ``(M, H)``, to be summed per token.

    ``up``, ``down``: values, scales and packed scales. ``weights (T, k)``. ``after_route``: the kernel before is that
    of ``route``. Rows of no group are not written. Four launches, each started while the one before it still runs.
    """
    chain = Chain(1 if after_route else 0, zero_tail=False)
    top_k, dtype = weights.shape[1], x.dtype
    args = (x, None, order, top_k, *up, offs, weights.contiguous(), order, dtype, quantize, up_config)
    hidden, chain = _swiglu(*args, chain)
    return mx_decode_m_groups(
        hidden, None, None, 0, *down, offs, None, dtype, quantize, config=down_config, chain=chain
    )


def _case(tokens: int) -> object:
    e, i, k = 8, 256, 2048
    q = torch.zeros(e, 2 * i, k, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(e, 2 * i, k // 32, dtype=torch.uint8)
    facts = PackedWeight(
        torch.zeros(e, k // 128, 2 * i, 4, dtype=torch.uint8), torch.zeros(e, 2 * i, dtype=torch.uint8)
    )
    x, offs = torch.zeros(tokens * e, k, dtype=torch.bfloat16), torch.zeros(e, dtype=torch.int32)
    order = torch.zeros(tokens * e, dtype=torch.int32)
    weights = torch.zeros(tokens * e, dtype=torch.bfloat16)
    return mx_decode_swiglu(x, None, order, 1, q, scale, facts, offs, weights, order, torch.bfloat16)


def _mlp(tokens: int) -> object:
    e, i, k = 8, 256, 512
    x, offs = torch.zeros(tokens * e, k, dtype=torch.bfloat16), torch.zeros(e, dtype=torch.int32)
    order, weights = torch.zeros(2 * tokens * e, dtype=torch.int32), torch.zeros(tokens * e, 2, dtype=torch.bfloat16)

    def weight(n: int, k: int) -> tuple[Tensor, Tensor, PackedWeight]:
        facts = torch.zeros(e, k // 128, n, 4, dtype=torch.uint8), torch.zeros(e, n, dtype=torch.uint8)
        q, scale = torch.zeros(e, n, k, dtype=torch.uint8), torch.zeros(e, n, k // 32, dtype=torch.uint8)
        return q.view(torch.float8_e4m3fn), scale, PackedWeight(*facts)

    down = replace(choose_config(2 * tokens * e, e, i, x.device, True), prefetch=True)
    return mx_decode_mlp(x, order, weights, weight(2 * i, k), weight(k, i), offs, down_config=down)


OFFLINE = [
    Case("1 token", lambda: _case(1), expect={"cuda:90": r"mma\.sync"}),
    Case("8 tokens", lambda: _case(8), expect={"cuda:90": r"wgmma"}),
    Case("64 tokens", lambda: _case(64), expect={"cuda:90": r"wgmma"}, spills=40),
    Case("both, 4 tokens", lambda: _mlp(4)),
    Case("both, 32 tokens", lambda: _mlp(32), expect={"cuda:90": r"wgmma"}, spills=40),
]
