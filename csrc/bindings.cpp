// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// The operators of the extension, on torch's stable ABI. Callers check sizes; what
// would read or write elsewhere is checked here too.
#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "gguf/skinny.h"
#include "gguf/tiles.h"
#include "gguf/types.cuh"

namespace vllm_glm_dsa {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

static cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

static void check(const Tensor& tensor, const char* name, ScalarType type,
                  int64_t dims) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, " must be on a CUDA device");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has another dtype");
  STD_TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions, not ",
                  tensor.dim());
  STD_TORCH_CHECK(tensor.stride(dims - 1) == 1 || tensor.size(dims - 1) <= 1, name,
                  " must be contiguous in its last dimension");
}

template <class... Tensors>
static void check_devices(const Tensor& x, const Tensors&... others) {
  const auto device = x.get_device_index();
  STD_TORCH_CHECK(((others.get_device_index() == device) && ...),
                  "tensors must be on one device");
}

// What kernels of both kinds ask of `args`, for blocks of a type. row_bytes: of a row;
// table: the codebook.
template <class Type, class Args>
static void check_places(const Args& args, int64_t row_bytes, const Tensor& table) {
  STD_TORCH_CHECK(args.columns > 0 && args.columns % Type::COLUMNS == 0,
                  "columns must be a multiple of ", Type::COLUMNS, ", not ",
                  args.columns);
  const auto places = reinterpret_cast<uintptr_t>(args.blocks) | args.row_stride |
                      args.expert_stride | args.up_offset;
  STD_TORCH_CHECK(places % Type::ALIGN == 0, "rows must begin at multiples of ",
                  Type::ALIGN, " bytes");
  const auto values = reinterpret_cast<uintptr_t>(args.x) | (2 * args.x_stride);
  STD_TORCH_CHECK(values % 16 == 0, "x must begin at multiples of 16 bytes");
  const int64_t expected = int64_t{args.columns / Type::COLUMNS} * Type::BYTES;
  STD_TORCH_CHECK(row_bytes == expected, args.columns, " columns take ", expected,
                  " bytes of a row, not ", row_bytes);
  STD_TORCH_CHECK(table.size(0) >= Type::TABLE_GIVEN, "the codebook must have ",
                  Type::TABLE_GIVEN, " words, not ", table.size(0));
}

static void check_launch(bool known, int64_t type, cudaError_t error) {
  STD_TORCH_CHECK(known, "no kernel for blocks of ggml type ", type);
  STD_TORCH_CHECK(error == cudaSuccess, "launch failed: ", cudaGetErrorString(error));
}

static void launch(int64_t type, Mode mode, const SkinnyArgs& args, int64_t row_bytes,
                   const Tensor& table, cudaStream_t stream) {
  const int warps = args.row_warps, stages = args.stages;
  STD_TORCH_CHECK(warps >= 0 && warps <= 8 && (warps & (warps - 1)) == 0,
                  "row_warps must be 0, 1, 2, 4 or 8, not ", warps);
  STD_TORCH_CHECK(stages == 0 || stages == 2 || stages == 3,
                  "stages must be 0, 2 or 3, not ", stages);
  cudaError_t error = cudaSuccess;
  const bool known = with_type(static_cast<int>(type), [&](auto tag) {
    using Type = typename decltype(tag)::type;
    check_places<Type>(args, row_bytes, table);
    error = launch_skinny<Type>(mode, args, stream);
  });
  check_launch(known, type, error);
}

static void launch(int64_t type, TileMode mode, int64_t tile, const TileArgs& args,
                   int64_t row_bytes, const Tensor& table, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  const bool known = with_type(static_cast<int>(type), [&](auto tag) {
    using Type = typename decltype(tag)::type;
    check_places<Type>(args, row_bytes, table);
    error = launch_tiles<Type>(mode, static_cast<int>(tile), args, stream);
  });
  check_launch(known, type, error);
}

template <class Args>
static Args args_of(const Tensor& x, const Tensor& out, const Tensor& table) {
  Args args{};
  args.x = static_cast<const __nv_bfloat16*>(x.data_ptr());
  args.x_stride = x.stride(0);
  args.out = static_cast<__nv_bfloat16*>(out.data_ptr());
  args.out_stride = out.stride(0);
  args.table = static_cast<const int32_t*>(table.data_ptr());
  args.columns = static_cast<int>(x.size(1));
  args.rows = static_cast<int>(out.size(1));
  return args;
}

