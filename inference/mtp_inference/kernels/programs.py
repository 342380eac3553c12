"""Triton programs of the decoder's fused operations, and the functions that launch them.

Every program computes in fp32 and rounds where the torch operations that it replaces round. The torch functions beside
the operations (``norms.py``, ``conv_delta.py``, ``rotary.py``, ``attention.py``) state the arithmetic. Triton launches
on the current device, so each launch selects the device of its tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE, WIDE_WARPS, NARROW_WARPS = 2048, 8, 2
"""Norms of at least this width take more warps: one program holds a whole row."""
CONV_BLOCK, CONV_WARPS = 256, 4
"""Channels of a program of the convolution."""
DELTA_BLOCK, DELTA_WARPS = 16, 4
"""Columns of the state that a program of the delta rule holds in registers: 2,048 numbers at a key width of 128."""
ATTENTION_PROGRAMS = 256
"""Number of programs among which a window's attention is split: about two for each multiprocessor of an H100."""
LEAST_BLOCK, MOST_KEYS, KEY_BLOCK_BYTES = 16, 64, 1 << 14
"""Smallest block of queries or keys, as matrix products need it; largest number of keys in a block, and their bytes."""
ATTENTION_STAGES, SPLITS_AT_ONCE, COMBINE_WARPS = 2, 16, 4


@triton.jit
def rms_norm_program(
    x_ptr,
    weight_ptr,
    gate_ptr,
    output_ptr,
    x_stride,
    gate_stride,
    eps,
    width: tl.constexpr,
    size: tl.constexpr,
    offset: tl.constexpr,
    rounds_first: tl.constexpr,
    activation: tl.constexpr,
):
    """Normalise one row; ``size`` is a power of two, at least ``width``."""
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, size)
    is_inside_D = column_D < width
    x_D = tl.load(x_ptr + row * x_stride + column_D, mask=is_inside_D, other=0.0)
    wide_D = x_D.to(tl.float32)
    normed_D = wide_D * tl.rsqrt(tl.sum(wide_D * wide_D, axis=0) / width + eps)
    weight_D = tl.load(weight_ptr + column_D, mask=is_inside_D, other=0.0)
    if rounds_first:
        scaled_D = weight_D.to(tl.float32) * normed_D.to(x_D.dtype).to(tl.float32)
    else:
        scaled_D = normed_D * (weight_D.to(tl.float32) + offset)
    if activation != "":
        if rounds_first and weight_D.dtype == x_D.dtype:
            scaled_D = scaled_D.to(x_D.dtype).to(tl.float32)
        gate_D = tl.load(gate_ptr + row * gate_stride + column_D, mask=is_inside_D, other=0.0).to(tl.float32)
        scaled_D *= tl.sigmoid(gate_D) if activation == "sigmoid" else gate_D * tl.sigmoid(gate_D)
    tl.store(output_ptr + row * width + column_D, scaled_D.to(output_ptr.dtype.element_ty), mask=is_inside_D)


