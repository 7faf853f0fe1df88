// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// Included before every source. These functions of torch's stable ABI are only in CUDA
// builds of torch. Weak, they do not keep the extension from loading beside another build,
// where nothing calls them: its operations are registered for CUDA tensors.
#pragma weak aoti_torch_create_cuda_guard
#pragma weak aoti_torch_create_cuda_stream_guard
#pragma weak aoti_torch_cuda_caching_allocator_raw_alloc
#pragma weak aoti_torch_cuda_caching_allocator_raw_delete
#pragma weak aoti_torch_cuda_guard_set_index
#pragma weak aoti_torch_delete_cuda_guard
#pragma weak aoti_torch_delete_cuda_stream_guard
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg
#pragma weak torch_cuda_stream_synchronize
#pragma weak torch_get_cuda_stream_from_pool
#pragma weak torch_get_current_cuda_blas_handle
#pragma weak torch_set_current_cuda_stream
