// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Types of GGUF blocks with codebooks, except those of four bits in blocks of 32; see
// blocks.cuh for what a struct has. Codebooks come from gguf-py: four values of an
// entry, as signed bytes, in an int32.
#pragma once

#include "blocks.cuh"

namespace vllm_glm_dsa {

// 64 more than four values, of which those are negated whose bit of `signs` is set.
// `values` are 64 more than the positive ones, and below 128.
GGUF_INLINE uint32_t with_signs(uint32_t values, uint32_t signs) {
  // Bit i goes to byte i, as there are seven bits from one factor to the next.
  const uint32_t minus = (signs * 0x00204081) & 0x01010101;
  // 128 - (64 + value) is 64 - value.
  return (values ^ (minus * 127)) + minus;
}

// Of eight signs, of which seven bits are stored and the eighth is their parity, the
// four of a lane: weights 0 to 3 or 4 to 7.
GGUF_INLINE uint32_t four_signs(uint32_t seven, int half) {
  // The lowest bit of a count is the parity; higher ones are cut off.
  return ((seven + count_ones(seven) * 128) >> (4 * half)) & 15;
}

// A grid with entries of 4 * WORDS values, and signs.
template <int BYTES_, int GROUP_, int ENTRIES, int WORDS>
struct Grid : Block<256, BYTES_, GROUP_, 64> {
  static constexpr int TABLE = ENTRIES * WORDS;
  static constexpr int TABLE_GIVEN = TABLE;
  GGUF_INLINE static uint32_t table_word(const int32_t* table, int i) {
    return static_cast<uint32_t>(table[i]) + 0x40404040;
  }
};

// d f16; for each 32 weights grid indices 4, signs (4 times 7 bits) and scale 4
struct IQ2_XXS : Grid<66, 32, 256, 2> {
  float d;
  const uint8_t* at;
  GGUF_INLINE explicit IQ2_XXS(const uint8_t* at)
      : d(half_of(read16<2>(at)) * 0.25f), at(at) {}
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    const uint8_t* part = at + 2 + 8 * g;
    const uint32_t signs = read32<2>(part + 4);
    for (int i = 0; i < 2; i++) {
      const int eight = 2 * i + (lane >> 1);
      const uint32_t values = table[2 * part[eight] + (lane & 1)];
      q[i] = with_signs(values, four_signs((signs >> (7 * eight)) & 127, lane & 1));
    }
  }
  GGUF_INLINE float scale(int g) const {
    return d * (0.5f + static_cast<float>(read16<2>(at + 2 + 8 * g + 6) >> 12));
  }
};

// Scales of 4 bits, for 16 weights each, which IQ2_XS and IQ2_S have.
template <int BYTES_, int ENTRIES>
struct FineGrid : Grid<BYTES_, 16, ENTRIES, 2> {
  float d;
  uint32_t scales[2];
  GGUF_INLINE explicit FineGrid(const uint8_t* at)
      : d(half_of(read16<2>(at)) * 0.25f),
        scales{read32<2>(at + BYTES_ - 8), read32<2>(at + BYTES_ - 4)} {}
  GGUF_INLINE float scale(int g) const {
    return d * (0.5f + static_cast<float>((pick(scales, g / 8) >> (4 * (g % 8))) & 15));
  }
};

// d f16, entries 64 (9 bits of grid index, 7 of signs), scales 8
struct IQ2_XS : FineGrid<74, 512> {
  using FineGrid::FineGrid;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    for (int i = 0; i < 2; i++) {
      const uint32_t code = read16<2>(at + 2 + 2 * (4 * g + 2 * i + (lane >> 1)));
      const uint32_t values = table[2 * (code & 511) + (lane & 1)];
      q[i] = with_signs(values, four_signs(code >> 9, lane & 1));
    }
  }
};

// d f16, grid indices 32, signs 32, two more bits of the indices 8, scales 8
struct IQ2_S : FineGrid<82, 1024> {
  using FineGrid::FineGrid;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    for (int i = 0; i < 2; i++) {
      const int eight = 2 * i + (lane >> 1);
      const uint32_t more = (at[66 + g] >> (2 * eight)) & 3;
      const uint32_t entry = at[2 + 4 * g + eight] | (more << 8);
      const uint32_t signs = at[34 + 4 * g + eight] >> (4 * (lane & 1));
      q[i] = with_signs(table[2 * entry + (lane & 1)], signs & 15);
    }
  }
};

// d f16, grid indices 64, signs (4 times 7 bits) and scales 32 (4 for 32 weights)
struct IQ3_XXS : Grid<98, 32, 256, 1> {
  float d;
  const uint8_t* at;
  GGUF_INLINE explicit IQ3_XXS(const uint8_t* at)
      : d(half_of(read16<2>(at)) * 0.5f), at(at) {}
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    const uint32_t signs = read32<2>(at + 66 + 4 * g);
    for (int i = 0; i < 2; i++) {
      const uint32_t values = table[at[2 + 8 * g + 4 * i + lane]];
      const uint32_t seven = (signs >> (7 * (2 * i + (lane >> 1)))) & 127;
      q[i] = with_signs(values, four_signs(seven, lane & 1));
    }
  }
  GGUF_INLINE float scale(int g) const {
    return d * (0.5f + static_cast<float>(read16<2>(at + 66 + 4 * g + 2) >> 12));
  }
};

