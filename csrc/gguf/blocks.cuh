// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Types of GGUF blocks, as quants and scales of a run of weights in one row.
//
// A struct for each type says, of a run of COLUMNS weights:
//   BYTES      the run's bytes: one block of 256, or some blocks of 32
//   ALIGN      of which number their address is a multiple
//   GROUP      weights that share a scale: 16 or 32
//   FORM       what quants are: see Form
//   OFFSET     what to subtract from a quant in the form BYTES
//   MINIMUM    whether groups have a minimum, to be subtracted
//   TABLE      32-bit words of its codebook, in the form of `table_word`, which takes
//              them from TABLE_GIVEN words of gguf-py's
// and has, for a row,
//   Row(at)                         what its groups share, read from the run's bytes
//   quants(at, table, g, lane, q)   of 32 weights from 32 g on: first the four from
//                                   4 lane on, then the four from 16 + 4 lane on. Two
//                                   words, or of bfloat16 four
//   scale(g), minimum(g)            of group g, float32
// So weight = scale * (quant - OFFSET) - minimum, and products with quants - OFFSET are
// exact in bfloat16.
//
// The order of fields in a block is given with their bytes.
#pragma once

#include "bytes.cuh"

namespace vllm_glm_dsa {

constexpr uint32_t NIBBLES = 0x0F0F0F0F;

enum class Form {
  BYTES,         // unsigned, below 128
  SIGNED_BYTES,  // without offset
  BFLOAT16,      // without offset
};

// words[i], which stays in registers if `i` is only known at run time.
template <int N>
GGUF_INLINE uint32_t pick(const uint32_t (&words)[N], int i) {
  uint32_t word = words[0];
#pragma unroll
  for (int j = 1; j < N; j++) word = i == j ? words[j] : word;
  return word;
}

// Byte i of several words.
template <int N>
GGUF_INLINE uint32_t pick_byte(const uint32_t (&words)[N], int i) {
  return byte_of(pick(words, i / 4), i % 4);
}

// What most types share. COLUMNS and BYTES are those of one block.
template <int COLUMNS_, int BYTES_, int GROUP_, int OFFSET_>
struct Block {
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int BYTES = BYTES_;
  static constexpr int ALIGN = BYTES_ % 16 == 0 ? 16 : BYTES_ % 4 == 0 ? 4 : 2;
  static constexpr int GROUP = GROUP_;
  static constexpr int OFFSET = OFFSET_;
  static constexpr Form FORM = Form::BYTES;
  static constexpr bool MINIMUM = false;
  static constexpr int TABLE = 0;
  static constexpr int TABLE_GIVEN = 0;
  GGUF_INLINE static uint32_t table_word(const int32_t*, int) { return 0; }
  GGUF_INLINE float minimum(int) const { return 0.0f; }
};

// ---- Blocks of 32 -------------------------------------------------------------------

// `COUNT` blocks of 32 weights: HEAD bytes with the scale first, then 16 of quants of
// four bits, weights 0 to 15 in their low halves.
template <int HEAD, int OFFSET_, int COUNT = 8>
struct Nibbles : Block<32 * COUNT, (HEAD + 16) * COUNT, 32, OFFSET_> {
  static constexpr int SIZE = HEAD + 16;
  static constexpr int ALIGN = SIZE % 4 == 0 ? 4 : SIZE % 2 == 0 ? 2 : 1;
  const uint8_t* at;
  GGUF_INLINE explicit Nibbles(const uint8_t* at) : at(at) {}
  GGUF_INLINE static void four_bits(const uint8_t* at, int g, int lane, uint32_t* q) {
    const uint32_t word = read32<ALIGN>(at + g * SIZE + HEAD + 4 * lane);
    q[0] = word & NIBBLES;
    q[1] = (word >> 4) & NIBBLES;
  }
  // 16 in the bytes of weights whose bit, of 32 at `START`, is set.
  template <int START>
  GGUF_INLINE static void fifth_bits(const uint8_t* at, int g, int lane, uint32_t* q) {
    for (int i = 0; i < 2; i++) {
      const uint32_t byte = at[g * SIZE + START + 2 * i + (lane >> 1)];
      // Bit i goes to byte i, as there are seven bits from one factor to the next.
      const uint32_t bits = (byte >> (4 * (lane & 1))) & 15;
      q[i] |= ((bits * 0x00204081) & 0x01010101) << 4;
    }
  }
  GGUF_INLINE float half_at(int g, int place) const {
    return half_of(read16<ALIGN>(at + g * SIZE + place));
  }
  GGUF_INLINE float scale(int g) const { return half_at(g, 0); }
};

// scale f16, quants 16
struct Q4_0 : Nibbles<2, 8> {
  using Nibbles::Nibbles;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    four_bits(at, g, lane, q);
  }
};

