// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#include "tiles.cuh"

namespace vllm_glm_dsa {

#define LAUNCH(TYPE) \
  template cudaError_t launch_tiles<TYPE>(TileMode, int, const TileArgs&, cudaStream_t);

LAUNCH(Q2_K)
LAUNCH(Q3_K)
LAUNCH(Q4_K)
LAUNCH(Q5_K)
LAUNCH(Q6_K)

#undef LAUNCH

}  // namespace vllm_glm_dsa
