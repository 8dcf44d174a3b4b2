"""Repairs Triton 3.6's interpreter for fp8, bf16 and MX kernels on a CPU. For tests only.

The stock interpreter is wrong without an error (``docs/numerics.md``): float casts to and from bf16 and fp8,
arithmetic and ``tl.dot`` on bf16, runtime loop bounds under numpy >= 2.4; ``tl.dot_scaled`` is missing. Each is
replaced by the equivalent of torch on a CPU.
"""

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic

FLOATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}
SATURATING = {"fp8e4nv": 448.0}


def _to_torch(data, ty):
    np_bits, torch_bits = BITS[data.dtype.itemsize]
    return torch.from_numpy(np.ascontiguousarray(data).view(np_bits)).view(FLOATS[ty.name])


def _to_numpy(t, ty):
    _, torch_bits = BITS[t.element_size()]
    return t.contiguous().view(torch_bits).numpy().view(interpreter._get_np_dtype(ty))


def _cast(data, src, dst):
    x = _to_torch(data, src)
    if src.name != "fp64":
        x = x.float()
    if dst.name in SATURATING:  # cvt.rn.satfinite, whatever the torch version does above the maximum
        limit = SATURATING[dst.name]
        x = torch.where(torch.isnan(x), x, x.clamp(-limit, limit))
    return _to_numpy(x.to(FLOATS[dst.name]), dst)


def _cast_impl(original):
    def cast(self, src, dst_type):
        s, d = src.dtype.scalar, dst_type.scalar
        if s.name in FLOATS and d.name in FLOATS:
            return interpreter.TensorHandle(_cast(src.data, s, d).reshape(src.data.shape), d)
        if d.name in ("bf16", "fp8e4nv", "fp8e5") and s.is_int():
            return interpreter.TensorHandle(_cast(src.data.astype(np.float32), tl.float32, d), d)
        if s.name in ("bf16", "fp8e4nv", "fp8e5") and d.is_int():
            values = _cast(src.data, s, tl.float32)
            return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(d)), d)
        return original(self, src, dst_type)

    return cast


def _dot_impl(original):
    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar.name not in FLOATS:
            return original(self, a, b, d, input_precision, max_num_imprecise_acc)
        x, y = _to_torch(a.data, a.dtype.scalar), _to_torch(b.data, b.dtype.scalar)
        if x.dtype != torch.float64:
            x, y = x.float(), y.float()
        return interpreter.TensorHandle((x @ y).numpy().astype(d.data.dtype) + d.data, d.dtype.scalar)

    return dot


def _bf16_binary(original, operation):
    """bf16 is stored as uint16 there, and arithmetic on it works on the bits."""

    def compute(self, lhs, rhs):
        if lhs.dtype.scalar.name != "bf16":
            return original(self, lhs, rhs)
        a, b = (_to_torch(v.data, tl.bfloat16).reshape(v.data.shape) for v in (lhs, rhs))
        return interpreter.TensorHandle(_to_numpy(operation(a, b), tl.bfloat16), tl.bfloat16)

    return compute


def _scaled(values, scale, k_last):
    x = _to_torch(values.data, values.dtype.scalar).float()
    if scale is None:
        return x
    byte = torch.from_numpy(scale.data.astype(np.int32))
    factor = torch.where(byte == 255, torch.nan, torch.exp2(byte.double() - 127).float()).repeat_interleave(32, -1)
    return x * (factor if k_last else factor.transpose(-2, -1))


def _create_dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, fast_math, lhs_k, rhs_k, acc):
    product = _scaled(lhs, lhs_scale, True) @ _scaled(rhs, rhs_scale, False)
    return interpreter.TensorHandle(product.numpy() + acc.data, acc.dtype.scalar)


def install():
    """Patch the interpreter once; does nothing when kernels are compiled."""
    if not triton.knobs.runtime.interpret or getattr(install, "done", False):
        return
    install.done = True
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch_lang_tensor
    builder = interpreter.InterpreterBuilder
    cast = _cast_impl(builder.cast_impl)
    builder.cast_impl = cast
    builder.create_dot = _dot_impl(builder.create_dot)
    builder.create_dot_scaled = _create_dot_scaled
    builder.create_fmul = _bf16_binary(builder.create_fmul, torch.mul)
    builder.create_fadd = _bf16_binary(builder.create_fadd, torch.add)
    builder.create_fsub = _bf16_binary(builder.create_fsub, torch.sub)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if rounding_mode is not None and rounding_mode != ir.ROUNDING_MODE.RTNE:
            raise NotImplementedError("the repaired interpreter rounds to nearest even only")
        return cast(self, src, dst_type)

    builder.create_fp_to_fp = create_fp_to_fp
    dot_scaled = TritonSemantic.dot_scaled

    def constexpr_formats(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *rest):
        def wrap(f):
            return f if isinstance(f, tl.constexpr) else tl.constexpr(f)

        return dot_scaled(self, lhs, lhs_scale, wrap(lhs_format), rhs, rhs_scale, wrap(rhs_format), *rest)

    TritonSemantic.dot_scaled = constexpr_formats
    fast_scans()


def fast_scans():
    """A running maximum as one numpy call: the interpreter's generic scan calls Python once per element."""
    scan = interpreter.ScanOps.generic_scan

    def generic_scan(self, input):
        if getattr(self.combine_fn, "__name__", "") == "_maximum" and not self.reverse:
            return [self.to_tensor(np.maximum.accumulate(t.handle.data, axis=self.axis), t.dtype) for t in input]
        return scan(self, input)

    interpreter.ScanOps.generic_scan = generic_scan
