// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Tiles of tokens times matrices of GGUF blocks, which are read as they are in a file.
//
// A block of threads multiplies 128 rows with a tile of tokens, a warp 32 of them. Runs
// of blocks and, for 32 columns at a time, the tokens' values are copied to shared
// memory ahead of use. Warps widen quants to bfloat16 in registers and scale them
// there, which rounds scales and weights to bfloat16. For GATE_UP a warp has the same
// 16 rows of both matrices.
#pragma once

#include "fragments.cuh"
#include "tiles.h"

namespace vllm_glm_dsa {

constexpr int TILE_THREADS = 128;
constexpr int TILE_ROWS = TILE_THREADS;  // 32 of a warp
constexpr int CHUNK = 32;                // columns of values that are copied at a time
constexpr int CHUNKS = 4;                // in shared memory

template <class Type, int TOKENS>
struct TileShape {
  static constexpr int TABLE = (Type::TABLE * 4 + 15) / 16 * 16;
  static constexpr int WEIGHTS = TILE_ROWS * RowCopy<Type>::BYTES;  // of a run
  static constexpr int VALUES = TOKENS * CHUNK * 2;                 // of a chunk
  static constexpr int RESULTS = TOKENS * (TILE_ROWS + 8) * 2;
  static constexpr int RINGS = 2 * WEIGHTS + CHUNKS * VALUES;
  static constexpr int BYTES = TABLE + (RINGS > RESULTS ? RINGS : RESULTS);
};

// Where 8 values of a token lie in a chunk, in bytes: so that tokens' words lie in
// different banks.
__device__ __forceinline__ int place_of(int token, int eight) {
  return token * (CHUNK * 2) + ((eight ^ (token & 2)) * 16);
}

__device__ __forceinline__ uint32_t twice(float value) {
  const __nv_bfloat162 both = __float2bfloat162_rn(value);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Quants of 32 columns as weights, in place.
template <class Type>
__device__ __forceinline__ void scale_quants(const Type* rows, int part,
                                             uint32_t (*a)[4]) {
  constexpr int HALVES = 32 / Type::GROUP;
#pragma unroll
  for (int row = 0; row < 2; row++) {
    uint32_t scale[HALVES], less[HALVES];
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
      const int group = part * HALVES + i;
      scale[i] = twice(rows[row].scale(group));
      less[i] = twice(Type::MINIMUM ? -rows[row].minimum(group) : -0.0f);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = row; i < 4; i += 2) {
        if constexpr (Type::FORM == Form::BYTES) {
          constexpr uint32_t offset = 0xC300 + Type::OFFSET;
          a[half][i] = fused(a[half][i], BF16_ONES, offset << 16 | offset);
        }
        a[half][i] = fused(a[half][i], scale[half % HALVES], less[half % HALVES]);
      }
    }
  }
}

