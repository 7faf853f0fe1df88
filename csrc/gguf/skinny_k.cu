// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#include "skinny.cuh"

namespace vllm_glm_dsa {

#define LAUNCH(TYPE) \
  template cudaError_t launch_skinny<TYPE>(Mode, SkinnyArgs, cudaStream_t);

LAUNCH(Q2_K)
LAUNCH(Q3_K)
LAUNCH(Q4_K)
LAUNCH(Q5_K)
LAUNCH(Q6_K)

#undef LAUNCH

cudaError_t find_skinny_kernels(int device) {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  cudaFuncAttributes attributes;
  const auto kernel = skinny_kernel<Q4_K, Mode::LINEAR, true>;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  cudaGetLastError();
  cudaSetDevice(before);
  return error;
}

}  // namespace vllm_glm_dsa
