// Refusals: every message names the argument, what it was and what it must be.
#pragma once

#include <sys/mman.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "common/data_type.h"
#include "common/index_array.h"
#include "common/math.h"
#include "runtime/driver.h"

namespace attn {

using tvm::ffi::TensorView;

inline std::string dtype_name(DLDataType dtype) {
  if (dtype.code == kDLFloat8_e4m3fn) return "float8_e4m3fn";
  if (dtype.code == kDLFloat8_e5m2) return "float8_e5m2";
  if (dtype.code == kDLBool) return "bool";
  const char* kind = dtype.code == kDLInt       ? "int"
                     : dtype.code == kDLUInt    ? "uint"
                     : dtype.code == kDLFloat   ? "float"
                     : dtype.code == kDLBfloat  ? "bfloat"
                     : dtype.code == kDLComplex ? "complex"
                                                : "dtype";
  return kind + std::to_string(dtype.bits);
}

inline std::string device_name(DLDevice device) {
  return device.device_type == kDLCPU    ? "cpu"
         : device.device_type == kDLCUDA ? "cuda:" + std::to_string(device.device_id)
                                         : "device type " + std::to_string(device.device_type);
}

template <class Was, class Must>
[[noreturn]] void refuse(const std::string& argument, const Was& was, const Must& must) {
  TVM_FFI_THROW(ValueError) << argument << " is " << was << ", must be " << must;
}

/// A struct that Python filled (attn_backend/kernels/structs.py).
template <class Struct>
Struct unpack(const tvm::ffi::Bytes& bytes) {
  static_assert(std::is_trivially_copyable<Struct>::value, "comes as bytes");
  if (bytes.size() != sizeof(Struct)) refuse("bytes of a struct", bytes.size(), sizeof(Struct));
  Struct value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

inline void check_device(const char* name, const TensorView& tensor, DLDevice device) {
  const DLDevice was = tensor.device();
  const bool same =
      was.device_type == device.device_type && (was.device_type == kDLCPU || was.device_id == device.device_id);
  if (!same) refuse(std::string(name) + ".device", device_name(was), device_name(device));
}

/// Whether the process has memory at an address.
inline bool is_mapped(uintptr_t address) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident;
  return mincore(reinterpret_cast<void*>(address / page * page), 1, &resident) == 0;
}

/// Refuses what looks like a tensor but has no memory: a FakeTensor, a subclass that wraps others, a tensor whose
/// storage was freed.
inline void check_memory(const char* name, const TensorView& tensor) {
  // A view of freed storage has its offset for an address. Nearly all memory lies above these; what does not is looked
  // up. An offset of 4 GiB and more is not noticed.
  constexpr uintptr_t kUnlikely = uintptr_t{1} << 32;
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  if (address >= kUnlikely || tensor.numel() == 0) return;
  if (!(tensor.device().device_type == kDLCPU ? is_mapped(address) : driver::is_device_memory(address)))
    refuse(name, "a tensor without memory behind it", "one with data");
}

/// The gate that every tensor passes: it is where the others are, and has memory.
inline void check_tensor(const char* name, const TensorView& tensor, DLDevice device) {
  check_device(name, tensor, device);
  check_memory(name, tensor);
}

/// A value that is kept in 32 bits.
inline int32_t narrow(const char* name, int64_t value, int64_t least = 0, int64_t most = kMaxInt32) {
  if (value < least || value > most)
    refuse(name, value, "in [" + std::to_string(least) + ", " + std::to_string(most) + "]");
  return static_cast<int32_t>(value);
}

/// A dimension of a shape: its name, and the size that it must have, if that is given.
struct Dim {
  const char* name;
  int64_t size = -1;
};

inline std::string shape_of(const TensorView& tensor) {
  std::string text = "[";
  for (int32_t dim = 0; dim < tensor.ndim(); ++dim) text += (dim == 0 ? "" : ", ") + std::to_string(tensor.size(dim));
  return text + "]";
}

inline void check_shape(const char* name, const TensorView& tensor, std::initializer_list<Dim> dims) {
  bool is_right = tensor.ndim() == static_cast<int32_t>(dims.size());
  for (int32_t i = 0; is_right && i < tensor.ndim(); ++i) {
    const int64_t size = dims.begin()[i].size;
    is_right = size < 0 || tensor.size(i) == size;
  }
  if (is_right) return;
  std::string must;
  for (const Dim& dim : dims)
    must +=
        (must.empty() ? "[" : ", ") + std::string(dim.name) + (dim.size < 0 ? "" : " = " + std::to_string(dim.size));
  refuse(std::string(name) + ".shape", shape_of(tensor), must + "]");
}

inline DLDataType dl_dtype(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return DLDataType{kDLFloat, 32, 1};
    case DataType::kFloat16:
      return DLDataType{kDLFloat, 16, 1};
    case DataType::kFloat8E4M3:
      return DLDataType{kDLFloat8_e4m3fn, 8, 1};
    case DataType::kFloat8E5M2:
      return DLDataType{kDLFloat8_e5m2, 8, 1};
    case DataType::kScaledLatent:
      return DLDataType{kDLUInt, 8, 1};
    case DataType::kBFloat16:
      break;
  }
  return DLDataType{kDLBfloat, 16, 1};
}