// Program (i, j): rows from TILE_ROWS i on (of both matrices half as many in GATE_UP)
// and tile j.
template <class Type, TileMode MODE, int TOKENS>
__global__ void __launch_bounds__(TILE_THREADS) tiles_kernel(const TileArgs args) {
  using Shape = TileShape<Type, TOKENS>;
  using Copy = RowCopy<Type>;
  constexpr bool PAIRED = MODE == TileMode::GATE_UP;
  constexpr int PARTS = Type::COLUMNS / CHUNK;
  GGUF_DYNAMIC_SHARED(shared);
  const int tile = blockIdx.y;
  int first = tile * TOKENS, end = args.tokens;
  const uint8_t* blocks = args.blocks;
  if constexpr (MODE != TileMode::LINEAR) {
    if (tile >= args.tiles[3 * args.max_tiles]) return;
    blocks += args.tiles[tile] * args.expert_stride;
    first = args.tiles[args.max_tiles + tile];
    end = args.tiles[2 * args.max_tiles + tile];
  }
  const int tokens = min(end - first, TOKENS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int quad_row = lane / 4, quad_lane = lane % 4;
  constexpr int OUT_ROWS = PAIRED ? TILE_ROWS / 2 : TILE_ROWS;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * OUT_ROWS;

  auto* table = reinterpret_cast<uint32_t*>(shared);
  uint8_t* weights = shared + Shape::TABLE;
  uint8_t* values = weights + 2 * Shape::WEIGHTS;

  // Row i of the tile: the warp's, of 16 rows and then of 16 rows. Rows beyond the last
  // repeat it.
  auto row_at = [&](int i) {
    int64_t row = first_row + (PAIRED ? i / 32 * 16 + i % 16 : i);
    row = min(row, static_cast<int64_t>(args.rows) - 1);
    const uint8_t* at = blocks + row * args.row_stride;
    return PAIRED && i % 32 >= 16 ? at + args.up_offset : at;
  };
  auto fetch_weights = [&](int run) {
    uint8_t* stage = weights + (run & 1) * Shape::WEIGHTS;
    for (int i = threadIdx.x; i < TILE_ROWS * Copy::PIECES; i += TILE_THREADS) {
      const int row = i / Copy::PIECES;
      const uint8_t* at = row_at(row) + static_cast<int64_t>(run) * Type::BYTES;
      Copy::copy(stage + row * Copy::BYTES, at, i % Copy::PIECES);
    }
  };
  // Tokens beyond the last repeat it; their results are not stored.
  constexpr int MINE = TOKENS * 4 / TILE_THREADS;  // of 8 values each
  const __nv_bfloat16* from[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int token = (threadIdx.x + i * TILE_THREADS) / 4;
    int64_t source = first + min(token, tokens - 1);
    if constexpr (PAIRED) source = args.order[source] / args.top_k;
    from[i] = args.x + source * args.x_stride + 8 * (threadIdx.x % 4);
  }
  auto fetch_values = [&](int chunk) {
    uint8_t* stage = values + chunk % CHUNKS * Shape::VALUES;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int token = (threadIdx.x + i * TILE_THREADS) / 4;
      copy_16(stage + place_of(token, threadIdx.x % 4), from[i] + chunk * CHUNK);
    }
  };

  const int runs = args.columns / Type::COLUMNS, chunks = args.columns / CHUNK;
  fetch_weights(0);
  for (int i = 0; i < CHUNKS - 1; i++) {
    if (i < chunks) fetch_values(i);
    end_copies();
  }
  for (int i = threadIdx.x; i < Type::TABLE; i += TILE_THREADS) {
    table[i] = Type::table_word(args.table, i);
  }

  float sums[2][TOKENS / 8][4] = {};
  for (int run = 0; run < runs; run++) {
    wait_for_copies<CHUNKS - 2>();
    __syncthreads();
    const uint8_t* at[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 32 * warp + quad_row + 8 * i;
      at[i / 2][i % 2] = weights + (run & 1) * Shape::WEIGHTS + row * Copy::BYTES;
      if constexpr (Type::ALIGN < 16) {
        const uint8_t* run_at = row_at(row) + static_cast<int64_t>(run) * Type::BYTES;
        at[i / 2][i % 2] += Copy::before(run_at);
      }
    }
    const Type rows[2][2] = {{Type(at[0][0]), Type(at[0][1])},
                             {Type(at[1][0]), Type(at[1][1])}};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const int chunk = run * PARTS + part;
      if (part > 0) {
        wait_for_copies<CHUNKS - 2>();
        __syncthreads();
      }
      // All have left what is overwritten now.
      if (part == 0 && run + 1 < runs) fetch_weights(run + 1);
      if (chunk + CHUNKS - 1 < chunks) fetch_values(chunk + CHUNKS - 1);
      end_copies();
      uint32_t a[2][2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        load_quants<Type>(at[i], table, part, quad_lane, a[i]);
        scale_quants<Type>(rows[i], part, a[i]);
      }
      const uint8_t* stage = values + chunk % CHUNKS * Shape::VALUES;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // 8 tokens on, the place within a token is the same.
        const int eight = 2 * half + quad_lane / 2;
        const uint8_t* x = stage + place_of(quad_row, eight) + quad_lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
          const auto b = *reinterpret_cast<const uint2*>(x + j * 8 * CHUNK * 2);
          multiply(sums[0][j], a[0][half], b);
          multiply(sums[1][j], a[1][half], b);
        }
      }
    }
  }
  wait_for_copies<0>();
  __syncthreads();

  // [token][row], to be written in rows.
  constexpr int STRIDE = OUT_ROWS + 8;
  auto* results = reinterpret_cast<__nv_bfloat16*>(weights);
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 8 * j + 2 * quad_lane + i % 2;
      const int row = quad_row + i / 2 * 8;
      __nv_bfloat16* to = results + token * STRIDE;
      if constexpr (PAIRED) {
        const float gate = sums[0][j][i];
        const float value = gate / (1.0f + __expf(-gate)) * sums[1][j][i];
        to[16 * warp + row] = __float2bfloat16(value);
      } else {
        to[32 * warp + row] = __float2bfloat16(sums[0][j][i]);
        to[32 * warp + 16 + row] = __float2bfloat16(sums[1][j][i]);
      }
    }
  }
  __syncthreads();
  const auto where = reinterpret_cast<uintptr_t>(args.out) | (2 * args.out_stride);
  const int count = static_cast<int>(min(args.rows - first_row, int64_t{OUT_ROWS}));
  const int width = where % 16 == 0 && count % 8 == 0 ? 8 : 1;
  for (int i = threadIdx.x * width; i < tokens * count; i += TILE_THREADS * width) {
    const int token = i / count, row = i % count;
    int64_t target = first + token;
    if constexpr (MODE == TileMode::DOWN) target = args.order[target];
    __nv_bfloat16* to = args.out + target * args.out_stride + first_row + row;
    const __nv_bfloat16* source = results + token * STRIDE + row;
    if (width == 8) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(source);
    } else {
      *to = *source;
    }
  }
}

