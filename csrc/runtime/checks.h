// Refusals: every message names the argument, the value passed and the value required.
#pragma once

#include <sys/mman.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>

#include "cache/kv_cache.h"
#include "common/data_type.h"
#include "common/index_array.h"
#include "common/math.h"
#include "runtime/driver.h"

namespace attn {

using tvm::ffi::AnyView;
using tvm::ffi::TensorView;

constexpr DLDataType kBool{kDLBool, 8, 1}, kInt32{kDLInt, 32, 1}, kFloat32{kDLFloat, 32, 1}, kUInt8{kDLUInt, 8, 1};

inline std::string dtype_name(DLDataType dtype) {
  if (dtype.code == kDLComplex) return "complex" + std::to_string(dtype.bits);  // tvm-ffi has no name for it
  return tvm::ffi::DLDataTypeToString(dtype);
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

/// A struct that Python filled (attn_backend/kernels/native.py).
template <class Struct>
Struct unpack(const tvm::ffi::Bytes& bytes) {
  static_assert(std::is_trivially_copyable<Struct>::value, "comes as bytes");
  if (bytes.size() != sizeof(Struct)) refuse("bytes of a struct", bytes.size(), sizeof(Struct));
  Struct value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

inline bool is_same_device(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && (a.device_type == kDLCPU || a.device_id == b.device_id);
}

inline void check_device(const char* name, const TensorView& tensor, DLDevice device) {
  if (!is_same_device(tensor.device(), device))
    refuse(std::string(name) + ".device", device_name(tensor.device()), device_name(device));
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
  // A view of freed storage has its offset for an address. Nearly all memory lies above these; other memory is looked
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

constexpr DLDataType dl_dtype(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return kFloat32;
    case DataType::kFloat16:
      return {kDLFloat, 16, 1};
    case DataType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case DataType::kFloat8E4M3:
      return {kDLFloat8_e4m3fn, 8, 1};
    case DataType::kFloat8E5M2:
      return {kDLFloat8_e5m2, 8, 1};
    case DataType::kInt8:
      return {kDLInt, 8, 1};
    default:
      if (dtype < DataType{} || static_cast<int32_t>(dtype) >= kNumDataTypes)
        refuse("DataType", static_cast<int32_t>(dtype), "a value of the enum");
      return kUInt8;  // two columns of 4 bits, or rows of bytes
  }
}

constexpr DLDataType dl_dtype(ScaleType scales) {
  switch (scales) {
    case ScaleType::kE4M3:
      return dl_dtype(DataType::kFloat8E4M3);
    case ScaleType::kE8M0:
      return kUInt8;
    case ScaleType::kNone:
    case ScaleType::kFloat32:
      break;
  }
  return kFloat32;
}

/// Elements of all 4-bit caches are bytes. The dtype of its scales tells which type a cache has.
constexpr bool scales_tell_4_bit_types_apart() {
  for (int32_t i = 0; i < kNumDataTypes; ++i) {
    for (int32_t j = 0; j < i; ++j) {
      const DataType a = static_cast<DataType>(i), b = static_cast<DataType>(j);
      const DLDataType of_a = dl_dtype(stored_format(a).token_scales), of_b = dl_dtype(stored_format(b).token_scales);
      if (has_4_bits(a) && has_4_bits(b) && of_a.code == of_b.code && of_a.bits == of_b.bits) return false;
    }
  }
  return true;
}
static_assert(scales_tell_4_bit_types_apart(), "4-bit types whose scales have the same dtype");

/// The one of `known` that a dtype is, if it is one of them.
inline std::optional<DataType> find_dtype(DLDataType dtype, std::initializer_list<DataType> known) {
  for (const DataType type : known)
    if (dtype == dl_dtype(type)) return type;
  return std::nullopt;
}

/// The dtype of a tensor of float32, float16 or bfloat16.
inline DataType float_dtype(const char* name, const TensorView& tensor) {
  const auto dtype = find_dtype(tensor.dtype(), {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16});
  if (!dtype) refuse(std::string(name) + ".dtype", dtype_name(tensor.dtype()), "float32, float16 or bfloat16");
  return *dtype;
}

inline void check_dtype(const char* name, const TensorView& tensor, DLDataType dtype) {
  if (tensor.dtype() != dtype) refuse(std::string(name) + ".dtype", dtype_name(tensor.dtype()), dtype_name(dtype));
}

inline void check_index_dtype(const char* name, DLDataType dtype) {
  if (dtype.code != kDLInt || (dtype.bits != 32 && dtype.bits != 64))
    refuse(std::string(name) + ".dtype", dtype_name(dtype), "int32 or int64");
}

inline void check_contiguous_dim(const char* name, const TensorView& tensor, int32_t dim) {
  if (tensor.size(dim) > 1 && tensor.stride(dim) != 1 && tensor.numel() > 0)
    refuse(std::string(name) + ".stride(" + std::to_string(dim) + ")", tensor.stride(dim), 1);
}

/// `which`: what `least` is, as messages say it.
inline void check_size(const char* name, const TensorView& tensor, int32_t dim, int64_t least, const char* which = "") {
  if (tensor.size(dim) < least)
    refuse(std::string(name) + ".shape[" + std::to_string(dim) + "]", tensor.size(dim),
           "at least " + (which + std::to_string(least)));
}

/// A contiguous vector of int32 or int64 with at least `size` elements.
inline IndexArray index_array(const char* name, const TensorView& tensor, DLDevice device, int64_t size) {
  check_tensor(name, tensor, device);
  check_shape(name, tensor, {{"elements"}});
  check_index_dtype(name, tensor.dtype());
  check_size(name, tensor, 0, size);
  check_contiguous_dim(name, tensor, 0);
  return IndexArray{tensor.data_ptr(), tensor.dtype().bits == 64};
}

inline void check_array(const char* name, const TensorView& tensor, DLDevice device, DLDataType dtype,
                        std::initializer_list<Dim> dims) {
  check_tensor(name, tensor, device);
  check_dtype(name, tensor, dtype);
  check_shape(name, tensor, dims);
}

/// An array whose last dimension is contiguous.
inline void check_rows(const char* name, const TensorView& tensor, DLDevice device, DLDataType dtype,
                       std::initializer_list<Dim> dims) {
  check_array(name, tensor, device, dtype, dims);
  check_contiguous_dim(name, tensor, tensor.ndim() - 1);
}

/// The memory of a contiguous array.
template <class T = void>
T* dense(const char* name, const TensorView& tensor, DLDevice device, DLDataType dtype,
         std::initializer_list<Dim> dims) {
  check_array(name, tensor, device, dtype, dims);
  if (tensor.numel() > 0 && !tensor.IsContiguous()) refuse(name, "not contiguous", "contiguous");
  return static_cast<T*>(tensor.data_ptr());
}

/// The last dimension of V and O.
inline Dim columns_of_v(int64_t head_dim, int64_t head_dim_v) {
  return Dim{head_dim == head_dim_v ? "head_dim" : "head_dim_v", head_dim_v};
}

inline KvTensor kv_tensor(const TensorView& t) { return KvTensor{t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

/// K or V of the cache of one layer.
inline KvTensor kv_tensor(const char* name, const TensorView& t, DLDevice device, DataType dtype, Dim pages,
                          Dim page_size, Dim heads, Dim columns) {
  check_rows(name, t, device, dl_dtype(dtype), {pages, page_size, heads, columns});
  return kv_tensor(t);
}

/// Takes a tensor or a number; None: the number `otherwise`.
struct TensorOrNumber {
  std::optional<TensorView> tensor;
  double number;

  TensorOrNumber(const char* name, const AnyView& given, double otherwise) : number(otherwise) {
    if (given == nullptr) return;
    tensor = given.try_cast<TensorView>();
    if (tensor) return;
    const std::optional<double> read = given.try_cast<double>();
    if (!read)
      TVM_FFI_THROW(TypeError) << name << " is of type " << given.GetTypeKey() << ", must be a number or a tensor";
    number = *read;
  }
};

/// K's, V's or Q's scale: float32 [] or [1], one for all; [num_kv_heads]; or [batch, 1] or [batch, num_kv_heads]; or a
/// number for all; None: 1.
inline KvScale kv_scale(const char* name, const AnyView& given, DLDevice device, int64_t num_kv_heads) {
  const TensorOrNumber scale(name, given, 1.0);
  KvScale made{nullptr, static_cast<float>(scale.number), 0, 0, 1};
  if (!scale.tensor) return made;
  const TensorView& t = *scale.tensor;
  check_tensor(name, t, device);
  check_dtype(name, t, kFloat32);
  made.data = static_cast<const float*>(t.data_ptr());
  if (t.ndim() == 0 || t.numel() == 1) return made;
  const int64_t heads = t.size(t.ndim() - 1);
  const bool fits_heads = heads == num_kv_heads || (t.ndim() == 2 && heads == 1);
  if (t.ndim() > 2 || t.numel() == 0 || !fits_heads)
    refuse(std::string(name) + ".shape", shape_of(t),
           "[], [num_kv_heads = " + std::to_string(num_kv_heads) + "], [batch, 1] or [batch, num_kv_heads]");
  const std::string stride = std::string(name) + ".stride(";
  made.head_stride = heads == 1 ? 0 : narrow((stride + "-1)").c_str(), t.stride(t.ndim() - 1));
  if (t.ndim() == 1) return made;
  made.num_requests = narrow((std::string(name) + ".shape[0]").c_str(), t.size(0));
  made.request_stride = t.size(0) == 1 ? 0 : narrow((stride + "0)").c_str(), t.stride(0));
  return made;
}

/// K's or V's scales of blocks, as words: [pages, page_size, num_kv_heads, head_dim / kScaleColumns], e4m3 or bytes.
inline TokenScales checked_block_scales(const char* name, const TensorView& scales, const TensorView& cache,
                                        DataType dtype) {
  check_rows(name, scales, cache.device(), dl_dtype(stored_format(dtype).token_scales),
             {{"pages", cache.size(0)},
              {"page_size", cache.size(1)},
              {"num_kv_heads", cache.size(2)},
              {"head_dim / 16", cache.size(3) * 2 / kScaleColumns}});
  KvTensor words = kv_tensor(scales);
  const int64_t address = reinterpret_cast<int64_t>(scales.data_ptr());
  if (address % 4 != 0) refuse(std::string(name) + ".data_ptr() modulo 4", address % 4, 0);
  int64_t* const strides[] = {&words.page_stride, &words.token_stride, &words.head_stride};
  for (int32_t dim = 0; dim < 3; ++dim) {
    if (scales.size(dim) > 1 && *strides[dim] % 4 != 0)
      refuse(std::string(name) + ".stride(" + std::to_string(dim) + ")", *strides[dim], "a multiple of 4");
    *strides[dim] /= 4;
  }
  return TokenScales{words};
}

/// K's or V's scales for each token and head: float32 [pages, page_size, num_kv_heads]; or of blocks.
inline TokenScales checked_token_scales(const char* name, const AnyView& given, const TensorView& cache,
                                        DataType dtype) {
  const std::optional<TensorView> scales = given == nullptr ? std::nullopt : given.try_cast<TensorView>();
  if (!scales)
    refuse(name, given == nullptr ? "None" : "a number",
           has_block_scales(dtype)
               ? "a tensor [pages, page_size, num_kv_heads, head_dim / 16]: the cache has scales of blocks"
               : "a tensor [pages, page_size, num_kv_heads]: the cache has a scale for each token and head");
  if (has_block_scales(dtype)) return checked_block_scales(name, *scales, cache, dtype);
  check_array(name, *scales, cache.device(), kFloat32,
              {{"pages", cache.size(0)}, {"page_size", cache.size(1)}, {"num_kv_heads", cache.size(2)}});
  return TokenScales{kv_tensor(*scales)};
}

/// A factor of all scales of blocks; None: 1. `dtype`: of the cache.
inline float checked_factor(const char* name, const tvm::ffi::Optional<double>& given, DataType dtype) {
  const double factor = given.value_or(1.0);
  constexpr double kMaxFloat = 3.4028234663852886e38;
  const bool is_right = static_cast<float>(factor) > 0.0f && factor <= kMaxFloat;
  if (!is_right) refuse(name, factor, "above 0 and finite");
  if (has_block_scales(dtype) && !stored_format(dtype).has_factor && factor != 1.0)
    refuse(name, factor, "1: scales that are powers of 2 have none");
  return static_cast<float>(factor);
}

/// Refuses a tensor to be written whose elements overlap. Strides that interleave dimensions are refused, too, though
/// their elements may have.
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
