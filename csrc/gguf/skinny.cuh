// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Few tokens times matrices of GGUF blocks, which are read as they are in the file.
//
// A warp multiplies 16 rows. It copies runs of their blocks to shared memory ahead of
// use (cp.async, 16 bytes at a time, whatever the alignment of a block), widens quants
// to bfloat16 in registers, exactly, and multiplies them with the tokens' values by
// mma.m16n8k16: quants are A, so that rows of weights are its 16 rows. Sums of a group,
// in float32, are scaled and added up. Warps of a block of threads have either rows or
// runs of their own; sums of runs are added in the end, in order.
//
// What B's 8 columns are depends on the tokens. Several tokens have a column each. A
// single one has one for every 32 weights of a run, with zeros elsewhere: then a lane
// gets the sums of other groups than the next one, and none is scaled twice.
#pragma once

#include <algorithm>

#include "fragments.cuh"
#include "skinny.h"

namespace vllm_glm_dsa {

constexpr int WARPS = 8;
constexpr int ROWS = 16;   // of a warp
constexpr int TOKENS = 8;  // at a time, at most

// Bytes of shared memory that every device lets a block of threads have, less the
// arrays of fixed size in `skinny_kernel`.
constexpr int SKINNY_SHARED = 101376 - 8 * 8 - MAX_TOP_K * (8 + 4);

// How a block of threads lies in shared memory: the codebook, the slots' experts, and
// for each warp a ring of stages, which sums of all warps replace in the end.
template <class Type, bool ONE>
struct Shape {
  // Values of one token are copied along with the blocks; those of more are read where
  // they are, as many warps read the same.
  static constexpr int STAGE =
      ROWS * RowCopy<Type>::BYTES + (ONE ? Type::COLUMNS * 2 : 0);
  static constexpr int TABLE = (Type::TABLE * 4 + 15) / 16 * 16;

  static constexpr int bytes(int stages) {
    const int ring = WARPS * stages * STAGE;
    const int sums = WARPS * ROWS * TOKENS * 4;
    return TABLE + (ring > sums ? ring : sums);
  }
};

// scale * (sum of products) - minimum * (sum of values), where products are those of
// widened quants.
template <class Type>
__device__ __forceinline__ float scaled(const Type& row, int group, float products,
                                        float totals) {
  const float scale = row.scale(group);
  if constexpr (Type::FORM != Form::BYTES) return scale * products;
  float less = scale * (128 + Type::OFFSET);
  if constexpr (Type::MINIMUM) less += row.minimum(group);
  return scale * products - less * totals;
}

// One token: add a run's products of two rows. x: the run's values in shared memory.
template <class Type>
__device__ __forceinline__ void add_run(const uint8_t* const* rows,
                                        const uint32_t* table, int lane, int column,
                                        const uint2* x, const uint2* zeros,
                                        float* sums) {
  constexpr int PARTS = Type::COLUMNS / 32, HALVES = 32 / Type::GROUP;
  const uint32_t ones[4] = {BF16_ONES, BF16_ONES, BF16_ONES, BF16_ONES};
  float products[HALVES][4] = {}, totals[HALVES][4] = {};
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    uint32_t a[2][4];
    load_quants<Type>(rows, table, part, lane, a);
    const uint2* values = column == part ? x + 8 * part : zeros;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint2 b = values[4 * half + lane];
      multiply(products[half % HALVES], a[half], b);
      if constexpr (Type::FORM == Form::BYTES) multiply(totals[half % HALVES], ones, b);
    }
  }
  const Type blocks[2] = {Type(rows[0]), Type(rows[1])};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int part = 2 * lane + i;
    if (PARTS == TOKENS || part < PARTS) {
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int group = part * HALVES + half;
        const float total = totals[half][i];
        sums[0] += scaled(blocks[0], group, products[half][i], total);
        sums[1] += scaled(blocks[1], group, products[half][2 + i], total);
      }
    }
  }
}