def launch_rms_norm(
    x: Tensor, weight_D: Tensor, gate: Tensor | None, eps: float, offset: float, rounds_first: bool, activation: str
) -> Tensor:
    """See :func:`mtp_inference.kernels.norms.rms_norm`."""
    width = x.shape[-1]
    x_RD = x.reshape(-1, width)
    gate_RD = x_RD if gate is None else gate.reshape(-1, width)
    promotes = rounds_first and gate is None
    output = torch.empty(x.shape, dtype=torch.result_type(weight_D, x) if promotes else x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        rms_norm_program[(len(x_RD),)](
            x_RD,
            weight_D,
            gate_RD,
            output,
            x_RD.stride(0),
            gate_RD.stride(0),
            eps,
            width,
            triton.next_power_of_2(width),
            offset,
            rounds_first,
            activation,
            num_warps=WIDE_WARPS if width >= WIDE else NARROW_WARPS,
        )
    return output


@triton.jit
def conv_window_program(
    before_ptr,
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    known_ptr,
    output_ptr,
    before_row_stride,
    before_channel_stride,
    before_place_stride,
    inputs_row_stride,
    inputs_channel_stride,
    inputs_token_stride,
    channels,
    num_tokens: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
    has_bias: tl.constexpr,
    activation: tl.constexpr,
):
    """Convolve a block of channels of one row, and write all inputs behind one another."""
    row = tl.program_id(0).to(tl.int64)
    channel_C = tl.program_id(1) * size + tl.arange(0, size)
    is_inside_C = channel_C < channels
    before_ptr += row * before_row_stride + channel_C * before_channel_stride
    inputs_ptr += row * inputs_row_stride + channel_C * inputs_channel_stride
    known_ptr += (row * channels + channel_C) * (width + num_tokens)
    for token in tl.static_range(num_tokens):
        sum_C = tl.zeros([size], tl.float32)
        for tap in tl.static_range(width):
            # The tap of the window's own token is the last one.
            if token + 1 + tap < width:
                offset = (token + 1 + tap) * before_place_stride
                input_C = tl.load(before_ptr + offset, mask=is_inside_C, other=0.0)
            else:
                offset = (token + 1 + tap - width) * inputs_token_stride
                input_C = tl.load(inputs_ptr + offset, mask=is_inside_C, other=0.0)
            weight_C = tl.load(weight_ptr + channel_C * width + tap, mask=is_inside_C, other=0.0)
            sum_C += input_C.to(tl.float32) * weight_C.to(tl.float32)
        if has_bias:
            sum_C += tl.load(bias_ptr + channel_C, mask=is_inside_C, other=0.0).to(tl.float32)
        output_C = sum_C.to(output_ptr.dtype.element_ty)
        if activation == "silu":
            wide_C = output_C.to(tl.float32)
            output_C = (wide_C * tl.sigmoid(wide_C)).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + (row * num_tokens + token) * channels + channel_C, output_C, mask=is_inside_C)
        own_C = tl.load(inputs_ptr + token * inputs_token_stride, mask=is_inside_C, other=0.0)
        tl.store(known_ptr + width + token, own_C.to(known_ptr.dtype.element_ty), mask=is_inside_C)
    for place in tl.static_range(width):
        earlier_C = tl.load(before_ptr + place * before_place_stride, mask=is_inside_C, other=0.0)
        tl.store(known_ptr + place, earlier_C.to(known_ptr.dtype.element_ty), mask=is_inside_C)