// out [tokens, rows] = x [tokens, columns] times the transposed matrix of blocks, uint8
// [rows, row bytes].
void skinny_linear(const Tensor& out, const Tensor& x, const Tensor& blocks,
                   const Tensor& table, int64_t type, int64_t row_warps,
                   int64_t stages) {
  check(x, "x", ScalarType::BFloat16, 2);
  check(out, "out", ScalarType::BFloat16, 2);
  check(blocks, "blocks", ScalarType::Byte, 2);
  check(table, "table", ScalarType::Int, 1);
  STD_TORCH_CHECK(out.size(0) == x.size(0) && out.size(1) == blocks.size(0),
                  "out must be [tokens, rows]");
  check_devices(x, out, blocks, table);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  SkinnyArgs args = args_of<SkinnyArgs>(x, out, table);
  args.blocks = static_cast<const uint8_t*>(blocks.data_ptr());
  args.row_stride = blocks.stride(0);
  args.tokens = static_cast<int>(x.size(0));
  args.row_warps = static_cast<int>(row_warps);
  args.stages = static_cast<int>(stages);
  launch(type, Mode::LINEAR, args, blocks.size(1), table, current_stream(x));
}

// Routed experts of few tokens. hidden: [tokens * top-k, intermediate], a scratch. w13,
// w2: uint8 [experts, bytes], gate, then up, of one type, and down.
void skinny_experts(const Tensor& out, const Tensor& hidden, const Tensor& x,
                    const Tensor& w13, const Tensor& w2, const Tensor& router,
                    const Tensor& ids, const Tensor& table13, const Tensor& table2,
                    int64_t type13, int64_t type2, int64_t row_warps, int64_t stages) {
  check(x, "x", ScalarType::BFloat16, 2);
  check(out, "out", ScalarType::BFloat16, 2);
  check(hidden, "hidden", ScalarType::BFloat16, 2);
  check(w13, "w13", ScalarType::Byte, 2);
  check(w2, "w2", ScalarType::Byte, 2);
  check(ids, "ids", ScalarType::Long, 2);
  check(router, "router", ScalarType::Float, 2);
  check(table13, "table13", ScalarType::Int, 1);
  check(table2, "table2", ScalarType::Int, 1);
  const int64_t tokens = x.size(0), top_k = ids.size(1), inner = hidden.size(1);
  STD_TORCH_CHECK(top_k <= MAX_TOP_K, "top-k must be at most ", MAX_TOP_K, ", not ",
                  top_k);
  STD_TORCH_CHECK(tokens <= 1 || (ids.stride(0) == top_k && router.stride(0) == top_k),
                  "ids and router must be contiguous");
  STD_TORCH_CHECK(ids.size(0) == tokens && router.size(0) == tokens &&
                      router.size(1) == top_k && hidden.size(0) == tokens * top_k &&
                      out.size(0) == tokens && out.size(1) == x.size(1) && inner > 0 &&
                      x.size(1) > 0,
                  "sizes do not fit");
  STD_TORCH_CHECK(w13.size(1) % (2 * inner) == 0 && w2.size(1) % x.size(1) == 0,
                  "w13 and w2 must be whole rows, of ", inner, " and ", x.size(1));
  check_devices(x, out, hidden, w13, w2, router, ids, table13, table2);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  SkinnyArgs args = args_of<SkinnyArgs>(x, hidden, table13);
  args.ids = static_cast<const int64_t*>(ids.data_ptr());
  args.router = static_cast<const float*>(router.data_ptr());
  args.tokens = static_cast<int>(tokens);
  args.top_k = static_cast<int>(top_k);
  args.row_warps = static_cast<int>(row_warps);
  args.stages = static_cast<int>(stages);
  args.blocks = static_cast<const uint8_t*>(w13.data_ptr());
  args.expert_stride = w13.stride(0);
  args.up_offset = w13.size(1) / 2;
  args.row_stride = args.up_offset / inner;
  launch(type13, Mode::GATE_UP, args, args.row_stride, table13, stream);

  SkinnyArgs down = args_of<SkinnyArgs>(hidden, out, table2);
  down.ids = args.ids;
  down.router = args.router;
  down.tokens = args.tokens;
  down.top_k = args.top_k;
  down.row_warps = args.row_warps;
  down.stages = args.stages;
  down.blocks = static_cast<const uint8_t*>(w2.data_ptr());
  down.expert_stride = w2.stride(0);
  down.row_stride = w2.size(1) / out.size(1);
  launch(type2, Mode::DOWN, down, down.row_stride, table2, stream);
}

// The same as skinny_linear, of any number of tokens.
void tiles_linear(const Tensor& out, const Tensor& x, const Tensor& blocks,
                  const Tensor& table, int64_t type, int64_t tile) {
  check(x, "x", ScalarType::BFloat16, 2);
  check(out, "out", ScalarType::BFloat16, 2);
  check(blocks, "blocks", ScalarType::Byte, 2);
  check(table, "table", ScalarType::Int, 1);
  STD_TORCH_CHECK(out.size(0) == x.size(0) && out.size(1) == blocks.size(0),
                  "out must be [tokens, rows]");
  check_devices(x, out, blocks, table);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  auto args = args_of<TileArgs>(x, out, table);
  args.blocks = static_cast<const uint8_t*>(blocks.data_ptr());
  args.row_stride = blocks.stride(0);
  args.tokens = static_cast<int>(x.size(0));
  launch(type, TileMode::LINEAR, tile, args, blocks.size(1), table, current_stream(x));
}

