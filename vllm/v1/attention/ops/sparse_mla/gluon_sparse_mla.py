# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Sparse MLA with explicit layouts, in Gluon, for tensor cores that take mma.sync.

The same computation as `_sparse_mla_kernel` of triton_sparse_mla.py, which launches it.
What Triton's layouts cannot have and this kernel does: each warp computes the scores of
all rows over a quarter of the 576 values, so that queries stay in registers, no product
is computed twice, and a warp has several independent sums; the quarters meet in shared
memory, from where a warp takes whole rows of scores. Rows of the cache arrive by
cp.async, one tile ahead. fp8 rows are widened once per tile and not scaled: their
scales go to the scores and to the weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

_MODEL = gl.constexpr(0)
_FP8 = gl.constexpr(1)
_DS_MLA = gl.constexpr(2)
_LATENT = gl.constexpr(512)
_ROPE = gl.constexpr(64)
_GROUP = gl.constexpr(128)
_QUARTER = gl.constexpr(16)
_MASKED = gl.constexpr(-3.0e38)
_LOWEST = gl.constexpr(-1.0e30)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _score_layout(block_heads, warps):
    """Of partial scores [4, heads, rows]: a set of warps for each quarter."""
    head_warps = block_heads // 16
    shape = [4, head_warps, warps // 4 // head_warps]
    return gl.NVMMADistributedLayout([2, 0], shape, [1, 16, 8])


@gluon.constexpr_function
def _softmax_layout(warps):
    """Of scores [heads, rows]: 8 threads for a head, 4 rows each."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _out_layout(warps):
    """Of a sum [heads, 128]: all heads a warp, the values among the warps."""
    return gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8])


@gluon.constexpr_function
def _copy_layout(bits, width, warps):
    """Of [4, N, width] items: 16 bytes a thread, neighbours along a row."""
    items = 128 // bits
    lanes = min(width // items, 32)
    if width * bits == 256:
        # A quarter of a row's rotated part: the other quarters are its neighbours.
        return gl.BlockedLayout([1, 1, items], [4, 4, 2], [1, warps, 1], [2, 0, 1])
    return gl.BlockedLayout(
        [1, 1, items], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def _scale_layout(warps):
    """Of the scales [4, N] of a tile: a warp copies those of a group."""
    return gl.BlockedLayout([1, 1], [1, 32], [4, warps // 4], [1, 0])


@gluon.constexpr_function
def _shared_layout(bits, width):
    """Rows in pieces of 16 bytes, swizzled so that ldmatrix has no bank conflicts."""
    items = 128 // bits
    pieces = width // items
    phases = min(pieces, 8)
    return gl.SwizzledSharedLayout(items, 8 // phases, phases, [2, 1, 0])


@gluon.constexpr_function
def _part_layout(layout):
    """Of one quarter in memory that `layout` describes as [4, rows, width]."""
    return gl.SwizzledSharedLayout(
        layout.vec, layout.per_phase, layout.max_phase, [1, 0]
    )


@gluon.constexpr_function
def _rows_of(layout):
    """The layout of a vector [N] that is broadcast to [4, N, width]."""
    return gl.SliceLayout(0, gl.SliceLayout(2, layout))


@gluon.jit
def _gather_part(
    ptr, stride: gl.constexpr, slots, tile, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """Start copying [4, N, WIDTH] items; zeros for negative slots [N]."""
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None]
    valid = (slots >= 0)[None, :, None]
    start = gl.maximum(slots, 0).to(gl.int64) * stride
    at = ptr + start[None, :, None] + (part * WIDTH + dim)
    async_copy.async_copy_global_to_shared(tile, at, valid)


@gluon.jit
def _next_slots(rows_ptr, rope_ptr, indices_ptr, begin, end, BLOCK_N: gl.constexpr):
    """The entries from `begin` on, in the layouts of the three copies."""
    warps: gl.constexpr = gl.num_warps()
    bits: gl.constexpr = rows_ptr.dtype.element_ty.primitive_bitwidth
    rope_bits: gl.constexpr = rope_ptr.dtype.element_ty.primitive_bitwidth
    rows: gl.constexpr = _rows_of(_copy_layout(bits, _GROUP, warps))
    rope: gl.constexpr = _rows_of(_copy_layout(rope_bits, _QUARTER, warps))
    scales: gl.constexpr = gl.SliceLayout(0, _scale_layout(warps))
    return (
        _load_slots(indices_ptr, begin, end, BLOCK_N, rows),
        _load_slots(indices_ptr, begin, end, BLOCK_N, rope),
        _load_slots(indices_ptr, begin, end, BLOCK_N, scales),
    )


@gluon.jit
def _gather(
    rows_ptr, scales_ptr, rope_ptr, slots, buffers, FORMAT: gl.constexpr,
    HAS_ROPE: gl.constexpr,
):  # fmt: skip
    """Start copying rows into `buffers`; zeros where a slot is negative."""
    tile, rope, scales = buffers
    warps: gl.constexpr = gl.num_warps()
    bits: gl.constexpr = rows_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = _copy_layout(bits, _GROUP, warps)
    items: gl.constexpr = _LATENT + _ROPE if HAS_ROPE else _LATENT
    stride: gl.constexpr = 656 if FORMAT == _DS_MLA else items
    _gather_part(rows_ptr, stride, slots[0], tile, _GROUP, layout)
    if HAS_ROPE:
        rope_bits: gl.constexpr = rope_ptr.dtype.element_ty.primitive_bitwidth
        rope_layout: gl.constexpr = _copy_layout(rope_bits, _QUARTER, warps)
        rope_stride: gl.constexpr = 328 if FORMAT == _DS_MLA else items
        first: gl.constexpr = rope_stride - _ROPE
        rope_ptr += first
        _gather_part(rope_ptr, rope_stride, slots[1], rope, _QUARTER, rope_layout)
    if FORMAT == _DS_MLA:
        group = gl.arange(0, 4, gl.SliceLayout(1, _scale_layout(warps)))[:, None]
        start = gl.maximum(slots[2], 0).to(gl.int64) * 164 + 128
        at = scales_ptr + start[None, :] + group
        valid = (slots[2] >= 0)[None, :]
        async_copy.async_copy_global_to_shared(scales, at, valid)
    async_copy.commit_group()


@gluon.jit
def _widen(codes, dtype: gl.constexpr):
    """e4m3 bytes as `dtype`, exactly, four at a time.

    The bits are moved to their places in the wider type, which is the value times a
    power of two, 2^-120 in bfloat16 and 2^-8 in float16; subnormals included.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, scale, none;
            mov.b32 scale, 0x7b807b80;
            mov.b32 none, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 a, a, none, c, 0xEA;
            lop3.b32 b, b, none, d, 0xEA;
            fma.rn.bf16x2 $0, a, scale, none;
            fma.rn.bf16x2 $1, b, scale, none;
            }""",
            "=r,=r,r",
            [codes],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, scale, none;
            mov.b32 scale, 0x5c005c00;
            mov.b32 none, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 1;
            shr.u32 d, b, 1;
            and.b32 c, c, 0x3f803f80;
            and.b32 d, d, 0x3f803f80;
            lop3.b32 a, a, none, c, 0xEA;
            lop3.b32 b, b, none, d, 0xEA;
            fma.rn.f16x2 $0, a, scale, none;
            fma.rn.f16x2 $1, b, scale, none;
            }""",
            "=r,=r,r",
            [codes],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )


