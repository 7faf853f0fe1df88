// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Reading numbers from bytes, on the device and, for tests, on the host.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define GGUF_INLINE __host__ __device__ __forceinline__
#else
#define GGUF_INLINE inline
#endif

namespace vllm_glm_dsa {

// PRMT: each nibble of `selector` chooses a byte of b:a for the result, the lowest
// nibble for the lowest byte.
GGUF_INLINE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = (static_cast<uint64_t>(b) << 32) | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t place = (selector >> (4 * i)) & 7;
    result |= static_cast<uint32_t>((both >> (8 * place)) & 255) << (8 * i);
  }
  return result;
#endif
}

GGUF_INLINE uint32_t count_ones(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

GGUF_INLINE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

GGUF_INLINE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

GGUF_INLINE float half_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
#else
  const uint32_t sign = (bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 0) {
    const float value = fraction * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t biased = exponent == 31 ? 255 : exponent + 112;
  return float_of(sign | (biased << 23) | (fraction << 13));
#endif
}

// Numbers at any address that is a multiple of ALIGN. Nothing beyond them is read.
template <int ALIGN>
GGUF_INLINE uint32_t read16(const uint8_t* at) {
  if constexpr (ALIGN % 2 == 0) {
    return *reinterpret_cast<const uint16_t*>(at);
  } else {
    return at[0] | (at[1] << 8);
  }
}

template <int ALIGN>
GGUF_INLINE uint32_t read32(const uint8_t* at) {
  if constexpr (ALIGN % 4 == 0) {
    return *reinterpret_cast<const uint32_t*>(at);
  } else {
    return permute(read16<ALIGN>(at), read16<ALIGN>(at + 2), 0x5410);
  }
}

// Byte i of a word.
GGUF_INLINE uint32_t byte_of(uint32_t word, int i) { return (word >> (8 * i)) & 255; }

}  // namespace vllm_glm_dsa
