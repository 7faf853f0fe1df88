// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#include "tiles.cuh"

namespace vllm_glm_dsa {

#define LAUNCH(TYPE) \
  template cudaError_t launch_tiles<TYPE>(TileMode, int, const TileArgs&, cudaStream_t);

LAUNCH(Q4_0)
LAUNCH(Q4_1)
LAUNCH(Q5_0)
LAUNCH(Q5_1)
LAUNCH(Q8_0)
LAUNCH(IQ4_NL)
LAUNCH(MXFP4)

#undef LAUNCH

}  // namespace vllm_glm_dsa
