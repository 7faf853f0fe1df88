// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// The kernels of csrc/gguf, run by `simt.h`. Each function returns 0, 1 if there is no
// such kernel, or 2 if threads wait forever.
#include "simt.h"
//
#include "gguf/skinny.cuh"
#include "gguf/tiles.cuh"

using namespace vllm_glm_dsa;

static int run(int threads, size_t shared, dim3 grid, int order,
               std::function<void()> kernel) {
  simt::body = std::move(kernel);
  simt::late_copies = order % 2;
  for (unsigned y = 0; y < grid.y; y++) {
    for (unsigned x = 0; x < grid.x; x++) {
      blockIdx = {x, y, 0};
      if (!simt::run_block(threads, shared, order / 2)) return 2;
    }
  }
  return 0;
}

template <class Type, Mode MODE, bool ONE>
static int skinny(const SkinnyArgs& args, int programs, int order) {
  const unsigned rows = args.row_warps * ROWS;
  const dim3 grid((args.rows + rows - 1) / rows, programs);
  return run(WARPS * 32, Shape<Type, ONE>::bytes(args.stages), grid, order,
             [args] { skinny_kernel<Type, MODE, ONE>(args); });
}

template <class Type, TileMode MODE, int TOKENS>
static int tiles(const TileArgs& args, int order) {
  const unsigned rows = MODE == TileMode::GATE_UP ? TILE_ROWS / 2 : TILE_ROWS;
  const unsigned count =
      MODE == TileMode::LINEAR ? (args.tokens + TOKENS - 1) / TOKENS : args.max_tiles;
  const dim3 grid((args.rows + rows - 1) / rows, count);
  return run(TILE_THREADS, TileShape<Type, TOKENS>::BYTES, grid, order,
             [args] { tiles_kernel<Type, MODE, TOKENS>(args); });
}

template <class Type, int TOKENS>
static int tiles(int mode, const TileArgs& args, int order) {
  switch (static_cast<TileMode>(mode)) {
    case TileMode::LINEAR:
      return tiles<Type, TileMode::LINEAR, TOKENS>(args, order);
    case TileMode::GATE_UP:
      return tiles<Type, TileMode::GATE_UP, TOKENS>(args, order);
    case TileMode::DOWN:
      return tiles<Type, TileMode::DOWN, TOKENS>(args, order);
  }
  return 1;
}

// order: bit 0: copies are late; bit 1: threads run backwards.
extern "C" int run_skinny(int type, int mode, const SkinnyArgs* args, int order) {
  int result = 1;
  with_type(type, [&](auto tag) {
    using Type = typename decltype(tag)::type;
    if (static_cast<Mode>(mode) == Mode::GATE_UP) {
      result =
          skinny<Type, Mode::GATE_UP, true>(*args, args->tokens * args->top_k, order);
    } else if (static_cast<Mode>(mode) == Mode::DOWN) {
      result = skinny<Type, Mode::DOWN, true>(*args, args->tokens, order);
    } else if (args->tokens == 1) {
      result = skinny<Type, Mode::LINEAR, true>(*args, 1, order);
    } else {
      const int programs = (args->tokens + TOKENS - 1) / TOKENS;
      result = skinny<Type, Mode::LINEAR, false>(*args, programs, order);
    }
  });
  return result;
}

extern "C" int run_tiles(int type, int mode, int tile, const TileArgs* args,
                         int order) {
  int result = 1;
  with_type(type, [&](auto tag) {
    using Type = typename decltype(tag)::type;
    if (tile == SMALL_TILE) result = tiles<Type, SMALL_TILE>(mode, *args, order);
    if (tile == LARGE_TILE) result = tiles<Type, LARGE_TILE>(mode, *args, order);
  });
  return result;
}