@gluon.jit
def _parts(memory):
    """Shared memory [4, ...] such that its quarters can be taken by their number."""
    layout: gl.constexpr = _part_layout(memory.layout)
    return memory._reinterpret(memory.dtype, memory.shape, layout)


@gluon.jit
def _load_slots(indices_ptr, begin, end, N: gl.constexpr, layout: gl.constexpr):
    """The entries `begin` to `begin + N` of an index row; -1 from `end` on."""
    column = begin + gl.arange(0, N, layout)
    return gl.load(indices_ptr + column, mask=column < end, other=-1)


@gluon.jit
def _widen_tile(codes, wide):
    """A quarter at a time, since the whole takes many registers."""
    layout: gl.constexpr = _copy_layout(16, _GROUP, gl.num_warps())
    for part in gl.static_range(4):
        values = _widen(codes.slice(part, 1).load(layout), wide.dtype)
        wide.slice(part, 1).store(values)


@gluon.jit
def _partial_scores(
    q, q_rope, tile, rope, scales, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    FORMAT: gl.constexpr, HAS_ROPE: gl.constexpr,
):  # fmt: skip
    """Products of each quarter of the values: [4, H, N], float32."""
    layout: gl.constexpr = _score_layout(BLOCK_H, gl.num_warps())
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    zeros = gl.zeros([4, BLOCK_H, BLOCK_N], gl.float32, layout)
    scores = mma_v2(q, tile.permute((0, 2, 1)).load(right), zeros)
    if FORMAT == _DS_MLA:
        scores = scores * scales.load(gl.SliceLayout(1, layout))[:, None, :]
    if HAS_ROPE:
        scores = mma_v2(q_rope, rope.permute((0, 2, 1)).load(right), scores)
    return scores


