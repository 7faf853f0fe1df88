// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// ggml's numbers of the types that the kernels take.
#pragma once

#include "iq_blocks.cuh"

namespace vllm_glm_dsa {

// clang-format off
#define GGUF_TYPES(DO)                                                          \
  DO(2, Q4_0) DO(3, Q4_1) DO(6, Q5_0) DO(7, Q5_1) DO(8, Q8_0)                   \
  DO(10, Q2_K) DO(11, Q3_K) DO(12, Q4_K) DO(13, Q5_K) DO(14, Q6_K)              \
  DO(16, IQ2_XXS) DO(17, IQ2_XS) DO(18, IQ3_XXS) DO(19, IQ1_S) DO(20, IQ4_NL)   \
  DO(21, IQ3_S) DO(22, IQ2_S) DO(23, IQ4_XS) DO(29, IQ1_M) DO(39, MXFP4)
// clang-format on

template <class Type>
struct Tag {
  using type = Type;
};

// Call `body` with the Tag of a type; false if there is no such type.
template <class Body>
bool with_type(int type, Body&& body) {
  switch (type) {
#define GGUF_CASE(NUMBER, NAME) \
  case NUMBER:                  \
    body(Tag<NAME>{});          \
    return true;
    GGUF_TYPES(GGUF_CASE)
#undef GGUF_CASE
    default:
      return false;
  }
}

}  // namespace vllm_glm_dsa