def launch_conv_window(
    before_BCW: Tensor, inputs_BCT: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """See :func:`mtp_inference.kernels.conv_delta.conv_window`."""
    num_rows, channels, num_tokens = inputs_BCT.shape
    width = weight_CW.shape[-1]
    weight_CW = weight_CW.contiguous()
    dtype = torch.result_type(before_BCW, inputs_BCT)
    known_BCN = inputs_BCT.new_empty(num_rows, channels, width + num_tokens, dtype=dtype)
    output_BTC = inputs_BCT.new_empty(num_rows, num_tokens, channels, dtype=dtype)
    with torch.cuda.device_of(inputs_BCT):
        conv_window_program[(num_rows, triton.cdiv(channels, CONV_BLOCK))](
            before_BCW,
            inputs_BCT,
            weight_CW,
            weight_CW if bias_C is None else bias_C,
            known_BCN,
            output_BTC,
            *before_BCW.stride(),
            *inputs_BCT.stride(),
            channels,
            num_tokens,
            width,
            CONV_BLOCK,
            bias_C is not None,
            activation,
            num_warps=CONV_WARPS,
        )
    return known_BCN, output_BTC


@triton.jit
def _normalised(ptr_K, is_inside_K, normalises: tl.constexpr):
    """Load a query or a key of one head, and normalise it."""
    part_K = tl.load(ptr_K, mask=is_inside_K, other=0.0).to(tl.float32)
    if normalises:
        part_K = part_K * tl.rsqrt(tl.sum(part_K * part_K, axis=0) + 1e-6)
    return part_K


@triton.jit
def _delta_step(state_KV, query_K, key_K, value_V, g, beta):
    """Return the state after a token, the token's correction and its output before scaling."""
    state_KV *= tl.exp(g)
    correction_V = (value_V - tl.sum(key_K[:, None] * state_KV, axis=0)) * beta
    state_KV += key_K[:, None] * correction_V[None, :]
    return state_KV, correction_V, tl.sum(query_K[:, None] * state_KV, axis=0)


@triton.jit
def delta_program(
    query_ptr,
    key_ptr,
    value_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    output_ptr,
    window_key_ptr,
    correction_ptr,
    log_decay_ptr,
    key_row_stride,
    key_token_stride,
    key_head_stride,
    value_row_stride,
    value_token_stride,
    value_head_stride,
    state_row_stride,
    scale,
    num_tokens: tl.constexpr,
    num_heads: tl.constexpr,
    heads_per_key: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    normalises: tl.constexpr,
    writes_window: tl.constexpr,
):
    """Run the tokens of one head over a block of the state's columns; write the window, or else the state."""
    head_M = tl.program_id(0).to(tl.int64)
    row, head = head_M // num_heads, head_M % num_heads
    place_K, place_V = tl.arange(0, key_size), tl.program_id(1) * value_size + tl.arange(0, value_size)
    is_key_K, is_value_V = place_K < key_width, place_V < value_width
    is_inside_KV = is_key_K[:, None] & is_value_V[None, :]
    state_ptr += row * state_row_stride + (head * key_width + place_K[:, None]) * value_width + place_V[None, :]
    state_KV = tl.load(state_ptr, mask=is_inside_KV, other=0.0)
    key_offset = row * key_row_stride + (head // heads_per_key) * key_head_stride
    value_ptr += row * value_row_stride + head * value_head_stride
    log_decay = 0.0
    for token in range(num_tokens):
        key_offset_K = key_offset + token * key_token_stride + place_K
        query_K = _normalised(query_ptr + key_offset_K, is_key_K, normalises)
        key_K = _normalised(key_ptr + key_offset_K, is_key_K, normalises)
        value_V = tl.load(value_ptr + token * value_token_stride + place_V, mask=is_value_V, other=0.0).to(tl.float32)
        place = (row * num_tokens + token) * num_heads + head
        g, beta = tl.load(g_ptr + place).to(tl.float32), tl.load(beta_ptr + place).to(tl.float32)
        state_KV, correction_V, output_V = _delta_step(state_KV, query_K, key_K, value_V, g, beta)
        scaled_V = (output_V * scale).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + place * value_width + place_V, scaled_V, mask=is_value_V)
        log_decay += g
        if writes_window:
            written = head_M * num_tokens + token
            tl.store(correction_ptr + written * value_width + place_V, correction_V, mask=is_value_V)
            if tl.program_id(1) == 0:
                tl.store(window_key_ptr + written * key_width + place_K, key_K, mask=is_key_K)
                tl.store(log_decay_ptr + written, log_decay)
    if not writes_window:
        tl.store(state_ptr, state_KV, mask=is_inside_KV)


def _launch_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    normalises: bool,
    window: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Run the program over all tokens; write the parts of the window, or the state if there are none."""
    if query.stride() != key.stride() or query.stride(-1) != 1:
        query, key = query.contiguous(), key.contiguous()
    value = value if value.stride(-1) == 1 else value.contiguous()
    num_rows, num_tokens, num_heads, value_width = value.shape
    key_width = key.shape[-1]
    output = torch.empty(value.shape, dtype=query.dtype, device=query.device)
    value_size = min(DELTA_BLOCK, triton.next_power_of_2(value_width))
    with torch.cuda.device_of(state):
        delta_program[(num_rows * num_heads, triton.cdiv(value_width, value_size))](
            query,
            key,
            value,
            g.contiguous(),
            beta.contiguous(),
            state,
            output,
            *((output, output, output) if window is None else window),
            *key.stride()[:3],
            *value.stride()[:3],
            state.stride(0),
            key_width**-0.5,
            num_tokens,
            num_heads,
            num_heads // key.shape[2],
            key_width,
            value_width,
            triton.next_power_of_2(key_width),
            value_size,
            normalises,
            window is not None,
            num_warps=DELTA_WARPS,
        )
    return output


def launch_delta_window(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, normalises: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`mtp_inference.kernels.conv_delta.delta_window`."""
    num_rows, num_tokens, num_heads, value_width = value.shape
    key_NTK, correction_NTV, log_decay_NT1 = (
        state.new_empty(num_rows * num_heads, num_tokens, width) for width in (key.shape[-1], value_width, 1)
    )
    output = _launch_delta(query, key, value, g, beta, state, normalises, (key_NTK, correction_NTV, log_decay_NT1))
    return output, key_NTK, correction_NTV, log_decay_NT1


def launch_delta_token(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, normalises: bool
) -> Tensor:
    """See :func:`mtp_inference.kernels.conv_delta.delta_token`."""
    return _launch_delta(query, key, value, g, beta, state, normalises, None)


@triton.jit
def rotate_program(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_output_ptr,
    key_output_ptr,
    query_row_stride,
    query_head_stride,
    query_token_stride,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    table_row_stride,
    table_token_stride,
    num_tokens: tl.constexpr,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    half_size: tl.constexpr,
    passed_size: tl.constexpr,
):
    """Rotate one head of one token: of the queries, or for later programs of the keys."""
    token, head = tl.program_id(0) % num_tokens, tl.program_id(1)
    row = (tl.program_id(0) // num_tokens).to(tl.int64)
    if head < query_heads:
        input_ptr = query_ptr + row * query_row_stride + head * query_head_stride + token * query_token_stride
        output_ptr = query_output_ptr + ((row * query_heads + head) * num_tokens + token) * width
    else:
        head -= query_heads
        input_ptr = key_ptr + row * key_row_stride + head * key_head_stride + token * key_token_stride
        output_ptr = key_output_ptr + ((row * key_heads + head) * num_tokens + token) * width
    cos_ptr += row * table_row_stride + token * table_token_stride
    sin_ptr += row * table_row_stride + token * table_token_stride
    place_R = tl.arange(0, half_size)
    is_inside_R = place_R < half
    first_R = tl.load(input_ptr + place_R, mask=is_inside_R, other=0.0)
    second_R = tl.load(input_ptr + half + place_R, mask=is_inside_R, other=0.0)
    for which in tl.static_range(2):
        cos_R = tl.load(cos_ptr + which * half + place_R, mask=is_inside_R, other=0.0).to(tl.float32)
        sin_R = tl.load(sin_ptr + which * half + place_R, mask=is_inside_R, other=0.0).to(tl.float32)
        own_R = first_R if which == 0 else second_R
        other_R = -second_R.to(tl.float32) if which == 0 else first_R.to(tl.float32)
        # Each product is rounded, as torch's operations round it.
        straight_R = (own_R.to(tl.float32) * cos_R).to(own_R.dtype).to(tl.float32)
        turned_R = straight_R + (other_R * sin_R).to(own_R.dtype).to(tl.float32)
        tl.store(output_ptr + which * half + place_R, turned_R.to(own_R.dtype), mask=is_inside_R)
    if passed_size > 0:
        place_P = 2 * half + tl.arange(0, passed_size)
        passed_P = tl.load(input_ptr + place_P, mask=place_P < width, other=0.0)
        tl.store(output_ptr + place_P, passed_P, mask=place_P < width)


def launch_rotate(query_BHTX: Tensor, key_BHTX: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`mtp_inference.kernels.rotary.rotate`."""
    num_rows, query_heads, num_tokens, width = query_BHTX.shape
    key_heads, turned = key_BHTX.shape[1], cos_BTR.shape[-1]
    query, key = (part if part.stride(-1) == 1 else part.contiguous() for part in (query_BHTX, key_BHTX))
    # One layout for both tables; rows that share a table read the same one.
    cos, sin = (table.contiguous().expand(num_rows, -1, -1) for table in (cos_BTR, sin_BTR))
    outputs = query.new_empty(query.shape), key.new_empty(key.shape)
    with torch.cuda.device_of(query_BHTX):
        rotate_program[(num_rows * num_tokens, query_heads + key_heads)](
            query,
            key,
            cos,
            sin,
            *outputs,
            *query.stride()[:3],
            *key.stride()[:3],
            *cos.stride()[:2],
            num_tokens,
            query_heads,
            key_heads,
            width,
            turned // 2,
            triton.next_power_of_2(turned // 2),
            triton.next_power_of_2(width - turned) if width > turned else 0,
            num_warps=1,
        )
    return outputs


@triton.jit
def _attended_range(position_ptr, reach, place_M, is_query_M, num_tokens: tl.constexpr, key_block: tl.constexpr):
    """Return the positions of this program's split, and the first and the last of them that each query attends to.

    The splits share the row's positions in whole blocks. In a short row the last ones get none.
    """
    last_M = tl.load(position_ptr + place_M % num_tokens, mask=is_query_M, other=-1).to(tl.int32)
    first_M = tl.maximum(last_M - reach + 1, 0)
    oldest = tl.min(tl.where(is_query_M, first_M, 2147483647), axis=0)
    end = tl.max(last_M, axis=0) + 1
    share = tl.cdiv(tl.cdiv(end - oldest, tl.num_programs(2)), key_block) * key_block
    begin = oldest + tl.program_id(2) * share
    end = tl.minimum(begin + share, end)
    return begin, end, first_M, tl.minimum(last_M, end - 1)


@triton.jit
def _attend_block(query_MX, key_XN, value_NV, is_seen_MN, peak_M, total_M, sum_MV, scaling, softcap: tl.constexpr):
    """Return the peak of the scores, the sum of the weights and the weighted sum of the values, with one block more."""
    score_MN = tl.dot(query_MX, key_XN, input_precision="ieee") * scaling
    if softcap > 0:
        # softcap * tanh(score / softcap)
        score_MN = softcap * (2 * tl.sigmoid(score_MN * (2 / softcap)) - 1)
    score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
    higher_M = tl.maximum(peak_M, tl.max(score_MN, axis=1))
    # A query may attend to no key of a block.
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
    weight_MN, decay_M = tl.exp(score_MN - base_M[:, None]), tl.exp(peak_M - base_M)
    sum_MV = tl.dot(weight_MN.to(value_NV.dtype), value_NV, sum_MV * decay_M[:, None], input_precision="ieee")
    return higher_M, total_M * decay_M + tl.sum(weight_MN, axis=1), sum_MV


@triton.jit
def attend_program(
    query_ptr,
    key_ptr,
    value_ptr,
    position_ptr,
    sum_ptr,
    peak_ptr,
    total_ptr,
    query_row_stride,
    query_head_stride,
    query_token_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    slots,
    reach,
    scaling,
    num_tokens: tl.constexpr,
    group: tl.constexpr,
    key_heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    query_block: tl.constexpr,
    key_block: tl.constexpr,
    softcap: tl.constexpr,
):
    """Attend from a block of the queries that share a key head to one split of their row's keys."""
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // key_heads, tl.program_id(0) % key_heads
    place_M = tl.program_id(1) * query_block + tl.arange(0, query_block)
    is_query_M = place_M < group * num_tokens
    position_ptr += row * num_tokens
    begin, end, first_M, last_M = _attended_range(position_ptr, reach, place_M, is_query_M, num_tokens, key_block)
    place_X, place_V = tl.arange(0, key_size), tl.arange(0, value_size)
    is_key_X, is_value_V = place_X < key_width, place_V < value_width
    offset_M = (head * group + place_M // num_tokens) * query_head_stride + place_M % num_tokens * query_token_stride
    query_ptr += row * query_row_stride + offset_M[:, None] + place_X[None, :]
    query_MX = tl.load(query_ptr, mask=(is_query_M & (begin < end))[:, None] & is_key_X[None, :], other=0.0)
    key_ptr += row * key_row_stride + head.to(tl.int64) * key_head_stride + place_X[:, None]
    value_ptr += row * value_row_stride + head.to(tl.int64) * value_head_stride + place_V[None, :]
    peak_M, total_M = tl.full([query_block], float("-inf"), tl.float32), tl.zeros([query_block], tl.float32)
    sum_MV = tl.zeros([query_block, value_size], tl.float32)
    for start in range(begin, end, key_block):
        position_N = start + tl.arange(0, key_block)
        slot_N, is_own_N = position_N % slots, position_N < end
        key_mask_XN, value_mask_NV = is_key_X[:, None] & is_own_N[None, :], is_own_N[:, None] & is_value_V[None, :]
        key_XN = tl.load(key_ptr + slot_N[None, :] * key_width, mask=key_mask_XN, other=0.0)
        value_NV = tl.load(value_ptr + slot_N[:, None] * value_width, mask=value_mask_NV, other=0.0)
        is_seen_MN = (position_N[None, :] >= first_M[:, None]) & (position_N[None, :] <= last_M[:, None])
        peak_M, total_M, sum_MV = _attend_block(
            query_MX, key_XN, value_NV, is_seen_MN, peak_M, total_M, sum_MV, scaling, softcap
        )
    written = (row_head * tl.num_programs(2) + tl.program_id(2)) * group * num_tokens + place_M
    tl.store(peak_ptr + written, peak_M, mask=is_query_M)
    tl.store(total_ptr + written, total_M, mask=is_query_M)
    sum_ptr += written[:, None] * value_width + place_V[None, :]
    tl.store(sum_ptr, sum_MV, mask=(is_query_M & (begin < end))[:, None] & is_value_V[None, :])


@triton.jit
def combine_program(
    sum_ptr,
    peak_ptr,
    total_ptr,
    sink_ptr,
    output_ptr,
    num_splits,
    num_tokens: tl.constexpr,
    group: tl.constexpr,
    key_heads: tl.constexpr,
    value_width: tl.constexpr,
    value_size: tl.constexpr,
    num_at_once: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Combine the splits of one query, and divide by the sum of its weights."""
    row_head = tl.program_id(0).to(tl.int64)
    row, key_head = row_head // key_heads, row_head % key_heads
    head, token = key_head * group + tl.program_id(1) // num_tokens, tl.program_id(1) % num_tokens
    queries: tl.constexpr = group * num_tokens
    first_written = row_head * num_splits * queries + tl.program_id(1)
    place_V = tl.arange(0, value_size)
    is_value_V = place_V < value_width
    peak, total, sum_V = float("-inf"), 0.0, tl.zeros([value_size], tl.float32)
    if has_sinks:
        # A sink is one more weight without a value. It is rounded as torch's operations round it.
        peak, total = tl.load(sink_ptr + head).to(output_ptr.dtype.element_ty).to(tl.float32), 1.0
    for first in range(0, num_splits, num_at_once):
        place_P = first + tl.arange(0, num_at_once)
        is_split_P, written_P = place_P < num_splits, first_written + place_P * queries
        peak_P = tl.load(peak_ptr + written_P, mask=is_split_P, other=float("-inf"))
        total_P = tl.load(total_ptr + written_P, mask=is_split_P, other=0.0)
        # Splits without keys have written no sum.
        sum_mask_PV = (peak_P > float("-inf"))[:, None] & is_value_V[None, :]
        sum_PV = tl.load(sum_ptr + written_P[:, None] * value_width + place_V[None, :], mask=sum_mask_PV, other=0.0)
        higher = tl.maximum(peak, tl.max(peak_P, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay, decay_P = tl.exp(peak - base), tl.exp(peak_P - base)
        total = total * decay + tl.sum(total_P * decay_P, axis=0)
        sum_V = sum_V * decay + tl.sum(sum_PV * decay_P[:, None], axis=0)
        peak = higher
    # A query before position 0 attends to no key; its output is 0.
    output_V = sum_V / tl.where(total == 0.0, 1.0, total)
    output_ptr += ((row * num_tokens + token) * key_heads * group + head) * value_width
    tl.store(output_ptr + place_V, output_V.to(output_ptr.dtype.element_ty), mask=is_value_V)


class _AttentionShape(NamedTuple):
    """How the attention of a window is divided into programs."""

    key_size: int
    value_size: int
    query_block: int
    key_block: int
    num_splits: int
    num_warps: int


def _attention_shape(query_BHTX: Tensor, value_BKSV: Tensor, reach: int) -> _AttentionShape:
    """Choose the blocks, and the number of splits, from shapes alone, so that a captured launch fits every length."""
    num_rows, num_heads, num_tokens, key_width = query_BHTX.shape
    key_heads, slots, value_width = value_BKSV.shape[1:]
    key_size, value_size = (max(triton.next_power_of_2(width), LEAST_BLOCK) for width in (key_width, value_width))
    queries = num_heads // key_heads * num_tokens
    # fp32 products have no tensor cores to run on, and take more registers.
    is_wide = query_BHTX.element_size() > 2
    query_block = LEAST_BLOCK if is_wide or queries <= LEAST_BLOCK else 2 * LEAST_BLOCK
    row_bytes = max(key_size, value_size) * query_BHTX.element_size()
    key_block = min(max(KEY_BLOCK_BYTES // row_bytes, LEAST_BLOCK), MOST_KEYS)
    num_programs = num_rows * key_heads * triton.cdiv(queries, query_block)
    num_blocks = triton.cdiv(min(slots, reach + num_tokens), key_block)
    num_splits = min(max(ATTENTION_PROGRAMS // num_programs, 1), num_blocks)
    num_warps = 8 if is_wide or row_bytes > 512 else 4
    return _AttentionShape(key_size, value_size, query_block, key_block, num_splits, num_warps)


def _attend_splits(
    query_BHTX: Tensor,
    key_BKSX: Tensor,
    value_BKSV: Tensor,
    positions_BT: Tensor,
    reach: int,
    scaling: float,
    softcap: float,
    shape: _AttentionShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sums of the values, the peaks of the scores and the sums of the weights, of every split."""
    num_rows, num_heads, num_tokens, key_width = query_BHTX.shape
    key_heads, slots, value_width = value_BKSV.shape[1:]
    queries = num_heads // key_heads * num_tokens
    query = query_BHTX if query_BHTX.stride(-1) == 1 else query_BHTX.contiguous()
    # The slots of a head lie behind one another, as they do in a cache.
    key, value = (
        part if part.stride()[2:] == (part.shape[-1], 1) else part.contiguous() for part in (key_BKSX, value_BKSV)
    )
    peaks, totals = (
        query.new_empty(num_rows * key_heads, shape.num_splits, queries, dtype=torch.float32) for _ in range(2)
    )
    sums = peaks.new_empty(*peaks.shape, value_width)
    attend_program[(num_rows * key_heads, triton.cdiv(queries, shape.query_block), shape.num_splits)](
        query,
        key,
        value,
        positions_BT.contiguous(),
        sums,
        peaks,
        totals,
        *query.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        slots,
        reach,
        scaling,
        num_tokens,
        num_heads // key_heads,
        key_heads,
        key_width,
        value_width,
        shape.key_size,
        shape.value_size,
        shape.query_block,
        shape.key_block,
        softcap,
        num_warps=shape.num_warps,
        num_stages=ATTENTION_STAGES,
    )
    return sums, peaks, totals


def launch_attend_window(
    query_BHTX: Tensor,
    key_BKSX: Tensor,
    value_BKSV: Tensor,
    positions_BT: Tensor,
    reach: int,
    scaling: float,
    sinks_H: Tensor | None,
    softcap: float,
) -> Tensor:
    """See :func:`mtp_inference.kernels.attention.attend_window`."""
    num_rows, num_heads, num_tokens, _ = query_BHTX.shape
    key_heads, _, value_width = value_BKSV.shape[1:]
    group = num_heads // key_heads
    shape = _attention_shape(query_BHTX, value_BKSV, reach)
    output = query_BHTX.new_empty(num_rows, num_tokens, num_heads, value_width)
    with torch.cuda.device_of(query_BHTX):
        sums, peaks, totals = _attend_splits(
            query_BHTX, key_BKSX, value_BKSV, positions_BT, reach, scaling, softcap, shape
        )
        combine_program[(num_rows * key_heads, group * num_tokens)](
            sums,
            peaks,
            totals,
            totals if sinks_H is None else sinks_H,
            output,
            shape.num_splits,
            num_tokens,
            group,
            key_heads,
            value_width,
            shape.value_size,
            SPLITS_AT_ONCE,
            sinks_H is not None,
            num_warps=COMBINE_WARPS,
        )
    return output
