// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm_glm_dsa {

// Where products of a tile come from and go to. Slots are sorted by expert; a tile has
// neighbors of one expert.
enum class TileMode {
  LINEAR,   // out[token] = x[token] W^T
  GATE_UP,  // out[sorted slot] = silu(x[its token] Wg^T) * (x[its token] Wu^T)
  DOWN,     // out[slot] = x[sorted slot] W^T
};

// Strides of `x` and `out` are counted in numbers, others in bytes.
struct TileArgs {
  const __nv_bfloat16* x;
  int64_t x_stride;
  const uint8_t* blocks;
  int64_t row_stride;
  int64_t expert_stride;
  int64_t up_offset;     // from the gate matrix to the up matrix
  const int64_t* order;  // slots in sorted order
  // Experts of tiles, their first sorted slots, the ends of their experts' slots, each
  // [max_tiles], and how many tiles there are.
  const int32_t* tiles;
  const int32_t* table;
  __nv_bfloat16* out;
  int64_t out_stride;
  int tokens;  // LINEAR only
  int rows, columns, top_k, max_tiles;
};

// Tokens of a tile: the two sizes there are.
constexpr int SMALL_TILE = 32;
constexpr int LARGE_TILE = 128;

// Rows' addresses must be multiples of Type::ALIGN, and columns of Type::COLUMNS.
template <class Type>
cudaError_t launch_tiles(TileMode mode, int tile, const TileArgs& args,
                         cudaStream_t stream);

}  // namespace vllm_glm_dsa