// Several tokens: the same for 4 sums, of two rows and two tokens. x: this lane's
// token.
template <class Type>
__device__ __forceinline__ void add_run(const uint8_t* const* rows,
                                        const uint32_t* table, int lane, const uint2* x,
                                        float* sums) {
  constexpr int HALVES = 32 / Type::GROUP;
  const uint32_t ones[4] = {BF16_ONES, BF16_ONES, BF16_ONES, BF16_ONES};
  const Type blocks[2] = {Type(rows[0]), Type(rows[1])};
#pragma unroll
  for (int part = 0; part < Type::COLUMNS / 32; part++) {
    uint32_t a[2][4];
    load_quants<Type>(rows, table, part, lane, a);
    const uint2 b[2] = {__ldg(x + 8 * part + lane), __ldg(x + 8 * part + 4 + lane)};
    float products[HALVES][4] = {}, totals[HALVES][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      multiply(products[half % HALVES], a[half], b[half]);
      if constexpr (Type::FORM == Form::BYTES)
        multiply(totals[half % HALVES], ones, b[half]);
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const int group = part * HALVES + half;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        sums[j] += scaled(blocks[j / 2], group, products[half][j], totals[half][j]);
      }
    }
  }
}

// A run that a warp multiplies: run `run` of matrix `which`, which are gate and up, or
// the experts of a token's slots.
struct Cursor {
  int which, run;
  __device__ __forceinline__ void settle(int runs) {
    while (run >= runs) {
      run -= runs;
      which++;
    }
  }
};

// What a lane copies of every run: some pieces of 16 bytes of some rows.
template <class Type>
struct LaneCopy {
  static constexpr int PIECES = RowCopy<Type>::PIECES;
  static constexpr int COUNT = (ROWS * PIECES + 31) / 32;
  const uint8_t* rows[COUNT];
  int lane;

  // Rows beyond the last repeat it.
  __device__ __forceinline__ LaneCopy(const uint8_t* first, int64_t row_stride,
                                      int count, int lane)
      : lane(lane) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      rows[i] = first + min((lane + 32 * i) / PIECES, count - 1) * row_stride;
    }
  }

  // offset: from the row's first byte to the run's.
  __device__ __forceinline__ void operator()(uint8_t* stage, int64_t offset) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int row = (lane + 32 * i) / PIECES, piece = (lane + 32 * i) % PIECES;
      if (ROWS * PIECES % 32 == 0 || row < ROWS) {
        uint8_t* target = stage + row * RowCopy<Type>::BYTES;
        RowCopy<Type>::copy(target, rows[i] + offset, piece);
      }
    }
  }
};

// Add what warps have of the same rows and write it. all: shared memory for SUMS sums
// of each row and part.
template <Mode MODE, bool ONE>
__device__ __forceinline__ void store(const SkinnyArgs& args, float* all,
                                      const float* sums) {
  constexpr int SUMS = MODE == Mode::GATE_UP ? 2 : ONE ? 1 : TOKENS;
  const int warp = threadIdx.x / 32, quad_row = threadIdx.x % 32 / 4;
  const int quad_lane = threadIdx.x % 4, rows = args.row_warps * ROWS;
  const int part = warp / args.row_warps, first = warp % args.row_warps * ROWS;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float sum = sums[j];
    int row = first + quad_row + j / 2 * 8, column = 2 * quad_lane + j % 2;
    if constexpr (ONE) {
      // Lanes of a quad have different groups; sums are of gate or all, then of up.
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      row = first + quad_row + j % 2 * 8;
      column = quad_lane == 0 ? j / 2 : SUMS;
    }
    if (column < SUMS) all[(part * rows + row) * SUMS + column] = sum;
  }
  __syncthreads();
  constexpr int STORED = ONE ? 1 : TOKENS;
  for (int i = threadIdx.x; i < rows * STORED; i += WARPS * 32) {
    const int row = i % rows, column = i / rows;
    float total = 0.0f, up = 0.0f;
    for (int j = 0; j < WARPS / args.row_warps; j++) {
      const float* at = all + (j * rows + row) * SUMS + column;
      total += at[0];
      if constexpr (MODE == Mode::GATE_UP) up += at[1];
    }
    if constexpr (MODE == Mode::GATE_UP) total = up * total / (1.0f + __expf(-total));
    const int64_t out_row = static_cast<int64_t>(blockIdx.x) * rows + row;
    const int64_t token = static_cast<int64_t>(blockIdx.y) * STORED + column;
    if (out_row < args.rows && (ONE || token < args.tokens)) {
      args.out[token * args.out_stride + out_row] = __float2bfloat16(total);
    }
  }
}

// Blocks of threads that a multiprocessor shall have room for. SM12x has shared memory
// for one of the largest kernels, which then need not spill registers.
template <class Type, bool ONE>
constexpr int min_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return ONE || Type::GROUP == 32 ? 2 : 1;
#else
  return 2;
