// From a projection's output to the cache in one launch: norm, RoPE, write. Any grid works. A block takes one token at
// a time, as many heads of it as it has groups of lanes; a lane has the same elements of each, so that it reads cosines
// and sines once a token.
#pragma once

#include "cache/qkv_params.h"
#include "common/elements.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

constexpr int32_t kAppendQkvThreads = 256;

/// Some elements of a head, in float32.
template <int32_t kSize>
struct HeadChunk {
  float low[kSize];
  float high[kSize];
};

/// kSize elements of a 16-bit type, which lie in a row; in one piece if they are aligned, and then 8.
template <class Element, int32_t kSize, bool kAligned>
__device__ __forceinline__ void load_elements(const uint16_t* from, float (&to)[kSize]) {
  uint32_t words[kSize / 2];
  if constexpr (kAligned) {
    const uint4 piece = *reinterpret_cast<const uint4*>(from);
    words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
  } else {
#pragma unroll
    for (int32_t i = 0; i < kSize / 2; ++i) words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  }
#pragma unroll
  for (int32_t i = 0; i < kSize / 2; ++i) {
    to[2 * i] = Element::unpack(words[i]);
    to[2 * i + 1] = Element::unpack(words[i] >> 16);
  }
}

template <int32_t kSize, bool kAligned>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[kSize]) {
#pragma unroll
  for (int32_t i = 0; i < kSize; i += 4) {
    if constexpr (kAligned) {
      const float4 piece = *reinterpret_cast<const float4*>(from + i);
      to[i] = piece.x, to[i + 1] = piece.y, to[i + 2] = piece.z, to[i + 3] = piece.w;
    } else {
      to[i] = from[i], to[i + 1] = from[i + 1], to[i + 2] = from[i + 2], to[i + 3] = from[i + 3];
    }
  }
}

template <class Element, int32_t kSize, bool kAligned>
__device__ __forceinline__ void store_elements(const float (&from)[kSize], uint16_t* to) {
  uint32_t words[kSize / 2];
#pragma unroll
  for (int32_t i = 0; i < kSize / 2; ++i) words[i] = Element::pack(from[2 * i], from[2 * i + 1]);
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int32_t i = 0; i < kSize / 2; ++i) {
      to[2 * i] = static_cast<uint16_t>(words[i]);
      to[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
    }
  }
}

/// Cosine and sine. One copy: with those of large angles it is long.
__device__ __noinline__ float2 cos_sin(float angle) {
  float2 result;
  sincosf(angle, &result.y, &result.x);
  return result;
}

/// Cosines and sines of the kSize pairs of a chunk.
template <class Element, int32_t kSize, bool kAligned>
struct Angles {
  float cosines[kSize];
  float sines[kSize];

  __device__ __forceinline__ Angles(const QkvParams& p, int64_t position, int32_t first_pair) {
    if (p.rotary == RotaryTable::kNone) {
#pragma unroll
      for (int32_t i = 0; i < kSize; ++i) cosines[i] = 1.0f, sines[i] = 0.0f;
    } else if (p.rotary == RotaryTable::kFrequencies) {
      const float* frequencies = static_cast<const float*>(p.table) + first_pair;
#pragma unroll
      for (int32_t i = 0; i < kSize; ++i) {
        const float2 of_angle = cos_sin(static_cast<float>(position) * frequencies[i]);
        cosines[i] = of_angle.x;
        sines[i] = of_angle.y;
      }
    } else if (p.rotary == RotaryTable::kCosSinFloat32) {
      const float* row = static_cast<const float*>(p.table) + table_row(p, position) + first_pair;
      load_floats<kSize, kAligned>(row, cosines);
      load_floats<kSize, kAligned>(row + p.rotary_dim / 2, sines);
    } else {
      const uint16_t* row = static_cast<const uint16_t*>(p.table) + table_row(p, position) + first_pair;
      load_elements<Element, kSize, kAligned>(row, cosines);
      load_elements<Element, kSize, kAligned>(row + p.rotary_dim / 2, sines);
    }
  }

  __device__ __forceinline__ void rotate(HeadChunk<kSize>& x, bool is_interleaved) const {
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) {
      // Pair i of an interleaved chunk: elements 2i and 2i + 1 of its 2 * kSize.
      float* first = !is_interleaved ? &x.low[i] : 2 * i < kSize ? &x.low[2 * i] : &x.high[2 * i - kSize];
      float* second = !is_interleaved ? &x.high[i] : first + 1;
      const float a = *first, b = *second;
      *first = a * cosines[i] - b * sines[i];
      *second = b * cosines[i] + a * sines[i];
    }
  }
};

