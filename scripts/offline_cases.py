"""Calls that ``offline_compile.py`` compiles for kernel modules which list none themselves (``OFFLINE``)."""

from __future__ import annotations

import torch
from torch import Tensor

from mxmoe.kernels import (
    blocked,
    dequantize,
    fake_quantize,
    group_sum,
    mx_decode,
    mx_decode_swiglu,
    quantize_both,
    quantize_colwise,
    quantize_rowwise,
    quantize_square,
)
from mxmoe.kernels._offline import Case

BF16, E4M3, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
OFFS = torch.tensor([32, 96, 160], dtype=torch.int32)
MODE = "rceil"
MMA = {"cuda:90": r"mma\.sync|wgmma", "cuda:100": r"mma\.sync|tcgen05", "cuda:120": r"mma\.sync"}


def _x(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def _u8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=U8)


def _q(*shape: int) -> Tensor:
    return _u8(*shape).view(E4M3)


CASES = {
    "quantize_rowwise": [
        Case("plain", lambda: quantize_rowwise.quantize_rowwise(_x(192, 1024), None, False, E4M3, MODE)),
        Case("groups", lambda: quantize_rowwise.quantize_rowwise(_x(192, 1024), OFFS, False, E4M3, MODE)),
        Case("blocked groups", lambda: quantize_rowwise.quantize_rowwise(_x(192, 1024), OFFS, True, E4M3, MODE)),
        Case("blocked experts", lambda: quantize_rowwise.quantize_rowwise(_x(3, 128, 1024), None, True, E4M3, MODE)),
    ],
    "quantize_colwise": [
        Case("plain", lambda: quantize_colwise.quantize_colwise(_x(192, 1024), None, False, E4M3, MODE)),
        Case("groups", lambda: quantize_colwise.quantize_colwise(_x(192, 1024), OFFS, False, E4M3, MODE)),
        Case(
            "blocked groups",
            lambda: quantize_colwise.quantize_colwise(_x(192, 1024), OFFS, True, E4M3, MODE),
            spills=16,
        ),
        Case(
            "blocked experts",
            lambda: quantize_colwise.quantize_colwise(_x(3, 128, 1024), None, True, E4M3, MODE),
            spills=24,  # on sm_120 only, at 96 registers
        ),
        Case("triton", lambda: quantize_colwise.quantize_colwise_triton(_x(192, 1024), None, False, E4M3, MODE)),
        Case("triton groups", lambda: quantize_colwise.quantize_colwise_triton(_x(192, 1024), OFFS, False, E4M3, MODE)),
    ],
    "quantize_both": [
        Case("groups", lambda: quantize_both.quantize_both(_x(192, 1024), OFFS, False, E4M3, MODE)),
        Case("blocked groups", lambda: quantize_both.quantize_both(_x(192, 1024), OFFS, True, E4M3, MODE)),
        Case("triton", lambda: quantize_both.quantize_both_triton(_x(192, 1024), OFFS, False, E4M3, MODE)),
    ],
    "quantize_square": [
        Case("row-major", lambda: quantize_square.quantize_square(_x(3, 128, 1024), False, E4M3, MODE)),
        Case("column-major", lambda: quantize_square.quantize_square(_x(3, 128, 1024), True, E4M3, MODE)),
        Case("both", lambda: quantize_square.quantize_square_both(_x(3, 128, 1024), E4M3, MODE)),
    ],
    "dequantize": [
        Case("rows", lambda: dequantize.dequantize(_q(192, 1024), _u8(192, 32), "rowwise", None, None, 192, BF16)),
        Case(
            "columns of groups",
            lambda: dequantize.dequantize(_q(1024, 256).t(), _u8(1024, 8).t(), "colwise", OFFS, OFFS, 192, BF16),
        ),
        Case(
            "columns of groups, less room than they may need",
            lambda: dequantize.dequantize(_q(1024, 192).t(), _u8(1024, 6).t(), "colwise", OFFS, OFFS, 192, BF16),
        ),
    ],
    "fake_quantize": [
        Case("rows", lambda: fake_quantize.fake_quantize(_x(192, 1024), "rowwise", OFFS, E4M3, MODE, BF16)),
        Case("columns", lambda: fake_quantize.fake_quantize(_x(192, 1024), "colwise", OFFS, E4M3, MODE, BF16)),
        Case(
            "experts, columns", lambda: fake_quantize.fake_quantize(_x(3, 128, 1024), "colwise", None, E4M3, MODE, BF16)
        ),
        Case("square", lambda: fake_quantize.fake_quantize(_x(3, 128, 1024), "square", None, E4M3, MODE, BF16)),
        Case("both", lambda: fake_quantize.fake_quantize_both(_x(192, 1024), OFFS, E4M3, MODE, BF16)),
        Case(
            "rows, fp16", lambda: fake_quantize.fake_quantize(_x(192, 1024).half(), "rowwise", OFFS, E4M3, MODE, BF16)
        ),
        Case(
            "square, fp16",
            lambda: fake_quantize.fake_quantize(_x(3, 128, 1024).half(), "square", None, E4M3, MODE, BF16),
        ),
        Case("both, fp16", lambda: fake_quantize.fake_quantize_both(_x(192, 1024).half(), OFFS, E4M3, MODE, BF16)),
    ],
    "blocked": [
        Case("one matrix", lambda: blocked.to_blocked(_u8(256, 32))),
        Case("experts", lambda: blocked.to_blocked_experts(_u8(3, 256, 32))),
        Case("m groups", lambda: blocked.to_blocked_m_groups(_u8(192, 32), OFFS, "parallel")),
        Case("m groups, naive", lambda: blocked.to_blocked_m_groups(_u8(192, 32), OFFS, "naive")),
        Case("k groups", lambda: blocked.to_blocked_k_groups(_u8(256, 192), OFFS, "parallel")),
        Case("k groups, naive", lambda: blocked.to_blocked_k_groups(_u8(256, 192), OFFS, "naive")),
    ],
    "group_sum": [Case("bf16", lambda: group_sum.group_sum(_x(192, 1024), OFFS))],
    "mx_decode": [
        Case(
            "bf16 tokens",
            lambda: mx_decode.mx_decode_m_groups(
                _x(192, 1024), None, None, 1, _q(3, 256, 1024), _u8(3, 256, 32), None, OFFS, None, BF16
            ),
            expect=MMA,
            spills=96,  # on sm_120; 64 tokens per expert, the largest tile of tokens
        ),
        Case(
            "tokens rounded on the way, split K",
            lambda: mx_decode.mx_decode_m_groups(
                *(_x(8, 1024), None, None, 1, _q(3, 256, 1024), _u8(3, 256, 32), None, OFFS, None, BF16, (E4M3, MODE)),
                splits=2,
            ),
            expect=MMA,
        ),
    ],
    "mx_decode_swiglu": [
        Case(
            "bf16 tokens",
            lambda: mx_decode_swiglu.mx_decode_swiglu(
                _x(192, 1024), None, None, 1, _q(3, 256, 1024), _u8(3, 256, 32), None, OFFS, None, None, BF16
            ),
            expect=MMA,
            spills=184,  # on sm_90 (96 and 80 on sm_100 and sm_120): two products of the largest tile of tokens
        ),
    ],
}
