// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#include "tiles.cuh"

namespace vllm_glm_dsa {

#define LAUNCH(TYPE) \
  template cudaError_t launch_tiles<TYPE>(TileMode, int, const TileArgs&, cudaStream_t);

LAUNCH(IQ1_S)
LAUNCH(IQ1_M)
LAUNCH(IQ2_XXS)
LAUNCH(IQ2_XS)
LAUNCH(IQ2_S)
LAUNCH(IQ3_XXS)
LAUNCH(IQ3_S)
LAUNCH(IQ4_XS)

#undef LAUNCH

}  // namespace vllm_glm_dsa