#ifdef __CUDACC__

template <class Type, TileMode MODE, int TOKENS>
cudaError_t launch_tiles_kernel(const TileArgs& args, cudaStream_t stream) {
  using Shape = TileShape<Type, TOKENS>;
  // What every device lets a block of threads have.
  static_assert(Shape::BYTES <= 101376);
  const auto kernel = tiles_kernel<Type, MODE, TOKENS>;
  const auto what = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaFuncSetAttribute(kernel, what, Shape::BYTES) != cudaSuccess) {
    return cudaGetLastError();  // and no later launch shall find it
  }
  const int rows = MODE == TileMode::GATE_UP ? TILE_ROWS / 2 : TILE_ROWS;
  const int tiles =
      MODE == TileMode::LINEAR ? (args.tokens + TOKENS - 1) / TOKENS : args.max_tiles;
  if (tiles == 0 || args.rows == 0) return cudaSuccess;
  const dim3 grid((args.rows + rows - 1) / rows, tiles);
  kernel<<<grid, TILE_THREADS, Shape::BYTES, stream>>>(args);
  return cudaGetLastError();
}

template <class Type, TileMode MODE>
cudaError_t launch_mode(int tile, const TileArgs& args, cudaStream_t stream) {
  if (tile == SMALL_TILE) {
    return launch_tiles_kernel<Type, MODE, SMALL_TILE>(args, stream);
  }
  if (tile == LARGE_TILE) {
    return launch_tiles_kernel<Type, MODE, LARGE_TILE>(args, stream);
  }
  return cudaErrorInvalidValue;
}

template <class Type>
cudaError_t launch_tiles(TileMode mode, int tile, const TileArgs& args,
                         cudaStream_t stream) {
  switch (mode) {
    case TileMode::LINEAR:
      return launch_mode<Type, TileMode::LINEAR>(tile, args, stream);
    case TileMode::GATE_UP:
      return launch_mode<Type, TileMode::GATE_UP>(tile, args, stream);
    case TileMode::DOWN:
      return launch_mode<Type, TileMode::DOWN>(tile, args, stream);
  }
  return cudaErrorInvalidValue;
}

#endif

}  // namespace vllm_glm_dsa
