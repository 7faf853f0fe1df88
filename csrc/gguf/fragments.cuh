// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Quants as fragments of mma.m16n8k16, of which they are A: rows of weights are its 16
// rows.
//
// The order of the k dimension in a product is free if both factors have the same: of
// 16 columns, lane i of a quad takes 4 i to 4 i + 3 as one word of quants and as 8
// bytes of values, where the instruction's own columns are 2 i, 2 i + 1, 2 i + 8 and
// 2 i + 9.
#pragma once

#include "types.cuh"

namespace vllm_glm_dsa {

constexpr uint32_t BF16_ONES = 0x3F803F80;

#ifdef __CUDACC__

#define GGUF_DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) uint8_t NAME[]

__device__ __forceinline__ void copy_16(void* target, const void* source) {
  const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(source)
               : "memory");
}

__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until no more than `PENDING` groups of copies are under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// a * b + c, of two bfloat16 each.
__device__ __forceinline__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// a: rows r and r + 8 of columns 0 to 7, then of 8 to 15, two in a word.
__device__ __forceinline__ void multiply(float* sums, const uint32_t* a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

#else

// Tests compile the kernels for the host, with these functions of their own.
#define GGUF_DYNAMIC_SHARED(NAME) uint8_t* const NAME = dynamic_shared()

uint8_t* dynamic_shared();
void copy_16(void* target, const void* source);
void end_copies();
template <int PENDING>
void wait_for_copies();
uint32_t fused(uint32_t a, uint32_t b, uint32_t c);
void multiply(float* sums, const uint32_t* a, uint2 b);

#endif

// Quants as bfloat16: bytes 0 and 1, and bytes 2 and 3. Of the form BYTES they are 128
// more, and the caller subtracts.
template <class Type>
__device__ __forceinline__ void widen(uint32_t quants, uint32_t& low, uint32_t& high) {
  if constexpr (Type::FORM == Form::SIGNED_BYTES) {
    // 128 + the low seven bits, and -128 or, of negative bytes, -256.
    low = permute(quants, 0, 0x4140);
    high = permute(quants, 0, 0x4342);
    low = fused((low & 0x007F007F) | 0x43004300, BF16_ONES,
                (low & 0x00800080) | 0xC300C300);
    high = fused((high & 0x007F007F) | 0x43004300, BF16_ONES,
                 (high & 0x00800080) | 0xC300C300);
  } else {
    // 0x43 before a byte below 128 makes 128 + byte.
    low = permute(quants, 0x43434343, 0x4140);
    high = permute(quants, 0x43434343, 0x4342);
  }
}

// Quants of 32 weights from 32 part on: a[0] of the first 16, a[1] of the others.
template <class Type>
__device__ __forceinline__ void load_quants(const uint8_t* const* rows,
                                            const uint32_t* table, int part, int lane,
                                            uint32_t (*a)[4]) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    uint32_t q[4];
    Type::quants(rows[row], table, part, lane, q);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if constexpr (Type::FORM == Form::BFLOAT16) {
        a[half][row] = q[2 * half];
        a[half][2 + row] = q[2 * half + 1];
      } else {
        widen<Type>(q[half], a[half][row], a[half][2 + row]);
      }
    }
  }
}

// How rows' runs lie in shared memory, copied from whatever alignment they have.
template <class Type>
struct RowCopy {
  // 16 bytes each.
  static constexpr int PIECES =
      (Type::BYTES + (Type::ALIGN == 16 ? 0 : 16 - Type::ALIGN) + 15) / 16;
  // An odd number of 16 bytes, so that words of 8 rows lie in different banks.
  static constexpr int BYTES = (PIECES | 1) * 16;

  // Bytes before the run in its first piece.
  static __device__ __forceinline__ int before(const uint8_t* run) {
    if constexpr (Type::ALIGN == 16) return 0;
    return static_cast<int>(reinterpret_cast<uintptr_t>(run)) & 15;
  }

  static __device__ __forceinline__ void copy(uint8_t* target, const uint8_t* run,
                                              int piece) {
    if (Type::ALIGN == 16 || 16 * piece < before(run) + Type::BYTES) {
      copy_16(target + 16 * piece, run - before(run) + 16 * piece);
    }
  }
};

}  // namespace vllm_glm_dsa
