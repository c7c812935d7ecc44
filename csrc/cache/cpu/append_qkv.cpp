#include "cache/cpu/append.h"

#include <cmath>
#include <vector>

#include "common/cpu/parallel.h"
#include "common/cpu/scalar_elements.h"
#include "common/type_traits.h"

namespace attn::cpu {
namespace {

constexpr int64_t kMinThreadedElements = 1 << 16;

/// The heads of one token, one after another in `head`.
template <class Element>
class TokenWriter {
 public:
  /// dtype: Element.
  TokenWriter(const QkvParams& params, DataType dtype)
      : p_(params),
        converts_(params.scales.element != dtype),
        head_(static_cast<size_t>(params.head_dim)),
        cosines_(static_cast<size_t>(params.rotary_dim / 2)),
        sines_(cosines_.size()) {}

  void write(int32_t token) {
    if (p_.rotary != RotaryTable::kNone) set_angles(p_.positions.narrow(p_.positions.words(token)));
    for (int32_t head = 0; head < p_.num_qo_heads; ++head) {
      load(p_.q, token, head);
      finish(p_.q_norm, true);
      store(p_.q_out.data, token * p_.q_out.token_stride + head * p_.q_out.head_stride);
    }
    const int64_t slot = p_.slots ? p_.slots[token] : token;
    if (slot < 0 || slot >= int64_t{p_.num_pages} * p_.page_size.divisor) return;
    const int64_t page = slot / p_.page_size.divisor, in_page = slot % p_.page_size.divisor;
    const auto place = [&](const KvTensor& cache, int32_t head) {
      return page * cache.page_stride + in_page * cache.token_stride + head * cache.head_stride;
    };
    for (int32_t head = 0; head < p_.num_kv_heads; ++head) {
      load(p_.k, token, head);
      finish(p_.k_norm, true);
      store_cached(p_.k_cache.data, place(p_.k_cache, head), p_.scales.k.of(0, head));
      if (p_.v.data == nullptr) continue;
      load(p_.v, token, head);
      finish(nullptr, false);
      store_cached(p_.v_cache.data, place(p_.v_cache, head), p_.scales.v.of(0, head));
    }
  }

 private:
  void set_angles(int32_t position) {
    const size_t pairs = cosines_.size();
    const auto* floats = static_cast<const float*>(p_.table);
    const auto* elements = static_cast<const Element*>(p_.table);
    const int64_t row = p_.rotary == RotaryTable::kFrequencies ? 0 : table_row(p_, position);
    for (size_t i = 0; i < pairs; ++i) {
      const int64_t at = row + static_cast<int64_t>(i), half = static_cast<int64_t>(pairs);
      if (p_.rotary == RotaryTable::kFrequencies) {
        const float angle = reduced_angle(position, floats[i]);
        cosines_[i] = std::cos(angle);
        sines_[i] = std::sin(angle);
      } else if (p_.rotary == RotaryTable::kCosSinFloat32) {
        cosines_[i] = floats[at];
        sines_[i] = floats[at + half];
      } else {
        cosines_[i] = to_float(elements + at);
        sines_[i] = to_float(elements + at + half);
      }
    }
  }

  void load(const HeadRows& rows, int64_t token, int64_t head) {
    const Element* from = static_cast<const Element*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
    for (size_t i = 0; i < head_.size(); ++i) head_[i] = to_float(from + i);
  }

  /// Norm and rotation, as far as they are asked for.
  void finish(const void* weights, bool rotates) {
    if (weights != nullptr) {
      float sum = 0.0f;
      for (const float x : head_) sum += x * x;
      const float factor = 1.0f / std::sqrt(sum / static_cast<float>(p_.head_dim) + p_.norm_eps);
      for (size_t i = 0; i < head_.size(); ++i)
        head_[i] *= factor * (to_float(static_cast<const Element*>(weights) + i) + p_.norm_offset);
    }
    if (!rotates || p_.rotary == RotaryTable::kNone) return;
    const size_t pairs = cosines_.size();
    for (size_t i = 0; i < pairs; ++i) {
      float& first = head_[p_.is_interleaved != 0 ? 2 * i : i];
      float& second = head_[p_.is_interleaved != 0 ? 2 * i + 1 : i + pairs];
      const float a = first, b = second;
      first = a * cosines_[i] - b * sines_[i];
      second = b * cosines_[i] + a * sines_[i];
    }
  }

  void store(const void* data, int64_t at) {
    Element* to = static_cast<Element*>(const_cast<void*>(data)) + at;
    for (size_t i = 0; i < head_.size(); ++i) from_float(head_[i], to + i);
  }

  void store_cached(const void* data, int64_t at, float scale) {
    switch (p_.scales.element) {
      case DataType::kFloat32:
      case DataType::kFloat16:
      case DataType::kBFloat16:
        return converts_ ? store_converted(data, at) : store(data, at);
      case DataType::kFloat8E4M3:
        return store_rounded<Float8E4M3>(data, at, scale);
      case DataType::kFloat8E5M2:
        return store_rounded<Float8E5M2>(data, at, scale);
      case DataType::kScaledLatent:
        return;  // its rows are not heads
    }
  }

  template <class CacheElement>
  void store_rounded(const void* data, int64_t at, float scale) {
    CacheElement* to = static_cast<CacheElement*>(const_cast<void*>(data)) + at;
    for (size_t i = 0; i < head_.size(); ++i) ScalarElements::from_float(head_[i] / scale, to[i]);
  }

  /// Converts to the other 16-bit type. What exceeds the largest float16 becomes that, as on a GPU.
  void store_converted(const void* data, int64_t at) {
    using Other = typename OtherElementOf<Element>::Type;
    Other* to = static_cast<Other*>(const_cast<void*>(data)) + at;
    for (size_t i = 0; i < head_.size(); ++i) {
      const float x = is_same<Other, Half> ? ScalarElements::finite_half(head_[i]) : head_[i];
      ScalarElements::from_float(x, to[i]);
    }
  }

  static float to_float(const Element* x) { return ScalarElements::to_float(*x); }
  static void from_float(float x, Element* to) { ScalarElements::from_float(x, *to); }

  const QkvParams& p_;
  const bool converts_;  // K and V to another type
  std::vector<float> head_;
  std::vector<float> cosines_;
  std::vector<float> sines_;
};

template <class Element>
void append(const QkvParams& params, DataType dtype) {
  constexpr int32_t kChunk = 16;  // tokens that a thread takes at a time
  auto write_chunk = [&](int32_t chunk) {
    TokenWriter<Element> writer(params, dtype);
    const int32_t end = min_of(params.num_tokens, (chunk + 1) * kChunk);
    for (int32_t token = chunk * kChunk; token < end; ++token) writer.write(token);
  };
  const int64_t heads = params.num_qo_heads + int64_t{2} * params.num_kv_heads;
  const bool use_threads = params.num_tokens * heads * params.head_dim >= kMinThreadedElements;
  parallel_for(ceil_div(params.num_tokens, kChunk), use_threads, write_chunk);
}

}  // namespace

void append_qkv(const QkvParams& params, DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return append<float>(params, dtype);
    case DataType::kFloat16:
      return append<Half>(params, dtype);
    case DataType::kBFloat16:
      return append<BFloat16>(params, dtype);
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2:
    case DataType::kScaledLatent:
      return;  // of caches only
  }
}

}  // namespace attn::cpu
