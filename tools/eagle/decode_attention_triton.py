# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803
"""Triton kernel of ``decode_attention``: a program per (row, key-value head), online softmax over the row's length."""

import triton
import triton.language as tl

__all__ = ["attend_rows"]


@triton.jit
def attend_rows(
    q_ptr, k_ptr, v_ptr, length_ptr, out_ptr, max_len, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Layouts as in ``decode_attention``; GROUP query heads share one key-value head and fill 16 matrix rows."""
    row, head = tl.program_id(0), tl.program_id(1)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"  # float32 inputs only; bf16 ignores it
    length = tl.load(length_ptr + row).to(tl.int32)
    g, d, n = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, BLOCK)
    q_at = (row * KV_HEADS + head) * GROUP * DIM + g[:, None] * DIM + d[None, :]
    q = tl.load(q_ptr + q_at, mask=g[:, None] < GROUP, other=0.0)
    base = (row * KV_HEADS + head).to(tl.int64) * max_len * DIM
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DIM], tl.float32)
    for start in range(0, length, BLOCK):
        index = start + n
        at = base + index[:, None] * DIM + d[None, :]
        inside = index[:, None] < length
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        scores = tl.where(
            index[None, :] < length, tl.dot(q, tl.trans(k), input_precision=precision) * scale, float("-inf")
        )
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        top = new_top
    tl.store(out_ptr + q_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=g[:, None] < GROUP)
