// Checks of a cache's scales.
#pragma once

#include <optional>
#include <string>

#include "cache/kv_scales.h"
#include "runtime/arguments.h"
#include "runtime/checks.h"

namespace attn {

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

}  // namespace attn