#endif
}

// Program (i, j): rows from i * ROWS * row_warps on. LINEAR: of tokens from TOKENS j
// on; GATE_UP: of slot j; DOWN: of token j.
template <class Type, Mode MODE, bool ONE>
__global__ void __launch_bounds__(WARPS * 32, min_blocks<Type, ONE>())
    skinny_kernel(const SkinnyArgs args) {
  static_assert(MODE == Mode::LINEAR || ONE);
  using Shape = Shape<Type, ONE>;
  GGUF_DYNAMIC_SHARED(shared);
  __shared__ uint2 zeros[8];
  __shared__ int64_t slot_experts[MAX_TOP_K];  // their offset in bytes; below 0: none
  __shared__ float slot_factors[MAX_TOP_K];
  if (MODE == Mode::GATE_UP && args.ids[blockIdx.y] < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int quad_row = lane / 4, quad_lane = lane % 4;
  const int split = WARPS / args.row_warps, part = warp / args.row_warps;
  const int row_warp = warp % args.row_warps;
  const int64_t first_row =
      (static_cast<int64_t>(blockIdx.x) * args.row_warps + row_warp) * ROWS;
  const int rows = static_cast<int>(args.rows - first_row);
  const int runs = args.columns / Type::COLUMNS;
  const int matrices = rows <= 0              ? 0
                       : MODE == Mode::LINEAR ? 1
                       : MODE == Mode::DOWN   ? args.top_k
                                              : 2;

  const uint8_t* blocks = args.blocks + first_row * args.row_stride;
  const __nv_bfloat16* x = args.x;
  if constexpr (MODE == Mode::GATE_UP) {
    blocks += args.ids[blockIdx.y] * args.expert_stride;
    x += blockIdx.y / args.top_k * args.x_stride;
  } else if constexpr (MODE == Mode::DOWN) {
    x += static_cast<int64_t>(blockIdx.y) * args.top_k * args.x_stride;
    for (int i = threadIdx.x; i < args.top_k; i += WARPS * 32) {
      const int64_t slot = static_cast<int64_t>(blockIdx.y) * args.top_k + i;
      slot_experts[i] = args.ids[slot] < 0 ? -1 : args.ids[slot] * args.expert_stride;
      slot_factors[i] = args.router[slot];
    }
    __syncthreads();
  } else if constexpr (!ONE) {
    // Tokens beyond the last repeat it; their sums are not stored.
    const int token = static_cast<int>(blockIdx.y) * TOKENS + quad_row;
    x += min(token, args.tokens - 1) * args.x_stride;
  }

  auto* table = reinterpret_cast<uint32_t*>(shared);
  uint8_t* ring = shared + Shape::TABLE;
  uint8_t* stages = ring + warp * args.stages * Shape::STAGE;
  const LaneCopy<Type> copy(blocks, args.row_stride, rows, lane);
  auto offset_of = [&](const Cursor& at) -> int64_t {
    const int64_t offset = static_cast<int64_t>(at.run) * Type::BYTES;
    if constexpr (MODE == Mode::GATE_UP) return offset + at.which * args.up_offset;
    if constexpr (MODE == Mode::DOWN) return offset + slot_experts[at.which];
    return offset;
  };
  auto is_there = [&](const Cursor& at) {
    return at.which < matrices && (MODE != Mode::DOWN || slot_experts[at.which] >= 0);
  };
  auto start = [&](const Cursor& at, uint8_t* stage) {
    if (is_there(at)) {
      copy(stage, offset_of(at));
      if (ONE && lane < Type::COLUMNS / 8) {
        const int64_t source = MODE == Mode::DOWN ? at.which * args.x_stride : 0;
        const int column = at.run * Type::COLUMNS + 8 * lane;
        copy_16(stage + ROWS * RowCopy<Type>::BYTES + 16 * lane, x + source + column);
      }
    }
    end_copies();
  };

  Cursor next{0, part};
  next.settle(runs);
  Cursor now = next;
  for (int i = 0; i < args.stages - 1; i++) {
    start(next, stages + i * Shape::STAGE);
    next.run += split;
    next.settle(runs);
  }
  for (int i = threadIdx.x; i < Type::TABLE; i += WARPS * 32) {
    table[i] = Type::table_word(args.table, i);
  }
  if (threadIdx.x < 8) zeros[threadIdx.x] = {0, 0};
  __syncthreads();

  // One token: of two rows; gate and up, or all. Several: of two rows and two tokens.
  float sums[4] = {};
  int slot = 0;
  while (now.which < matrices) {
    if (args.stages == 2) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<1>();
    }
    __syncwarp();
    // All have left the stage that was used before.
    start(next, stages + (slot == 0 ? args.stages - 1 : slot - 1) * Shape::STAGE);
    next.run += split;
    next.settle(runs);
    if (is_there(now)) {
      const uint8_t* stage = stages + slot * Shape::STAGE;
      const int64_t offset = offset_of(now);
      const uint8_t* at[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = quad_row + 8 * j;
        at[j] = stage + row * RowCopy<Type>::BYTES;
        if constexpr (Type::ALIGN < 16) {
          const uint8_t* from = blocks + min(row, rows - 1) * args.row_stride + offset;
          at[j] += RowCopy<Type>::before(from);
        }
      }
      if constexpr (ONE) {
        const auto* values =
            reinterpret_cast<const uint2*>(stage + ROWS * RowCopy<Type>::BYTES);
        float of_run[2] = {};
        add_run<Type>(at, table, quad_lane, quad_row, values, zeros, of_run);
        const float factor = MODE == Mode::DOWN ? slot_factors[now.which] : 1.0f;
        const bool is_up = MODE == Mode::GATE_UP && now.which == 1;
#pragma unroll
        for (int j = 0; j < 2; j++) {
          sums[j] += is_up ? 0.0f : factor * of_run[j];
          sums[2 + j] += is_up ? of_run[j] : 0.0f;
        }
      } else {
        const auto* values =
            reinterpret_cast<const uint2*>(x + now.run * Type::COLUMNS);
        add_run<Type>(at, table, quad_lane, values, sums);
      }
    }
    now.run += split;
    now.settle(runs);
    slot = slot + 1 == args.stages ? 0 : slot + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
  store<MODE, ONE>(args, reinterpret_cast<float*>(ring), sums);
}

#ifdef __CUDACC__

inline int attribute(cudaDeviceAttr what) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, what, device);
  return value;
}

