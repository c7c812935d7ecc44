// Callers pass Q, K and V in several forms. Here they become the form that the checks and the kernels take. Nothing is
// copied.
#pragma once

#include <string>

#include "runtime/checks.h"

namespace attn {

/// A tensor with the dimensions that are wanted, over another one's memory.
class TensorForm {
 public:
  static constexpr int32_t kMaxDims = 4;

  /// The tensor as it is; it has at most kMaxDims dimensions.
  explicit TensorForm(const TensorView& t)
      : data_(t.data_ptr()), device_(t.device()), dtype_(t.dtype()), dims_(t.ndim()) {
    for (int32_t dim = 0; dim < dims_; ++dim) set(dim, t.size(dim), t.stride(dim));
  }

  /// A tensor of three dimensions as one of four, of which `added` is the one of size 1.
  TensorForm unsqueezed(int32_t added) const {
    TensorForm form = *this;
    form.dims_ = 4;
    for (int32_t dim = 0; dim < 3; ++dim) form.set(dim + (dim >= added), shape_[dim], strides_[dim]);
    form.set(added, 1, 0);
    return form;
  }

  TensorForm transposed(int32_t a, int32_t b) const {
    TensorForm form = *this;
    form.set(a, shape_[b], strides_[b]);
    form.set(b, shape_[a], strides_[a]);
    return form;
  }

  TensorForm with_columns(int64_t columns) const {
    TensorForm form = *this;
    form.shape_[dims_ - 1] = columns;
    return form;
  }

  /// A dimension of size 1 gets the stride that it has in a contiguous tensor. It is never used, but may be anything,
  /// and alignment is judged by strides.
  TensorForm with_plain_strides() const {
    TensorForm form = *this;
    for (int32_t dim = dims_ - 1; dim >= 0; --dim) {
      if (shape_[dim] == 1) form.strides_[dim] = dim == dims_ - 1 ? 1 : form.strides_[dim + 1] * shape_[dim + 1];
    }
    return form;
  }

  /// Ends with this object.
  TensorView view() const {
    const DLTensor tensor{data_, device_, dims_, dtype_, const_cast<int64_t*>(shape_), const_cast<int64_t*>(strides_),
                          0};
    return TensorView(&tensor);
  }

 private:
  void set(int32_t dim, int64_t size, int64_t stride) {
    shape_[dim] = size;
    strides_[dim] = stride;
  }

  void* data_;
  DLDevice device_;
  DLDataType dtype_;
  int32_t dims_;
  int64_t shape_[kMaxDims];
  int64_t strides_[kMaxDims];
};

/// K and V as [pages, page_size, num_kv_heads, columns].
struct KvPair {
  TensorForm k;
  TensorForm v;
};

/// K or V that has these dimensions; or one request after another, as pages of one token: [tokens, num_kv_heads,
/// columns], or [num_kv_heads, tokens, columns] if `is_hnd`.
inline TensorForm pages(const char* name, const TensorView& t, bool is_hnd) {
  if (t.ndim() != 3) {
    check_shape(name, t, {{"pages"}, {"page_size"}, {"num_kv_heads"}, {"head_dim"}});
    return TensorForm(t).with_plain_strides();
  }
  const TensorForm tokens(t);
  return (is_hnd ? tokens.transposed(0, 1) : tokens).unsqueezed(1).with_plain_strides();
}

/// Two tensors [.., .., columns] as one: the rows of `right` lie right after those of `left`.
inline TensorForm joined(const char* left_name, const TensorView& left, const char* right_name,
                         const TensorView& right) {
  check_device(right_name, right, left.device());
  check_dtype(right_name, right, left.dtype());
  check_shape(left_name, left, {{"rows"}, {"heads or tokens"}, {"columns"}});
  check_shape(right_name, right, {{"rows", left.size(0)}, {"heads or tokens", left.size(1)}, {"columns"}});
  const int64_t columns = left.size(2), more = right.size(2);
  if (left.numel() > 0 && more > 0) {
    const bool follows =
        static_cast<char*>(right.data_ptr()) == static_cast<char*>(left.data_ptr()) + columns * left.dtype().bits / 8;
    bool has_its_strides = left.stride(2) == 1 && right.stride(2) == 1;
    for (int32_t dim = 0; dim < 2; ++dim)
      has_its_strides &= left.size(dim) == 1 || left.stride(dim) == right.stride(dim);
    if (!follows || !has_its_strides)
      refuse(right_name, "elsewhere", std::string("right after ") + left_name + ", in the same rows");
  }
  return TensorForm(left).with_columns(columns + more);
}

/// Latents of MLA, [pages, page_size, columns]; V is their first `v_columns`.
inline KvPair latent_pages(const TensorForm& latents, int64_t v_columns) {
  const TensorForm k = latents.unsqueezed(2).with_plain_strides();
  return KvPair{k, k.with_columns(v_columns)};
}

}  // namespace attn