// d f16, grid indices 64, ninth bits of them 8, signs 32, scales 4 (4 bits each)
struct IQ3_S : Grid<110, 32, 512, 1> {
  float d;
  uint32_t scales;
  GGUF_INLINE explicit IQ3_S(const uint8_t* at)
      : d(half_of(read16<2>(at))), scales(read32<2>(at + 106)) {}
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    for (int i = 0; i < 2; i++) {
      const int four = 4 * i + lane;
      const uint32_t ninth = (at[66 + g] >> four) & 1;
      const uint32_t values = table[at[2 + 8 * g + four] | (ninth << 8)];
      const uint32_t signs = at[74 + 4 * g + (four >> 1)] >> (4 * (lane & 1));
      q[i] = with_signs(values, signs & 15);
    }
  }
  GGUF_INLINE float scale(int g) const {
    return d * static_cast<float>(((scales >> (4 * g)) & 15) * 2 + 1);
  }
};

// A grid of -1, 0 and 1, whose values are shifted by an eighth up or down: in eighths,
// plus 16, they are 7 to 25. The table has 2 + value in the nibbles of one word for
// eight, weights 0 to 3 in the low ones of its bytes.
template <int BYTES_, int GROUP_>
struct TernaryGrid : Block<256, BYTES_, GROUP_, 16> {
  static constexpr int TABLE = 2048;
  static constexpr int TABLE_GIVEN = 2 * TABLE;
  GGUF_INLINE static uint32_t table_word(const int32_t* table, int i) {
    const uint32_t two = 0x02020202;
    const uint32_t low = (static_cast<uint32_t>(table[2 * i]) & 0x03030303) ^ two;
    const uint32_t high = (static_cast<uint32_t>(table[2 * i + 1]) & 0x03030303) ^ two;
    return low | (high << 4);
  }
  GGUF_INLINE static uint32_t eighths(uint32_t entry, int half, bool down) {
    const uint32_t values = (entry >> (4 * half)) & NIBBLES;
    return values * 8 + (down ? 0u - 0x01010101u : 0x01010101u);
  }
};

// d f16, grid indices 32, 16 (for 32 weights: 3 more bits of 4 indices, scale, shift)
struct IQ1_S : TernaryGrid<50, 32> {
  float d;
  const uint8_t* at;
  GGUF_INLINE explicit IQ1_S(const uint8_t* at)
      : d(half_of(read16<2>(at)) * 0.125f), at(at) {}
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    const uint32_t extra = read16<2>(at + 34 + 2 * g);
    for (int i = 0; i < 2; i++) {
      const int eight = 2 * i + (lane >> 1);
      const uint32_t more = (extra >> (3 * eight)) & 7;
      const uint32_t entry = table[at[2 + 4 * g + eight] | (more << 8)];
      q[i] = eighths(entry, lane & 1, extra >> 15);
    }
  }
  GGUF_INLINE float scale(int g) const {
    const uint32_t extra = read16<2>(at + 34 + 2 * g);
    return d * static_cast<float>(((extra >> 12) & 7) * 2 + 1);
  }
};

// grid indices 32, 16 (for 8 weights 4 bits: three of an index, shift), scales 8. Of a
// 16-bit number of scales, 12 bits are the scales of 64 weights, 16 each; the highest
// four are a quarter of d, the lowest quarter first.
struct IQ1_M : TernaryGrid<56, 16> {
  float d;
  uint32_t scales[2];
  GGUF_INLINE explicit IQ1_M(const uint8_t* at)
      : scales{read32<4>(at + 48), read32<4>(at + 52)} {
    const uint32_t low = ((scales[0] >> 12) & 0xF) | ((scales[0] >> 24) & 0xF0);
    const uint32_t high = ((scales[1] >> 4) & 0xF00) | ((scales[1] >> 16) & 0xF000);
    d = half_of(low | high) * 0.125f;
  }
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    for (int i = 0; i < 2; i++) {
      const int eight = 4 * g + 2 * i + (lane >> 1);
      const uint32_t extra = at[32 + eight / 2] >> (4 * (eight % 2));
      const uint32_t entry = table[at[eight] | ((extra & 7) << 8)];
      q[i] = eighths(entry, lane & 1, extra & 8);
    }
  }
  GGUF_INLINE float scale(int g) const {
    const uint32_t four = pick(scales, g / 8) >> (16 * (g / 4 % 2));
    return d * static_cast<float>(((four >> (3 * (g % 4))) & 7) * 2 + 1);
  }
};

// d f16, high bits of scales 2, low bits of scales 4 (for 32 weights), indices 128: 16
// bytes hold 32 weights, the first 16 of them in their low halves
struct IQ4_XS : Block<256, 136, 32, 0> {
  static constexpr Form FORM = Codebook::FORM;
  static constexpr int TABLE = Codebook::TABLE;
  static constexpr int TABLE_GIVEN = Codebook::TABLE_GIVEN;
  GGUF_INLINE static uint32_t table_word(const int32_t* table, int i) {
    return Codebook::table_word(table, i);
  }
  float d;
  uint32_t high, low;
  GGUF_INLINE explicit IQ4_XS(const uint8_t* at) : low(read32<4>(at + 4)) {
    const uint32_t both = read32<4>(at);
    d = half_of(both & 0xFFFF);
    high = both >> 16;
  }
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    Codebook::values(table, read32<4>(at + 8 + 16 * g + 4 * lane), q);
  }
  GGUF_INLINE float scale(int g) const {
    const uint32_t bits = ((low >> (4 * g)) & 15) | (((high >> (2 * g)) & 3) << 4);
    return d * static_cast<float>(static_cast<int>(bits) - 32);
  }
};

}  // namespace vllm_glm_dsa
