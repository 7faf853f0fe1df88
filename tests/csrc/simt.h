// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Runs a CUDA kernel on the host: threads of a block are contexts that are switched
// where they wait for each other. Blocks run one after another. Enough for csrc/gguf:
// barriers, shuffles, mma.m16n8k16 and cp.async, whose copies are done either at once
// or as late as they may be, so that a stage that is read too early or overwritten too
// early shows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

uint3 threadIdx, blockIdx;

namespace simt {

struct Barrier {
  int arrived = 0;
  long generation = 0;
};

struct Fragments {
  uint32_t a[32][4];
  uint2 b[32];
  float value[32];
};

using Copies = std::vector<std::pair<void*, const void*>>;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  Copies open;
  std::deque<Copies> groups;
};

constexpr size_t STACK = 256 * 1024;

ucontext_t scheduler;
std::vector<Thread> threads;
int current;
Barrier block_barrier;
std::vector<Barrier> warp_barriers;
std::vector<Fragments> fragments;
std::vector<uint8_t> memory;
bool late_copies;
bool moved;  // some thread has passed a barrier, or is done
std::function<void()> body;

inline Thread& self() { return threads[current]; }
inline int lane() { return current % 32; }

inline void wait_for(Barrier& barrier, int count) {
  const long generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
    moved = true;
    return;
  }
  while (barrier.generation == generation) {
    const int me = current;
    swapcontext(&threads[me].context, &scheduler);
  }
}

inline void wait_for_warp() { wait_for(warp_barriers[current / 32], 32); }

inline void enter() {
  body();
  self().done = true;
  while (true) swapcontext(&self().context, &scheduler);
}

// Run one block of `count` threads; returns false if they wait for each other forever.
inline bool run_block(int count, size_t shared_bytes, bool backwards) {
  threads = std::vector<Thread>(count);
  warp_barriers.assign(count / 32, Barrier{});
  fragments.assign(count / 32, Fragments{});
  block_barrier = Barrier{};
  // What a kernel does not write is NaN in any type.
  memory.assign(shared_bytes + 16, 0xFF);
  for (auto& thread : threads) {
    thread.stack = std::make_unique<char[]>(STACK);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, enter, 0);
  }
  int left = count;
  while (left > 0) {
    moved = false;
    for (int i = 0; i < count; i++) {
      current = backwards ? count - 1 - i : i;
      if (self().done) continue;
      threadIdx = {static_cast<unsigned>(current), 0, 0};
      swapcontext(&scheduler, &self().context);
      if (self().done) {
        left--;
        moved = true;
      }
    }
    if (!moved) return false;
  }
  return true;
}

inline void finish(Copies& copies) {
  for (const auto& [target, source] : copies) std::memcpy(target, source, 16);
  copies.clear();
}

inline float half_of_pair(uint32_t pair, int i) {
  const uint32_t bits = i ? pair & 0xFFFF0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace simt

inline void __syncthreads() {
  simt::wait_for(simt::block_barrier, static_cast<int>(simt::threads.size()));
}
inline void __syncwarp() { simt::wait_for_warp(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  auto& all = simt::fragments[simt::current / 32].value;
  all[simt::lane()] = value;
  simt::wait_for_warp();
  const float other = all[simt::lane() ^ mask];
  simt::wait_for_warp();
  return other;
}
template <class T>
T __ldg(const T* at) {
  return *at;
}
inline float __expf(float x) { return std::exp(x); }
using std::min;

namespace vllm_glm_dsa {

inline uint8_t* dynamic_shared() {
  const auto start = reinterpret_cast<uintptr_t>(simt::memory.data());
  return reinterpret_cast<uint8_t*>((start + 15) & ~uintptr_t{15});
}

inline void copy_16(void* target, const void* source) {
  const auto places =
      reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source);
  if (places % 16 != 0) std::abort();
  if (simt::late_copies) {
    simt::self().open.emplace_back(target, source);
  } else {
    std::memcpy(target, source, 16);
  }
}

inline void end_copies() {
  simt::self().groups.push_back(std::move(simt::self().open));
  simt::self().open.clear();
}

template <int PENDING>
void wait_for_copies() {
  auto& groups = simt::self().groups;
  while (groups.size() > PENDING) {
    simt::finish(groups.front());
    groups.pop_front();
  }
}

inline uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int i = 0; i < 2; i++) {
    const float value = std::fma(simt::half_of_pair(a, i), simt::half_of_pair(b, i),
                                 simt::half_of_pair(c, i));
    result |= static_cast<uint32_t>(__float2bfloat16(value).bits) << (16 * i);
  }
  return result;
}

// In the layout of PTX's mma.m16n8k16: lane = 4 g + t.
inline void multiply(float* sums, const uint32_t* a, uint2 b) {
  auto& all = simt::fragments[simt::current / 32];
  std::memcpy(all.a[simt::lane()], a, 16);
  all.b[simt::lane()] = b;
  simt::wait_for_warp();
  const int g = simt::lane() / 4, t = simt::lane() % 4;
  for (int j = 0; j < 4; j++) {
    const int row = g + j / 2 * 8, column = 2 * t + j % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const int from = k % 8 / 2, upper = k / 8;
      const uint32_t left = all.a[row % 8 * 4 + from][row / 8 + 2 * upper];
      const uint2 right = all.b[column * 4 + from];
      sum += simt::half_of_pair(left, k % 2) *
             simt::half_of_pair(upper ? right.y : right.x, k % 2);
    }
    sums[j] += sum;
  }
  simt::wait_for_warp();
}

}  // namespace vllm_glm_dsa
