// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm_glm_dsa {

constexpr int MAX_TOP_K = 32;

// Where products come from and go to.
enum class Mode {
  LINEAR,   // out = x W^T
  GATE_UP,  // out[slot] = silu(x[token] Wg^T) * (x[token] Wu^T)
  DOWN,     // out[token] = sum over its slots of router weight * (x[slot] W^T)
};

// A slot is one of a token's top-k choices: slot s is choice s % top_k of token
// s / top_k. Strides of `x` and `out` are counted in numbers, others in bytes.
struct SkinnyArgs {
  const __nv_bfloat16* x;  // [tokens, columns]; [slots, columns] in DOWN
  int64_t x_stride;
  const uint8_t* blocks;
  int64_t row_stride;
  int64_t expert_stride;
  int64_t up_offset;     // from the gate matrix to the up matrix
  const int64_t* ids;    // [tokens, top_k], local experts; below 0: none
  const float* router;   // [tokens, top_k]
  const int32_t* table;  // the codebook of gguf-py, if the type has one
  __nv_bfloat16* out;    // [tokens, rows]; [slots, rows] in GATE_UP
  int64_t out_stride;
  int tokens, rows, columns, top_k;
  // Both 0: by size and device.
  int row_warps;  // warps of a block of threads with rows of their own: 1, 2, 4, 8
  int stages;     // of blocks of weights in shared memory: 2 or 3
};

// Rows' addresses must be multiples of Type::ALIGN, and columns of Type::COLUMNS.
template <class Type>
cudaError_t launch_skinny(Mode mode, SkinnyArgs args, cudaStream_t stream);

// Success if there is machine code for the device.
cudaError_t find_skinny_kernels(int device);

}  // namespace vllm_glm_dsa