/// Sum over the `lanes` lanes, a power of two, that have a head.
__device__ __forceinline__ float add_over_lanes(float x, int32_t lanes) {
  for (int32_t step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(ptx::kAllLanes, x, step);
  return x;
}

/// kSize elements of an 8-bit cache; in one piece if they are aligned, and then 8.
template <int32_t kSize, bool kAligned>
__device__ __forceinline__ void store_float8(const float (&from)[kSize], float scale, DataType dtype, uint8_t* to) {
  uint32_t words[kSize / 4];
#pragma unroll
  for (int32_t i = 0; i < kSize; i += 4) {
    words[i / 4] = 0;
#pragma unroll
    for (int32_t j = 0; j < 4; j += 2) {
      const float first = from[i + j] / scale, second = from[i + j + 1] / scale;
      const uint32_t pair =
          dtype == DataType::kFloat8E4M3 ? ptx::pack_e4m3(first, second) : ptx::pack_e5m2(first, second);
      words[i / 4] |= pair << 8 * j;
    }
  }
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) to[i] = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
  }
}

/// One lane's part of a block: the same chunk of one head after another. kQuantises: the cache is of 8 bits.
template <class Element, int32_t kSize, bool kAligned, bool kQuantises>
struct ChunkWriter {
  const QkvParams& p;
  ChunkPlace place;
  int32_t chunk;
  int32_t lanes;  // of a head
  bool is_there;  // a head has this chunk

  using Chunk = HeadChunk<kSize>;
  using Rotation = Angles<Element, kSize, kAligned>;

  __device__ __forceinline__ Chunk load(const HeadRows& from, int64_t token, int32_t head) const {
    Chunk x{};
    if (!is_there) return x;
    const uint16_t* row = static_cast<const uint16_t*>(from.data) + token * from.token_stride + head * from.head_stride;
    load_elements<Element, kSize, kAligned>(row + place.low, x.low);
    load_elements<Element, kSize, kAligned>(row + place.high, x.high);
    return x;
  }

  __device__ __forceinline__ void store(const Chunk& x, void* data, int64_t at) const {
    if (!is_there) return;
    uint16_t* row = static_cast<uint16_t*>(data) + at;
    store_elements<Element, kSize, kAligned>(x.low, row + place.low);
    store_elements<Element, kSize, kAligned>(x.high, row + place.high);
  }

  __device__ __forceinline__ void quantise(const Chunk& x, void* data, int64_t at, float scale) const {
    if (!is_there) return;
    uint8_t* row = static_cast<uint8_t*>(data) + at;
    store_float8<kSize, kAligned>(x.low, scale, p.scales.element, row + place.low);
    store_float8<kSize, kAligned>(x.high, scale, p.scales.element, row + place.high);
  }