// Slots sorted by expert. With top_k: out [sorted slots, rows] = silu(x Wg^T) * (x
// Wu^T) of x [tokens, columns]; else out [slots, rows] = x W^T of x [sorted slots,
// columns]. blocks: uint8 [experts, bytes], of which rows have `row_bytes`; order and
// tiles as in TileArgs.
void tiles_experts(const Tensor& out, const Tensor& x, const Tensor& blocks,
                   const Tensor& order, const Tensor& tiles, const Tensor& table,
                   int64_t type, int64_t row_bytes, int64_t top_k, int64_t tile) {
  check(x, "x", ScalarType::BFloat16, 2);
  check(out, "out", ScalarType::BFloat16, 2);
  check(blocks, "blocks", ScalarType::Byte, 2);
  check(order, "order", ScalarType::Long, 1);
  check(tiles, "tiles", ScalarType::Int, 1);
  check(table, "table", ScalarType::Int, 1);
  const int64_t matrices = top_k > 0 ? 2 : 1;
  STD_TORCH_CHECK(blocks.size(1) >= matrices * out.size(1) * row_bytes,
                  "blocks must have ", out.size(1), " rows of ", row_bytes, " bytes");
  STD_TORCH_CHECK(order.size(0) == out.size(0) &&
                      (top_k > 0 ? x.size(0) * top_k : x.size(0)) == out.size(0),
                  "order and out must be of all slots");
  check_devices(x, out, blocks, order, tiles, table);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  auto args = args_of<TileArgs>(x, out, table);
  args.blocks = static_cast<const uint8_t*>(blocks.data_ptr());
  args.row_stride = row_bytes;
  args.expert_stride = blocks.stride(0);
  args.up_offset = top_k > 0 ? out.size(1) * row_bytes : 0;
  args.order = static_cast<const int64_t*>(order.data_ptr());
  args.tiles = static_cast<const int32_t*>(tiles.data_ptr());
  args.max_tiles = static_cast<int>((tiles.size(0) - 1) / 3);
  args.top_k = static_cast<int>(top_k);
  const auto mode = top_k > 0 ? TileMode::GATE_UP : TileMode::DOWN;
  launch(type, mode, tile, args, row_bytes, table, current_stream(x));
}

bool has_kernels(int64_t device) {
  const cudaError_t error = find_skinny_kernels(static_cast<int>(device));
  if (error == cudaErrorNoKernelImageForDevice) return false;
  if (error == cudaErrorInvalidDeviceFunction) return false;
  STD_TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
  return true;
}

}  // namespace vllm_glm_dsa

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_glm_dsa, m) {
  m.def("gguf_has_kernels(int device) -> bool");
  m.def(
      "gguf_skinny_linear(Tensor! out, Tensor x, Tensor blocks, Tensor table, "
      "int type, int row_warps=0, int stages=0) -> ()");
  m.def(
      "gguf_skinny_experts(Tensor! out, Tensor! hidden, Tensor x, Tensor w13, "
      "Tensor w2, Tensor router, Tensor ids, Tensor table13, Tensor table2, "
      "int type13, int type2, int row_warps=0, int stages=0) -> ()");
  m.def(
      "gguf_tiles_linear(Tensor! out, Tensor x, Tensor blocks, Tensor table, "
      "int type, int tile) -> ()");
  m.def(
      "gguf_tiles_experts(Tensor! out, Tensor x, Tensor blocks, Tensor order, "
      "Tensor tiles, Tensor table, int type, int row_bytes, int top_k, int tile) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_glm_dsa, CompositeExplicitAutograd, m) {
  m.impl("gguf_has_kernels", TORCH_BOX(&vllm_glm_dsa::has_kernels));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_glm_dsa, CUDA, m) {
  m.impl("gguf_skinny_linear", TORCH_BOX(&vllm_glm_dsa::skinny_linear));
  m.impl("gguf_skinny_experts", TORCH_BOX(&vllm_glm_dsa::skinny_experts));
  m.impl("gguf_tiles_linear", TORCH_BOX(&vllm_glm_dsa::tiles_linear));
  m.impl("gguf_tiles_experts", TORCH_BOX(&vllm_glm_dsa::tiles_experts));
}

// Importing the module is what registers the operators; it has nothing of its own.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__glm_dsa_C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_glm_dsa_C", nullptr, 0,
                                      nullptr};
  return PyModule_Create(&module);
}