// scale f16, minimum f16 (to be added), quants 16
struct Q4_1 : Nibbles<4, 0> {
  using Nibbles::Nibbles;
  static constexpr bool MINIMUM = true;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    four_bits(at, g, lane, q);
  }
  GGUF_INLINE float minimum(int g) const { return -half_at(g, 2); }
};

// scale f16, fifth bits 4, quants 16
struct Q5_0 : Nibbles<6, 16> {
  using Nibbles::Nibbles;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    four_bits(at, g, lane, q);
    fifth_bits<2>(at, g, lane, q);
  }
};

// scale f16, minimum f16 (to be added), fifth bits 4, quants 16
struct Q5_1 : Nibbles<8, 0> {
  using Nibbles::Nibbles;
  static constexpr bool MINIMUM = true;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    four_bits(at, g, lane, q);
    fifth_bits<4>(at, g, lane, q);
  }
  GGUF_INLINE float minimum(int g) const { return -half_at(g, 2); }
};

// scale f16, quants 32 (signed); a run is four blocks, to be as long as others'
struct Q8_0 : Block<128, 4 * 34, 32, 0> {
  static constexpr int ALIGN = 2;
  static constexpr Form FORM = Form::SIGNED_BYTES;
  const uint8_t* at;
  GGUF_INLINE explicit Q8_0(const uint8_t* at) : at(at) {}
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    q[0] = read32<ALIGN>(at + g * 34 + 2 + 4 * lane);
    q[1] = read32<ALIGN>(at + g * 34 + 18 + 4 * lane);
  }
  GGUF_INLINE float scale(int g) const { return half_of(read16<ALIGN>(at + g * 34)); }
};

// A codebook of 16 values, as bfloat16: their low bytes, then their high bytes.
struct Codebook {
  static constexpr Form FORM = Form::BFLOAT16;
  static constexpr int TABLE = 8;
  static constexpr int TABLE_GIVEN = 4;
  GGUF_INLINE static uint32_t table_word(const int32_t* table, int i) {
    uint32_t word = 0;
    for (int j = 0; j < 4; j++) {
      const auto value = static_cast<int8_t>(byte_of(table[i % 4], j));
      const uint32_t bits = bits_of(static_cast<float>(value)) >> 16;
      word |= byte_of(bits, i / 4) << (8 * j);
    }
    return word;
  }
  // For four indices in the low half of `place`, without their highest bits, which are
  // in `upper`: bytes of the first or second half of a table.
  GGUF_INLINE static uint32_t look_up(const uint32_t* table, uint32_t place,
                                      uint32_t upper) {
    const uint32_t low = permute(table[0], table[1], place);
    return permute(low, permute(table[2], table[3], place), upper);
  }
  // Eight indices, of 32 weights those from 4 lane on in low halves of bytes.
  GGUF_INLINE static void values(const uint32_t* table, uint32_t word, uint32_t* q) {
    const uint32_t place = word & 0x77777777;
    // Byte i of a look-up comes from the second half where bit 3 of index i is set.
    const uint32_t upper = ((word >> 1) & 0x44444444) | 0x32103210;
    for (int i = 0; i < 2; i++) {
      const uint32_t low = look_up(table, place >> (16 * i), upper >> (16 * i));
      const uint32_t high = look_up(table + 4, place >> (16 * i), upper >> (16 * i));
      q[i] = permute(low, high, 0x6240);
      q[2 + i] = permute(low, high, 0x7351);
    }
  }
};

