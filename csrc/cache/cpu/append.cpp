#include "cache/cpu/append.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "cache/quantizers.h"
#include "common/cpu/elements.h"
#include "common/cpu/parallel.h"
#include "common/platform.h"
#include "common/rotation.h"

namespace attn::cpu {
namespace {

void append_token(const AppendParams& params, int32_t token) {
  const int64_t slot = params.slots[token];
  if (!params.pages.has(slot)) return;
  const SlotPlace place = params.pages.place(static_cast<int32_t>(slot));
  const auto copy_heads = [&](const HeadRows& from, int32_t head_bytes, const KvTensor& to) {
    const char* source = static_cast<const char*>(from.data) + token * from.token_stride * params.element_bytes;
    char* target = static_cast<char*>(const_cast<void*>(to.data)) + to.element(place) * params.element_bytes;
    for (int64_t head = 0; head < params.num_kv_heads; ++head) {
      std::memcpy(target + head * to.head_stride * params.element_bytes,
                  source + head * from.head_stride * params.element_bytes, static_cast<size_t>(head_bytes));
    }
  };
  copy_heads(params.k, params.k_head_bytes, params.k_cache);
  copy_heads(params.v, params.v_head_bytes, params.v_cache);
}

using Row = ScaledLatentRow;

void write_row(const BFloat16* latent, const BFloat16* rope, char* row) {
  for (int32_t scale_number = 0; scale_number < Row::kScales; ++scale_number) {
    const int32_t first = scale_number * Row::kColumnsOfScale;
    float largest = 0.0f;
    for (int32_t i = first; i < first + Row::kColumnsOfScale; ++i)
      largest = std::fmax(largest, std::fabs(to_float(latent[i])));
    const float scale = latent_scale(largest);
    for (int32_t i = first; i < first + Row::kColumnsOfScale; ++i)
      row[i] = static_cast<char>(e4m3_bits(to_float(latent[i]) / scale));
    std::memcpy(row + Row::kScalesAt + scale_number * 4, &scale, sizeof(scale));
  }
  std::memcpy(row + Row::kRopeAt, rope, Row::kRopeColumns * sizeof(BFloat16));
}

constexpr auto kUnchanged = [](float x) { return x; };

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
      store<Element>(p_.q_out.data, token * p_.q_out.token_stride + head * p_.q_out.head_stride, kUnchanged);
    }
    const int64_t slot = p_.slots ? p_.slots[token] : token;
    if (!p_.pages.has(slot)) return;
    const SlotPlace place = p_.pages.place(static_cast<int32_t>(slot));
    for (int32_t head = 0; head < p_.num_kv_heads; ++head) {
      load(p_.k, token, head);
      finish(p_.k_norm, true);
      rotate();
      store_cached(p_.k_cache, place, head, p_.scales.k, p_.k_token_scales);
      if (p_.v.data == nullptr) continue;
      load(p_.v, token, head);
      finish(nullptr, false);
      rotate();
      store_cached(p_.v_cache, place, head, p_.scales.v, p_.v_token_scales);
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
        cosines_[i] = to_float(elements[at]);
        sines_[i] = to_float(elements[at + half]);
      }
    }
  }

  void load(const HeadRows& rows, int64_t token, int64_t head) {
    const Element* from = static_cast<const Element*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
    for (size_t i = 0; i < head_.size(); ++i) head_[i] = to_float(from[i]);
  }

  /// Applies norm and rotation, if there are any.
  void finish(const void* weights, bool rotates) {
    if (weights != nullptr) {
      float sum = 0.0f;
      for (const float x : head_) sum += x * x;
      const float factor = 1.0f / std::sqrt(sum / static_cast<float>(p_.head_dim) + p_.norm_eps);
      for (size_t i = 0; i < head_.size(); ++i)
        head_[i] *= factor * (to_float(static_cast<const Element*>(weights)[i]) + p_.norm_offset);
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

  void rotate() {
    if (p_.rotates_rows != 0) rotate_row(head_.data(), p_.head_dim);
  }

  /// Writes the head as `Stored`; `change` is applied to its numbers before.
  template <class Stored, class Change>
  void store(const void* data, int64_t at, const Change& change) {
    Stored* to = static_cast<Stored*>(const_cast<void*>(data)) + at;
    for (size_t i = 0; i < head_.size(); ++i) from_float(change(head_[i]), to[i]);
  }

  void store_cached(const KvTensor& cache, SlotPlace place, int32_t head, const KvScale& scales,
                    const TokenScales& token_scales) {
    using Other = OtherElement<Element>;
    const int64_t at = cache.element(place, head);
    if (has_4_bits(p_.scales.element))
      return visit_quantizer(p_.scales.element, [&](auto quantizer) {
        const float factor = &cache == &p_.v_cache ? p_.v_factor : p_.k_factor;
        uint8_t* const to = static_cast<uint8_t*>(const_cast<void*>(cache.data)) + at;
        store_4_bits<decltype(quantizer)>(to, place, head, token_scales, factor);
      });
    float scale = scales.of(0, head);
    if (token_scales.exist()) {
      scale = quantizer_of<ByteQuantizer>(0, p_.head_dim, 1.0f).scale;
      token_scales.write(place, head, scale);
    }
    const auto divide = [&](float x) { return x / scale; };
    // What exceeds the largest float16 becomes that, as on a GPU: if the type changes, and in rotated rows.
    const auto limit_other = [](float x) { return is_same<Other, Half> ? finite_half(x) : x; };
    const auto limit = [](float x) { return is_same<Element, Half> ? finite_half(x) : x; };
    switch (p_.scales.element) {
      case DataType::kFloat32:
      case DataType::kFloat16:
      case DataType::kBFloat16:
        if (converts_) return store<Other>(cache.data, at, limit_other);
        return p_.rotates_rows != 0 ? store<Element>(cache.data, at, limit)
                                    : store<Element>(cache.data, at, kUnchanged);
      case DataType::kFloat8E4M3:
        return store<Float8E4M3>(cache.data, at, divide);
      case DataType::kFloat8E5M2:
        return store<Float8E5M2>(cache.data, at, divide);
      case DataType::kInt8:
        return store<Int8>(cache.data, at, divide);
      default:
        return;  // rows are not numbers one after another
    }
  }

  /// Of `count` numbers from column `first` on.
  template <class Quantizer>
  Quantizer quantizer_of(int32_t first, int32_t count, float factor) const {
    float limits[2] = {first_limit<Quantizer::kLimits>(), first_limit<Quantizer::kLimits>()};
    for (int32_t i = first; i < first + count; ++i)
      add_to_limits<Quantizer::kLimits>(limits, head_[static_cast<size_t>(i)]);
    return Quantizer(limits, factor, p_.scales.element);
  }

  template <class Quantizer>
  void store_4_bits(uint8_t* to, SlotPlace place, int32_t head, const TokenScales& token_scales, float factor) const {
    const int32_t columns = Quantizer::kOfBlocks ? kScaleColumns : p_.head_dim;
    for (int32_t first = 0; first < p_.head_dim; first += columns) {
      const Quantizer quantizer = quantizer_of<Quantizer>(first, columns, factor);
      if constexpr (Quantizer::kOfBlocks)
        token_scales.write_block(place, head, first / kScaleColumns, quantizer.stored());
      else
        token_scales.write(place, head, quantizer.stored());
      const float* const numbers = head_.data() + first;
      for (int32_t i = 0; i < columns; i += 2)
        to[(first + i) / 2] = static_cast<uint8_t>(quantizer.code(numbers[i]) | quantizer.code(numbers[i + 1]) << 4);
    }
  }

  const QkvParams& p_;
  const bool converts_;  // K and V to another type
  std::vector<float> head_;
  std::vector<float> cosines_;
  std::vector<float> sines_;
};

template <class Element>
void write_tokens(const QkvParams& params, DataType dtype) {
  constexpr int32_t kChunk = 16;  // tokens that a thread takes at a time
  constexpr int64_t kMinThreadedElements = 1 << 16;
  const int64_t heads = params.num_qo_heads + int64_t{2} * params.num_kv_heads;
  const bool use_threads = params.num_tokens * heads * params.head_dim >= kMinThreadedElements;
  parallel_chunks(params.num_tokens, kChunk, use_threads, [&](int32_t token, int32_t end) {
    TokenWriter<Element> writer(params, dtype);
    for (; token < end; ++token) writer.write(token);
  });
}

}  // namespace

void append(const AppendParams& params) {
  constexpr int64_t kMinThreadedBytes = 256 * 1024;
  const int64_t bytes = int64_t{params.num_tokens} * params.num_kv_heads * (params.k_head_bytes + params.v_head_bytes);
  parallel_chunks(params.num_tokens, 64, bytes >= kMinThreadedBytes, [&](int32_t token, int32_t end) {
    for (; token < end; ++token) append_token(params, token);
  });
}

void append_latent(const LatentParams& params) {
  constexpr int32_t kChunk = 16;
  parallel_chunks(params.num_tokens, kChunk, params.num_tokens > kChunk, [&](int32_t token, int32_t end) {
    for (; token < end; ++token) {
      char* const row = params.row(token);
      if (row != nullptr)
        write_row(static_cast<const BFloat16*>(params.latent) + token * params.latent_stride,
                  static_cast<const BFloat16*>(params.rope) + token * params.rope_stride, row);
    }
  });
}

void append_qkv(const QkvParams& params, DataType dtype) {
  visit_float(dtype, [&](auto element) { write_tokens<decltype(element)>(params, dtype); });
}

}  // namespace attn::cpu