@gluon.jit
def _add_values(
    acc, weights, weights_sm, shrink, shrink_sm, tile, scales,
    layout: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """acc * shrink + weights times the latents of a tile; weights go through memory."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    dtype: gl.constexpr = tile.dtype
    shrink_sm.store(shrink)
    if FORMAT == _DS_MLA:
        for part in gl.static_range(4):
            scale = scales.slice(part, 1).load(weights.type.layout)
            weights_sm[part].store((weights * scale).to(dtype))
    else:
        weights_sm[0].store(weights.to(dtype))
    factor = shrink_sm.load(gl.SliceLayout(1, layout))[:, None]
    values = _parts(tile)
    p0 = weights_sm[0].load(left)
    p1, p2, p3 = p0, p0, p0
    if FORMAT == _DS_MLA:
        p1 = weights_sm[1].load(left)
        p2 = weights_sm[2].load(left)
        p3 = weights_sm[3].load(left)
    return (
        mma_v2(p0, values.index(0).load(right), acc[0] * factor),
        mma_v2(p1, values.index(1).load(right), acc[1] * factor),
        mma_v2(p2, values.index(2).load(right), acc[2] * factor),
        mma_v2(p3, values.index(3).load(right), acc[3] * factor),
    )


@gluon.jit
def _step(
    rows_ptr, scales_ptr, rope_ptr, indices_ptr, begin, end, scale_log2, q, q_rope,
    now, then, wide, wide_rope, scores_sm, weights_sm, shrink_sm, state,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, FORMAT: gl.constexpr,
    HAS_ROPE: gl.constexpr,
):  # fmt: skip
    """Attend to the tile in `now`, while the next one is copied into `then`."""
    acc, peak, total, next_slots = state
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = _softmax_layout(warps)
    async_copy.wait_group(0)
    _gather(rows_ptr, scales_ptr, rope_ptr, next_slots, then, FORMAT, HAS_ROPE)
    ahead = begin + 2 * BLOCK_N
    next_slots = _next_slots(rows_ptr, rope_ptr, indices_ptr, ahead, end, BLOCK_N)
    slots = _load_slots(indices_ptr, begin, end, BLOCK_N, gl.SliceLayout(0, rows))
    tile, rope, scales = now
    if FORMAT != _MODEL:
        _widen_tile(tile, wide)
        tile = wide
    if FORMAT == _FP8 and HAS_ROPE:
        wide_rope.store(
            _widen(rope.load(_copy_layout(16, _QUARTER, warps)), wide.dtype)
        )
        rope = wide_rope
    scores_sm.store(
        _partial_scores(
            q, q_rope, tile, rope, scales, BLOCK_H, BLOCK_N, FORMAT, HAS_ROPE
        )
    )
    parts = _parts(scores_sm)
    scores = (parts.index(0).load(rows) + parts.index(1).load(rows)) + (
        parts.index(2).load(rows) + parts.index(3).load(rows)
    )
    scores = gl.where((slots >= 0)[None, :], scores * scale_log2, _MASKED)
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    weights = gl.exp2(scores - new_peak[:, None])
    shrink = gl.exp2(peak - new_peak)
    total = total * shrink[:, None] + weights
    out: gl.constexpr = _out_layout(warps)
    acc = _add_values(
        acc, weights, weights_sm, shrink, shrink_sm, tile, scales, out, FORMAT
    )
    return acc, new_peak, total, next_slots


@gluon.jit
def _load_query(
    q_ptr, heads, head_stride, first, BLOCK_H: gl.constexpr, WIDTH: gl.constexpr
):
    """[4, BLOCK_H, WIDTH] of a token's heads from `first` on, as an operand."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = _copy_layout(16, WIDTH, warps)
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    head = first + gl.arange(0, BLOCK_H, _rows_of(layout))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None]
    start = (head.to(gl.int64) * head_stride)[None, :, None]
    q = gl.load(
        q_ptr + start + (part * WIDTH + dim),
        mask=(head < heads)[None, :, None],
        other=0.0,
    )
    left: gl.constexpr = gl.DotOperandLayout(0, _score_layout(BLOCK_H, warps), 2)
    return gl.convert_layout(q, left)