// `Nibbles` that are indices.
template <int HEAD>
struct IndexNibbles : Nibbles<HEAD, 0> {
  using Base = Nibbles<HEAD, 0>;
  using Base::Base;
  static constexpr Form FORM = Codebook::FORM;
  static constexpr int TABLE = Codebook::TABLE;
  static constexpr int TABLE_GIVEN = Codebook::TABLE_GIVEN;
  GGUF_INLINE static uint32_t table_word(const int32_t* table, int i) {
    return Codebook::table_word(table, i);
  }
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t* table, int g,
                                 int lane, uint32_t* q) {
    const uint8_t* word = at + g * Base::SIZE + HEAD + 4 * lane;
    Codebook::values(table, read32<Base::ALIGN>(word), q);
  }
};

// scale f16, indices 16
struct IQ4_NL : IndexNibbles<2> {
  using IndexNibbles::IndexNibbles;
};

// exponent 1, indices 16; the values are doubled, so the scale is half of 2**exponent
struct MXFP4 : IndexNibbles<1> {
  using IndexNibbles::IndexNibbles;
  GGUF_INLINE float scale(int g) const {
    const uint32_t exponent = at[g * SIZE];
    // The two least are below what float32 holds with an exponent of its own.
    return float_of(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23);
  }
};

// ---- K-quants -----------------------------------------------------------------------

// d f16, dmin f16, scales and minima 12: what Q4_K and Q5_K share
template <int BYTES_>
struct SixBitScales : Block<256, BYTES_, 32, 0> {
  static constexpr bool MINIMUM = true;
  float d, dmin;
  uint32_t scales[2], minima[2];
  // Byte i of the 12 has scale i below 4 and two bits of scale 4 + i, byte 4 + i the
  // same of the minima, byte 8 + i the low bits of scale and minimum 4 + i.
  GGUF_INLINE explicit SixBitScales(const uint8_t* at) {
    const uint32_t both = read32<4>(at);
    d = half_of(both & 0xFFFF);
    dmin = half_of(both >> 16);
    const uint32_t s = read32<4>(at + 4), m = read32<4>(at + 8);
    const uint32_t low = read32<4>(at + 12);
    scales[0] = s & 0x3F3F3F3F;
    minima[0] = m & 0x3F3F3F3F;
    scales[1] = (low & NIBBLES) | ((s >> 2) & 0x30303030);
    minima[1] = ((low >> 4) & NIBBLES) | ((m >> 2) & 0x30303030);
  }
  GGUF_INLINE float scale(int g) const {
    return d * static_cast<float>(pick_byte(scales, g));
  }
  GGUF_INLINE float minimum(int g) const {
    return dmin * static_cast<float>(pick_byte(minima, g));
  }
};

// 32 bytes hold 2 times 32 weights.
GGUF_INLINE void two_nibbles(const uint8_t* at, int g, int lane, uint32_t* q) {
  for (int i = 0; i < 2; i++) {
    const uint32_t word = read32<4>(at + g / 2 * 32 + 16 * i + 4 * lane);
    q[i] = (word >> (4 * (g % 2))) & NIBBLES;
  }
}

// d f16, dmin f16, scales and minima 12, quants 128
struct Q4_K : SixBitScales<144> {
  using SixBitScales::SixBitScales;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    two_nibbles(at + 16, g, lane, q);
  }
};

// d f16, dmin f16, scales and minima 12, fifth bits 32, quants 128
struct Q5_K : SixBitScales<176> {
  using SixBitScales::SixBitScales;
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    two_nibbles(at + 48, g, lane, q);
    for (int i = 0; i < 2; i++) {
      // Bit g of byte j belongs to weight 32 g + j.
      const uint32_t bits = read32<4>(at + 16 + 16 * i + 4 * lane);
      q[i] |= (g < 4 ? bits << (4 - g) : bits >> (g - 4)) & 0x10101010;
    }
  }
};