  /// All lanes of a warp take part, also those of no head.
  __device__ __forceinline__ void normalise(Chunk& x, const void* weights) const {
    float sum = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) sum += x.low[i] * x.low[i] + x.high[i] * x.high[i];
    const float factor = 1.0f / sqrtf(add_over_lanes(sum, lanes) / static_cast<float>(p.head_dim) + p.norm_eps);
    if (!is_there) return;
    Chunk weight;
    load_elements<Element, kSize, kAligned>(static_cast<const uint16_t*>(weights) + place.low, weight.low);
    load_elements<Element, kSize, kAligned>(static_cast<const uint16_t*>(weights) + place.high, weight.high);
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) {
      x.low[i] *= factor * (weight.low[i] + p.norm_offset);
      x.high[i] *= factor * (weight.high[i] + p.norm_offset);
    }
  }

  /// Heads group, group + groups, ... of a token: those of Q, then of K, then of V.
  __device__ __forceinline__ void write_token(int32_t token, int32_t group, int32_t groups) const {
    const int64_t num_slots = min_of<int64_t>(static_cast<int64_t>(p.num_pages) * p.page_size.divisor, kMaxInt32);
    const int64_t slot = p.slots ? p.slots[token] : token;
    const bool is_cached = slot >= 0 && slot < num_slots;
    const int32_t page = p.page_size.divide(is_cached ? static_cast<int32_t>(slot) : 0);
    const int32_t in_page = p.page_size.modulo(is_cached ? static_cast<int32_t>(slot) : 0);
    const bool rotates = place.is_rotated && p.rotary != RotaryTable::kNone && is_there;
    Rotation rotation(p, rotates ? p.positions[token] : 0, rotates ? chunk * kSize : 0);
    const int32_t num_heads = p.num_qo_heads + (p.v.data != nullptr ? 2 : 1) * p.num_kv_heads;
    for (int32_t first = 0; first < num_heads; first += groups) {
      const int32_t head = first + group;
      const bool is_q = head < p.num_qo_heads;
      const bool is_v = head >= p.num_qo_heads + p.num_kv_heads;
      const bool exists = head < num_heads && (is_q || is_cached);
      const int32_t kv_head = head - p.num_qo_heads - (is_v ? p.num_kv_heads : 0);
      Chunk x{};
      if (exists) x = load(is_q ? p.q : is_v ? p.v : p.k, token, is_q ? head : kv_head);
      const void* weights = is_q ? p.q_norm : is_v ? nullptr : p.k_norm;
      if (p.q_norm != nullptr || p.k_norm != nullptr) {
        Chunk normed = x;
        normalise(normed, weights != nullptr ? weights : p.q_norm != nullptr ? p.q_norm : p.k_norm);
        if (weights != nullptr) x = normed;
      }
      if (!exists) continue;
      if (rotates && !is_v) rotation.rotate(x, p.is_interleaved != 0);
      if (is_q) {
        store(x, const_cast<void*>(p.q_out.data), token * p.q_out.token_stride + head * p.q_out.head_stride);
      } else {
        const KvTensor& cache = is_v ? p.v_cache : p.k_cache;
        const int64_t at = page * cache.page_stride + in_page * cache.token_stride + kv_head * cache.head_stride;
        if constexpr (kQuantises) {
          const KvScale& scale = is_v ? p.scales.v : p.scales.k;
          quantise(x, const_cast<void*>(cache.data), at, scale.of(0, kv_head));
        } else {
          store(x, const_cast<void*>(cache.data), at);
        }
      }
    }
  }
};

template <class Element, int32_t kSize, bool kAligned, bool kQuantises>
__device__ __forceinline__ void write_tokens(const QkvParams& p) {
  const int32_t chunks = p.head_dim / (2 * kSize);
  int32_t lanes = 1;
  while (lanes < chunks) lanes *= 2;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t chunk = thread & (lanes - 1);
  const ChunkWriter<Element, kSize, kAligned, kQuantises> writer{p, place_of_chunk(p, chunk, kSize), chunk, lanes,
                                                                 chunk < chunks};
  for (int32_t token = static_cast<int32_t>(blockIdx.x); token < p.num_tokens; token += static_cast<int32_t>(gridDim.x))
    writer.write_token(token, thread / lanes, static_cast<int32_t>(blockDim.x) / lanes);
}

/// Bits that are set in some address or byte stride, of an 8-bit cache doubled: a power of two that divides them all is
/// below the lowest one.
template <bool kQuantises>
__device__ __forceinline__ uint64_t address_bits(const QkvParams& p) {
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const auto of_rows = [&](const HeadRows& rows) {
    return address(rows.data) | static_cast<uint64_t>((rows.token_stride | rows.head_stride) * 2);
  };
  const auto of_cache = [&](const KvTensor& cache) {
    return address(cache.data) * (kQuantises ? 2 : 1) |
           static_cast<uint64_t>((cache.page_stride | cache.token_stride | cache.head_stride) * 2);
  };
  const int64_t table_bytes = p.table_stride * (p.rotary == RotaryTable::kCosSinFloat32 ? 4 : 2);
  return of_rows(p.q) | of_rows(p.k) | of_rows(p.v) | of_rows(p.q_out) | of_cache(p.k_cache) | of_cache(p.v_cache) |
         address(p.table) | static_cast<uint64_t>(table_bytes) | address(p.q_norm) | address(p.k_norm);
}

/// head_dim and rotary_dim are multiples of 8, head_dim is at most 256. kQuantises: the cache is of 8 bits.
template <class Element, bool kQuantises = false>
__device__ __forceinline__ void append_qkv(const QkvParams& p) {
  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();  // it waits for this one itself, before it reads the cache
  if (address_bits<kQuantises>(p) % 16 == 0 && p.head_dim % 16 == 0 && p.rotary_dim % 16 == 0) {
    write_tokens<Element, 8, true, kQuantises>(p);
  } else {
    write_tokens<Element, 4, false, kQuantises>(p);
  }
}

}  // namespace attn