@gluon.jit
def _allocate(dtype: gl.constexpr, rows: gl.constexpr, width: gl.constexpr):
    layout: gl.constexpr = _shared_layout(dtype.primitive_bitwidth, width)
    return gl.allocate_shared_memory(dtype, [4, rows, width], layout)


@gluon.jit
def _allocate_buffers(
    dtype: gl.constexpr, rope_dtype: gl.constexpr, BLOCK_N: gl.constexpr,
    FORMAT: gl.constexpr, HAS_ROPE: gl.constexpr,
):  # fmt: skip
    """Memory for a tile: latents, rotated parts and scales; unused ones are latents."""
    tile = _allocate(dtype, BLOCK_N, _GROUP)
    rope, scales = tile, tile
    if HAS_ROPE:
        rope = _allocate(rope_dtype, BLOCK_N, _QUARTER)
    if FORMAT == _DS_MLA:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scales = gl.allocate_shared_memory(gl.float32, [4, BLOCK_N], layout)
    return tile, rope, scales


@gluon.jit
def _allocate_weights(
    dtype: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    shape: gl.constexpr = [BLOCK_H, BLOCK_N]
    one = gl.allocate_shared_memory(dtype, shape, layout)
    if FORMAT != _DS_MLA:
        return one, one, one, one
    else:
        return (
            one,
            gl.allocate_shared_memory(dtype, shape, layout),
            gl.allocate_shared_memory(dtype, shape, layout),
            gl.allocate_shared_memory(dtype, shape, layout),
        )


@gluon.jit
def _store(
    acc, peak, total, out_ptr, lse_ptr, heads, first, kv_scale,
    BLOCK_H: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Write heads from `first` on; out_ptr and lse_ptr are those of head 0."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = _out_layout(warps)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    # A sum of zero means that no row counted; NaN must stay NaN.
    total = gl.sum(total, 1)
    lse = gl.where(total == 0.0, -float("inf"), peak + gl.log2(total))
    if not PARTIAL:
        lse = lse * _LN2
    head = first + gl.arange(0, BLOCK_H, gl.SliceLayout(1, _softmax_layout(warps)))
    gl.store(lse_ptr + head, lse, mask=head < heads)
    factor = kv_scale / gl.where(total == 0.0, 1.0, total)
    factor = gl.convert_layout(factor, rows)[:, None]
    head = first + gl.arange(0, BLOCK_H, rows)
    dim = gl.arange(0, _GROUP, gl.SliceLayout(0, layout))
    at = out_ptr + (head * _LATENT)[:, None] + dim[None, :]
    for part in gl.static_range(4):
        value = (acc[part] * factor).to(out_ptr.dtype.element_ty)
        gl.store(at + part * _GROUP, value, mask=(head < heads)[:, None])


@gluon.jit(do_not_specialize=["heads", "topk", "splits"])
def gluon_sparse_mla_kernel(
    q_ptr, q_rope_ptr, rows_ptr, scales_ptr, rope_ptr, kv_scale_ptr, indices_ptr,
    counts_ptr, out_ptr, lse_ptr, scale_log2, heads, topk, q_token_stride,
    q_head_stride, q_rope_token_stride, q_rope_head_stride, indices_stride, splits,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, FORMAT: gl.constexpr,
    HAS_ROPE: gl.constexpr, HAS_COUNTS: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Arguments and grid as those of `_sparse_mla_kernel`; fp8 rows as uint8."""
    warps: gl.constexpr = gl.num_warps()
    softmax: gl.constexpr = _softmax_layout(warps)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    raw: gl.constexpr = rows_ptr.dtype.element_ty
    blocks = gl.cdiv(heads, BLOCK_H)
    token = (gl.program_id(0) // blocks).to(gl.int64)
    split = gl.program_id(1)
    first = (gl.program_id(0) % blocks) * BLOCK_H

    q_ptr += token * q_token_stride
    q = _load_query(q_ptr, heads, q_head_stride, first, BLOCK_H, _GROUP)
    even = _allocate_buffers(raw, rope_ptr.dtype.element_ty, BLOCK_N, FORMAT, HAS_ROPE)
    odd = _allocate_buffers(raw, rope_ptr.dtype.element_ty, BLOCK_N, FORMAT, HAS_ROPE)
    q_rope, wide, wide_rope = q, even[0], even[0]
    if HAS_ROPE:
        q_rope_ptr += token * q_rope_token_stride
        q_rope = _load_query(
            q_rope_ptr, heads, q_rope_head_stride, first, BLOCK_H, _QUARTER
        )
    if FORMAT != _MODEL:
        wide = _allocate(dtype, BLOCK_N, _GROUP)
        if HAS_ROPE and FORMAT == _FP8:
            wide_rope = _allocate(dtype, BLOCK_N, _QUARTER)
    weights_sm = _allocate_weights(dtype, BLOCK_H, BLOCK_N, FORMAT)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shrink_sm = gl.allocate_shared_memory(gl.float32, [BLOCK_H], flat)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    scores_sm = gl.allocate_shared_memory(gl.float32, [4, BLOCK_H, BLOCK_N], swizzled)

    kv_scale = 1.0
    if FORMAT == _FP8:
        kv_scale = gl.load(kv_scale_ptr)
        scale_log2 = scale_log2 * kv_scale
    count = topk
    if HAS_COUNTS:
        count = gl.minimum(gl.load(counts_ptr + token), topk)
    tiles = gl.cdiv(gl.cdiv(count, BLOCK_N), splits)
    begin = split * tiles * BLOCK_N
    end = gl.minimum(begin + tiles * BLOCK_N, count)

    indices_ptr += token * indices_stride
    slots = _next_slots(rows_ptr, rope_ptr, indices_ptr, begin, end, BLOCK_N)
    _gather(rows_ptr, scales_ptr, rope_ptr, slots, even, FORMAT, HAS_ROPE)
    zeros = gl.zeros([BLOCK_H, _GROUP], gl.float32, _out_layout(warps))
    state = (
        (zeros, zeros, zeros, zeros),
        gl.full([BLOCK_H], _LOWEST, gl.float32, gl.SliceLayout(1, softmax)),
        gl.zeros([BLOCK_H, BLOCK_N], gl.float32, softmax),
        _next_slots(rows_ptr, rope_ptr, indices_ptr, begin + BLOCK_N, end, BLOCK_N),
    )
    # Two tiles a turn, so that which buffer is which is known when compiling.
    for start in range(begin, end, 2 * BLOCK_N):
        state = _step(
            rows_ptr, scales_ptr, rope_ptr, indices_ptr, start, end, scale_log2, q,
            q_rope, even, odd, wide, wide_rope, scores_sm, weights_sm, shrink_sm,
            state, BLOCK_H, BLOCK_N, FORMAT, HAS_ROPE,
        )  # fmt: skip
        state = _step(
            rows_ptr, scales_ptr, rope_ptr, indices_ptr, start + BLOCK_N, end,
            scale_log2, q, q_rope, odd, even, wide, wide_rope, scores_sm, weights_sm,
            shrink_sm, state, BLOCK_H, BLOCK_N, FORMAT, HAS_ROPE,
        )  # fmt: skip
    async_copy.wait_group(0)
    acc, peak, total = state[0], state[1], state[2]
    at = (token * splits + split) * heads
    _store(
        acc, peak, total, out_ptr + at * _LATENT, lse_ptr + at, heads, first, kv_scale,
        BLOCK_H, PARTIAL,
    )  # fmt: skip