// Warps with rows of their own: as many as leave two blocks of threads for each
// multiprocessor.
inline int row_warps_for(int rows, int programs) {
  const int64_t wanted = 2 * attribute(cudaDevAttrMultiProcessorCount);
  int warps = 4;
  while (warps > 1 && int64_t{rows} * programs < wanted * warps * ROWS) warps /= 2;
  return warps;
}

template <class Type, Mode MODE, bool ONE>
cudaError_t launch_kernel(SkinnyArgs args, int programs, cudaStream_t stream) {
  using Shape = Shape<Type, ONE>;
  if (programs == 0 || args.rows == 0) return cudaSuccess;
  if (args.row_warps == 0) args.row_warps = row_warps_for(args.rows, programs);
  // Three stages if two blocks of threads still fit.
  const int room = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  if (args.stages == 0) args.stages = room >= 2 * (Shape::bytes(3) + 2048) ? 3 : 2;
  static_assert(Shape::bytes(2) <= SKINNY_SHARED);
  const int bytes = Shape::bytes(args.stages);
  const auto kernel = skinny_kernel<Type, MODE, ONE>;
  const auto what = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaFuncSetAttribute(kernel, what, bytes) != cudaSuccess) {
    return cudaGetLastError();  // and no later launch shall find it
  }
  const int rows = args.row_warps * ROWS;
  const dim3 grid((args.rows + rows - 1) / rows, programs);
  kernel<<<grid, WARPS * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Type>
cudaError_t launch_skinny(Mode mode, SkinnyArgs args, cudaStream_t stream) {
  if (mode == Mode::GATE_UP) {
    const int slots = args.tokens * args.top_k;
    return launch_kernel<Type, Mode::GATE_UP, true>(args, slots, stream);
  }
  if (mode == Mode::DOWN) {
    return launch_kernel<Type, Mode::DOWN, true>(args, args.tokens, stream);
  }
  if (args.tokens == 1) return launch_kernel<Type, Mode::LINEAR, true>(args, 1, stream);
  const int tiles = (args.tokens + TOKENS - 1) / TOKENS;
  return launch_kernel<Type, Mode::LINEAR, false>(args, tiles, stream);
}

#endif

}  // namespace vllm_glm_dsa
