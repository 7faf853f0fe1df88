// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// For tests, which compile it alone: weights of blocks as the kernels see them.
#include "types.cuh"

namespace vllm_glm_dsa {

// Quant `i` of four, of which there are two times, less the offset.
template <class Type>
static float quant(const uint32_t* q, int half, int i) {
  if constexpr (Type::FORM == Form::BFLOAT16) {
    const uint32_t two = q[2 * half + i / 2];
    return float_of(i % 2 ? two & 0xFFFF0000 : two << 16);
  }
  const uint32_t byte = byte_of(q[half], i);
  if (Type::FORM == Form::SIGNED_BYTES) return static_cast<int8_t>(byte);
  return static_cast<float>(static_cast<int>(byte) - Type::OFFSET);
}

template <class Type>
static void decode(const uint8_t* blocks, int64_t runs, const int32_t* table,
                   float* weights) {
  uint32_t words[Type::TABLE + 1];
  for (int i = 0; i < Type::TABLE; i++) words[i] = Type::table_word(table, i);
  for (int64_t run = 0; run < runs; run++) {
    const uint8_t* at = blocks + run * Type::BYTES;
    const Type row(at);
    for (int column = 0; column < Type::COLUMNS; column++, weights++) {
      uint32_t q[4];
      Type::quants(at, words, column / 32, column % 16 / 4, q);
      const int group = column / Type::GROUP;
      *weights = row.scale(group) * quant<Type>(q, column / 16 % 2, column % 4);
      if (Type::MINIMUM) *weights -= row.minimum(group);
    }
  }
}

}  // namespace vllm_glm_dsa

// Decode `runs` runs of COLUMNS weights; the number of COLUMNS, or 0 for other types.
extern "C" int decode_blocks(int type, const uint8_t* blocks, int64_t runs,
                             const int32_t* table, float* weights) {
  int columns = 0;
  vllm_glm_dsa::with_type(type, [&](auto tag) {
    using Type = typename decltype(tag)::type;
    columns = Type::COLUMNS;
    vllm_glm_dsa::decode<Type>(blocks, runs, table, weights);
  });
  return columns;
}
