"""Runs Triton kernels in Triton's interpreter and corrects its errors, for tests without a GPU.

Triton reads `TRITON_INTERPRET` when it decorates a kernel, and decorates its own library when it is imported. So
`interpret` imports Triton again, and kernels must be imported after it. It removes the variable from the environment
afterwards, so that child processes do not inherit it.

The interpreter computes with numpy, which has neither bf16 nor fp8. It stores their bits as integers and, in 3.6 and
3.7, computes with these integers (without an error: a product of bf16 matrices is off by 1e8), truncates instead of
rounding to nearest even, and is one unit off in some casts to fp8. `_exact` computes all of these in float32 and casts
with torch, which rounds as the device does. Reductions of these types are refused, because the device's result cannot
be reproduced: reduce in float32.
"""

import os
import sys
import types
from typing import Any

import numpy as np
import torch


def interpret() -> None:
    """Makes this process interpret every kernel that it decorates from now on. Call it once."""
    # Other tests' libraries keep the Triton that they imported. The extension module cannot be loaded twice.
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]
    _exact(interpreter, tl)
    # Otherwise every integer operation is computed a second time in 64 bits.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # In 3.6 with numpy 2.4 a loaded number cannot be the bound of a loop. Remove this when Triton 3.6 is dropped.
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    # Otherwise the language is patched again, in a few milliseconds, for each launch and each call of a nested kernel.
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _exact(interpreter: Any, tl: Any) -> None:
    """Makes arithmetic with bf16 and fp8 exact, as on the device."""
    small = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    builder, handle, np_dtype = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._get_np_dtype
    first = {name: getattr(builder, name) for name in ("binary_op", "ternary_op", "unary_op", "create_rsqrt")}
    first_fp_to_fp, first_check = builder.create_fp_to_fp, interpreter.ReduceScanOpInterface.check_tensor

    def is_small(value: Any) -> bool:
        return value.dtype.scalar.name in small

    def widen(value: Any) -> Any:
        """The value in float32 if numpy does not have its type, else the value itself."""
        if not is_small(value):
            return value
        bits = torch.from_numpy(np.array(value.data, copy=True)).view(small[value.dtype.scalar.name])
        return handle(bits.float().numpy(), tl.float32)

    def narrow(data: Any, dtype: Any) -> Any:
        """Casts to `dtype`, rounding to nearest even; fp8 saturates."""
        dtype = dtype.scalar
        if dtype.name not in small:
            return handle(data.astype(np_dtype(dtype)), dtype)
        numbers = torch.from_numpy(np.array(data, dtype=np.float32, copy=True))
        if dtype.primitive_bitwidth == 8:
            largest = torch.finfo(small[dtype.name]).max
            numbers = numbers.clamp(-largest, largest)
        bits = numbers.to(small[dtype.name]).view(torch.uint8 if dtype.primitive_bitwidth == 8 else torch.int16)
        return handle(bits.numpy().view(np_dtype(dtype)), dtype)

    def widened(name: str) -> Any:
        """The builder's function of this name, computed on the values of bf16 and fp8 operands, not their bits."""

        def compute(self: Any, *args: Any) -> Any:
            values = [arg for arg in args if isinstance(arg, handle)]
            moved = args[-1] is np.where  # a selection keeps the bits
            if moved or not any(map(is_small, values)):
                return first[name](self, *args)
            result = first[name](self, *(widen(arg) if isinstance(arg, handle) else arg for arg in args))
            return result if result.data.dtype == bool else narrow(result.data, values[-1].dtype)

        return compute

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        return narrow(widen(src).data, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return first_fp_to_fp(self, src, dst_type, rounding_mode)
        return cast_impl(self, src, dst_type)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return narrow(widen(x).data * widen(y).data + widen(z).data, z.dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = (widen(side).data.astype(d.data.dtype) for side in (a, b))
        # einsum sums in one order; in matmul the order depends on a row's place in its tile on some processors.
        return handle(np.einsum("...mk,...kn->...mn", left, right) + d.data, d.dtype.scalar)

    def check_tensor(self: Any, inputs: Any) -> None:
        first_check(self, inputs)
        if any(arg.dtype.name in small for arg in inputs):
            raise TypeError("a reduction of bf16 or fp8: cast to float32 first")

    for name in first:
        setattr(builder, name, widened(name))
    for function in (cast_impl, create_fp_to_fp, create_fma, create_dot):
        setattr(builder, function.__name__, function)
    interpreter.ReduceScanOpInterface.check_tensor = check_tensor
