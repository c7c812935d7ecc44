// Checks of a cache's scales.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <string>

#include "cache/kv_scales.h"
#include "runtime/checks.h"

namespace attn {

/// K's, V's or Q's scale: float32 [] or [1], one for all; [num_kv_heads]; or [batch, 1] or [batch, num_kv_heads]. None:
/// `value` for all.
inline KvScale kv_scale(const char* name, const tvm::ffi::Optional<TensorView>& scale, double value, DLDevice device,
                        int64_t num_kv_heads) {
  KvScale made{nullptr, static_cast<float>(value), 0, 0, 1};
  if (!scale.has_value()) return made;
  const TensorView& t = scale.value();
  check_tensor(name, t, device);
  check_dtype(name, t, DLDataType{kDLFloat, 32, 1});
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