// Quants of 2 bits: 32 bytes hold 4 times 32 weights.
template <int ALIGN>
GGUF_INLINE void two_bits(const uint8_t* at, int g, int lane, uint32_t* q) {
  for (int i = 0; i < 2; i++) {
    const uint32_t word = read32<ALIGN>(at + g / 4 * 32 + 16 * i + 4 * lane);
    q[i] = (word >> (2 * (g % 4))) & 0x03030303;
  }
}

// scales and minima 16 (4 bits each, for 16 weights), quants 64, d f16, dmin f16
struct Q2_K : Block<256, 84, 16, 0> {
  static constexpr bool MINIMUM = true;
  float d, dmin;
  uint32_t both[4];
  GGUF_INLINE explicit Q2_K(const uint8_t* at) {
    for (int i = 0; i < 4; i++) both[i] = read32<4>(at + 4 * i);
    const uint32_t factors = read32<4>(at + 80);
    d = half_of(factors & 0xFFFF);
    dmin = half_of(factors >> 16);
  }
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    two_bits<4>(at + 16, g, lane, q);
  }
  GGUF_INLINE float scale(int g) const {
    return d * static_cast<float>(pick_byte(both, g) & 15);
  }
  GGUF_INLINE float minimum(int g) const {
    return dmin * static_cast<float>(pick_byte(both, g) >> 4);
  }
};

// high bits 32, quants 64, scales 12 (6 bits, for 16 weights), d f16
struct Q3_K : Block<256, 110, 16, 4> {
  float d;
  uint32_t scales[4];
  // Byte i of the 12 has the low four bits of scales i and 8 + i, byte 8 + i the other
  // two of scales i, 4 + i, 8 + i and 12 + i.
  GGUF_INLINE explicit Q3_K(const uint8_t* at) {
    d = half_of(read16<2>(at + 108));
    const uint32_t high = read32<2>(at + 104);
    for (int i = 0; i < 2; i++) {
      const uint32_t low = read32<2>(at + 96 + 4 * i);
      scales[i] = (low & NIBBLES) | ((high >> (2 * i) << 4) & 0x30303030);
      scales[2 + i] = ((low >> 4) & NIBBLES) | ((high >> (2 * i)) & 0x30303030);
    }
  }
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    two_bits<2>(at + 32, g, lane, q);
    for (int i = 0; i < 2; i++) {
      const uint32_t bits = read32<2>(at + 16 * i + 4 * lane);
      q[i] |= (g < 2 ? bits << (2 - g) : bits >> (g - 2)) & 0x04040404;
    }
  }
  GGUF_INLINE float scale(int g) const {
    return d * static_cast<float>(static_cast<int>(pick_byte(scales, g)) - 32);
  }
};

// low bits 128, high bits 64, scales 16 (signed, for 16 weights), d f16
struct Q6_K : Block<256, 210, 16, 32> {
  float d;
  uint32_t scales[4];
  GGUF_INLINE explicit Q6_K(const uint8_t* at) {
    for (int i = 0; i < 4; i++) scales[i] = read32<2>(at + 192 + 4 * i);
    d = half_of(read16<2>(at + 208));
  }
  GGUF_INLINE static void quants(const uint8_t* at, const uint32_t*, int g, int lane,
                                 uint32_t* q) {
    two_bits<2>(at + 128, g, lane, q);
    for (int i = 0; i < 2; i++) {
      // 64 bytes hold 2 times 64 weights.
      const int place = g / 4 * 64 + g % 2 * 32 + 16 * i + 4 * lane;
      const uint32_t low = read32<2>(at + place) >> (4 * (g / 2 % 2));
      q[i] = (q[i] << 4) | (low & NIBBLES);
    }
  }
  GGUF_INLINE float scale(int g) const {
    const auto code = static_cast<int8_t>(pick_byte(scales, g));
    return d * static_cast<float>(code);
  }
};

}  // namespace vllm_glm_dsa