/// The dtype of a tensor of float32, float16 or bfloat16.
inline DataType float_dtype(const char* name, const TensorView& tensor) {
  const DLDataType was = tensor.dtype();
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
    const DLDataType must = dl_dtype(dtype);
    if (was.code == must.code && was.bits == must.bits && was.lanes == 1) return dtype;
  }
  refuse(std::string(name) + ".dtype", dtype_name(was), "float32, float16 or bfloat16");
}

inline void check_dtype(const char* name, const TensorView& tensor, DLDataType dtype) {
  const DLDataType was = tensor.dtype();
  if (was.code != dtype.code || was.bits != dtype.bits || was.lanes != dtype.lanes)
    refuse(std::string(name) + ".dtype", dtype_name(was), dtype_name(dtype));
}

inline void check_contiguous_dim(const char* name, const TensorView& tensor, int32_t dim) {
  if (tensor.size(dim) > 1 && tensor.stride(dim) != 1 && tensor.numel() > 0)
    refuse(std::string(name) + ".stride(" + std::to_string(dim) + ")", tensor.stride(dim), 1);
}

/// A contiguous vector of int32 or int64 with at least `size` elements.
inline IndexArray index_array(const char* name, const TensorView& tensor, DLDevice device, int64_t size) {
  check_tensor(name, tensor, device);
  check_shape(name, tensor, {{"elements"}});
  const DLDataType dtype = tensor.dtype();
  if (dtype.code != kDLInt || (dtype.bits != 32 && dtype.bits != 64))
    refuse(std::string(name) + ".dtype", dtype_name(dtype), "int32 or int64");
  if (tensor.size(0) < size)
    refuse(std::string(name) + ".shape[0]", tensor.size(0), "at least " + std::to_string(size));
  check_contiguous_dim(name, tensor, 0);
  return IndexArray{tensor.data_ptr(), dtype.bits == 64};
}

/// Rows of Q or O: [rows, heads, head_dim] with head_dim contiguous.
inline void check_rows(const char* name, const TensorView& tensor, DLDevice device, DataType dtype, Dim rows, Dim heads,
                       Dim head_dim) {
  check_tensor(name, tensor, device);
  check_dtype(name, tensor, dl_dtype(dtype));
  check_shape(name, tensor, {rows, heads, head_dim});
  check_contiguous_dim(name, tensor, 2);
}

/// Refuses a tensor to be written whose elements do not each have a place of their own. Strides that interleave
/// dimensions are refused, too, though their elements may have.
inline void check_no_overlap(const char* name, const TensorView& tensor) {
  constexpr int32_t kMaxDims = 4;
  int32_t dims[kMaxDims];  // of more than one element, the smallest stride first
  int32_t count = 0;
  for (int32_t dim = 0; dim < tensor.ndim() && count < kMaxDims; ++dim) {
    if (tensor.size(dim) < 2) continue;
    int32_t at = count++;
    for (; at > 0 && tensor.stride(dims[at - 1]) > tensor.stride(dim); --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }
  int64_t extent = 1;  // elements from the first to the end of the last, of the dimensions so far
  for (int32_t i = 0; i < count; ++i) {
    const int64_t stride = tensor.stride(dims[i]);
    if (stride < extent)
      refuse(std::string(name) + ".stride(" + std::to_string(dims[i]) + ")", stride,
             "such that no two elements lie in the same place");
    extent += stride * (tensor.size(dims[i]) - 1);
  }
}

/// Kernels move 16 bytes at a time: the base address and every stride that is used must be multiples of 16 bytes. Rows
/// of 8-bit elements that are no multiple of 16 bytes are moved 8 bytes at a time, and need multiples of 8.
inline void check_alignment(const char* name, const TensorView& tensor) {
  const int64_t element_bytes = tensor.dtype().bits / 8;
  const int64_t bytes = tensor.size(tensor.ndim() - 1) * element_bytes % 16 == 0 ? 16 : 8;
  const int64_t address = reinterpret_cast<int64_t>(tensor.data_ptr());
  if (address % bytes != 0)
    refuse(std::string(name) + ".data_ptr() modulo " + std::to_string(bytes), address % bytes, 0);
  for (int32_t dim = 0; dim + 1 < tensor.ndim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) * element_bytes % bytes != 0) {
      refuse(std::string(name) + ".stride(" + std::to_string(dim) + ")", tensor.stride(dim),
             "a multiple of " + std::to_string(bytes) + " bytes");
    }
  }
}

}  // namespace attn
