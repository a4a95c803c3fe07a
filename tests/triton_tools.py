"""Triton's interpreter, mended for numpy 2.4, where an array of one element is no index any more."""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def mend_interpreter() -> None:
    """Loop bounds that a kernel computes are arrays of one element; let ``range`` take them."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "mended", False):
        return

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.mended = True
    interpreter._patch_lang_tensor = patch

    # bfloat16 is kept as its bits, which products take for integers.
    builder = interpreter.InterpreterBuilder
    product = builder.create_dot

    def dot(self, a, b, *rest):
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return product(self, *wide, *rest)

    builder.create_dot = dot
