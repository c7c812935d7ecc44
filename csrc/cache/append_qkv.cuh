// Normalizes, rotates and writes a projection's output to the cache in one launch. Each group of heads of one token
// (HeadGroup) is taken once, by as many lanes as a head has chunks. Many CTAs, each of which issues all loads before it
// uses the first, keep the memory busy. append_qkv.cu and append_pair.cu have the kernels.
#pragma once

#include "cache/elements_in_memory.cuh"
#include "cache/params.h"
#include "common/elements.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/warp.cuh"
#include "common/rotation.cuh"

namespace attn {

/// Cosine and sine. Not inlined: the code is long, as sincosf has a path for angles that are not reduced.
__device__ __noinline__ float2 cos_sin(float angle) {
  float2 result;
  sincosf(angle, &result.y, &result.x);
  return result;
}

/// Cosines and sines of the kSize pairs of a chunk: first as the table has them, so that nothing waits for them.
template <class Element, int32_t kSize, bool kAligned>
struct Angles {
  uint32_t cosines[kSize];
  uint32_t sines[kSize];

  __device__ __forceinline__ void load(const QkvParams& p, int32_t position, int32_t first_pair) {
    if (!kAligned && p.rotary == RotaryTable::kFrequencies) {
      load_floats<kSize, kAligned>(static_cast<const float*>(p.table) + first_pair, cosines);
      return;
    }
    const int64_t first = table_row(p, position) + first_pair;
    const int32_t half = p.rotary_dim / 2;
    if (p.rotary == RotaryTable::kCosSin) {
      const uint16_t* row = static_cast<const uint16_t*>(p.table) + first;
      load_words<kSize, kAligned>(row, cosines);
      load_words<kSize, kAligned>(row + half, sines);
    } else {
      const float* row = static_cast<const float*>(p.table) + first;
      load_floats<kSize, kAligned>(row, cosines);
      load_floats<kSize, kAligned>(row + half, sines);
    }
  }

  /// Turns what was loaded into the bits of float32 numbers.
  __device__ __forceinline__ void widen(const QkvParams& p, int32_t position) {
    if (p.rotary == RotaryTable::kCosSin) {
#pragma unroll
      for (int32_t i = kSize - 1; i >= 0; --i) {
        cosines[i] = __float_as_uint(Element::unpack(cosines[i / 2] >> i % 2 * 16));
        sines[i] = __float_as_uint(Element::unpack(sines[i / 2] >> i % 2 * 16));
      }
    } else if (!kAligned && p.rotary == RotaryTable::kFrequencies) {
#pragma unroll
      for (int32_t i = 0; i < kSize; ++i) {
        const float2 rotation = cos_sin(reduced_angle(position, __uint_as_float(cosines[i])));
        cosines[i] = __float_as_uint(rotation.x);
        sines[i] = __float_as_uint(rotation.y);
      }
    }
  }
};

/// 2 * kSize elements of a head, of a 16-bit type.
template <class Element, int32_t kSize, bool kAligned>
struct Chunk {
  uint32_t words[kSize];  // two elements each: the lower half of the chunk, then the upper

  /// from: the lower half; the upper is `distance` elements further.
  __device__ __forceinline__ void load(const uint16_t* from, int32_t distance) {
    load_words<kSize, kAligned>(from, words);
    load_words<kSize, kAligned>(from + distance, words + kSize / 2);
  }

  __device__ __forceinline__ void store(uint16_t* to, int32_t distance) const {
    store_words<kSize, kAligned>(words, to);
    store_words<kSize, kAligned>(words + kSize / 2, to + distance);
  }

  __device__ __forceinline__ float operator[](int32_t i) const { return Element::unpack(words[i / 2] >> i % 2 * 16); }

  /// Hides the words' values from the compiler. Otherwise it keeps the floats that it unpacked for the sum of squares,
  /// in twice the registers.
  __device__ __forceinline__ void opaque() {
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) asm volatile("" : "+r"(words[i]));
  }

  __device__ __forceinline__ float sum_of_squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < 2 * kSize; ++i) sum += (*this)[i] * (*this)[i];
    return sum;
  }

  /// Elements (2i, 2i + 1) go to (i, kSize + i).
  __device__ __forceinline__ void deinterleave() {
    uint32_t was[kSize];
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) was[i] = words[i];
#pragma unroll
    for (int32_t i = 0; i < kSize / 2; ++i) {
      words[i] = __byte_perm(was[2 * i], was[2 * i + 1], 0x5410);
      words[kSize / 2 + i] = __byte_perm(was[2 * i], was[2 * i + 1], 0x7632);
    }
  }

  __device__ __forceinline__ void interleave() {
    uint32_t was[kSize];
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) was[i] = words[i];
#pragma unroll
    for (int32_t i = 0; i < kSize / 2; ++i) {
      words[2 * i] = __byte_perm(was[i], was[kSize / 2 + i], 0x5410);
      words[2 * i + 1] = __byte_perm(was[i], was[kSize / 2 + i], 0x7632);
    }
  }
};

/// Combines the numbers of the `lanes` lanes, a power of two, that have a head. All lanes of a warp take part.
template <int32_t kCount, class Combine>
__device__ __forceinline__ void over_lanes(float (&x)[kCount], int32_t lanes, const Combine& combine) {
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    if (step >= lanes) return;
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) x[i] = combine(x[i], __shfl_xor_sync(ptx::kAllLanes, x[i], step));
  }
}

/// Rotates a head whose columns are in `lanes` lanes. A lane has eight columns from `low` on, and with 16 columns eight
/// more from `high` on. Either all its columns are neighbors, or the head is one block (rotates_in_place()).
template <int32_t kColumns>
__device__ __forceinline__ void rotate_head(float (&x)[kColumns], int32_t head_dim, int32_t low, int32_t high,
                                            int32_t lanes) {
  const int32_t block = rotation_block(head_dim);
#pragma unroll
  for (int32_t i = 0; i < kColumns; i += 8) {  // a block may have eight columns
    const int32_t eight = (i == 0 ? low : high) & (block - 1);
    const uint32_t signs = rotation_signs(eight / 32) >> eight % 32;
#pragma unroll
    for (int32_t j = 0; j < 8; ++j) x[i + j] = with_sign(x[i + j], signs, j);
  }
  hadamard_of_registers<1>(x);
  hadamard_of_registers<2>(x);
  hadamard_of_registers<4>(x);
  if constexpr (kColumns > 8) {
    if (block > 8) hadamard_of_registers<8>(x);
  }
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    if (step * kColumns >= block || step >= lanes) return;
    hadamard_of_lanes(x, step);
  }
}

/// Whether lanes rotate the columns that they have. Each level of a rotation combines columns whose numbers differ in
/// one bit. So each bit must be of the lane or of the register. That holds if the two halves of a head pair up, or if a
/// lane's columns are neighbors.
ATTN_HD bool rotates_in_place(const QkvParams& p) {
  const bool has_pairs = p.rotary_dim > 0 && p.is_interleaved == 0;
  return rotation_block(p.head_dim) == p.head_dim && (!has_pairs || p.rotary_dim == p.head_dim);
}

/// Whether K and V go through shared memory, one head at a time.
template <class Quantizer>
constexpr bool takes_heads(bool rotates) {
  return rotates || Quantizer::kOfBlocks;
}

/// kKernel: what kernel_for() says. CacheElement: of a cache of 16 bits. `cta`: of append_qkv_ctas().
template <class Element, QkvKernel kKernel, class Quantizer, class CacheElement = Element, bool kRotates = false>
__device__ __forceinline__ void append_qkv(const QkvParams& p, int32_t cta) {
  constexpr int kBits = Quantizer::kBits, kLimits = Quantizer::kLimits;
  constexpr bool kOfBlocks = Quantizer::kOfBlocks, kQuantizes = kBits < 16;
  constexpr bool kScalesTokens = kLimits > 0 && !kOfBlocks;
  constexpr bool kTakesHeads = takes_heads<Quantizer>(kRotates);
  constexpr int32_t kSize = half_chunk(kKernel);
  constexpr bool kAligned = kKernel != QkvKernel::kGeneral, kNormalizes = kKernel != QkvKernel::kPlain;
  const int32_t lanes = 1 << p.lane_bits;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), chunk = thread & (lanes - 1);
  const int32_t groups = kAppendQkvThreads >> p.lane_bits;  // of this CTA
  const HeadGroup group = head_group(p, cta * groups + (thread >> p.lane_bits));
  const ChunkPlace place = place_of_chunk(p, chunk, kSize);
  const int32_t distance = place.high - place.low;
  const bool is_q = group.kind == HeadKind::kQ, is_v = group.kind == HeadKind::kV;
  const int32_t heads = 2 * kSize * chunk < p.head_dim ? group.heads : 0;
  const bool is_rotated = place.is_rotated && p.rotary != RotaryTable::kNone && !is_v && heads > 0;
  const HeadRows& rows = is_q ? p.q : is_v ? p.v : p.k;
  const uint16_t* from = static_cast<const uint16_t*>(rows.data) + group.token * rows.token_stride +
                         group.first_head * rows.head_stride + place.low;
  const uint16_t* weights = static_cast<const uint16_t*>(is_q ? p.q_norm : is_v ? nullptr : p.k_norm);
  const bool is_cached = !is_q && heads > 0;
  const bool is_normed = kNormalizes && weights != nullptr && heads > 0;

  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();  // it waits for this one itself, before it reads the cache
  // All loads are issued before anything waits for one of them. Only the row of the table must wait, for its position.
  IndexArray::Words position_words{}, slot_words{group.token, 0};
  if (is_rotated) position_words = p.positions.words(group.token);
  if (is_cached && p.slots) slot_words = p.slots.words(group.token);
  Chunk<Element, kSize, kAligned> x[kGroupHeads] = {};
#pragma unroll
  for (int32_t i = 0; i < kGroupHeads; ++i)
    if (i < heads) x[i].load(from + i * rows.head_stride, distance);
  Chunk<Element, kSize, kAligned> weight;
  if (is_normed) weight.load(weights + place.low, distance);
  const bool is_quantized = kQuantizes && is_cached;
  const KvScale& scale = is_v ? p.scales.v : p.scales.k;
  [[maybe_unused]] Quantizer quantizers[kGroupHeads];
  if constexpr (kQuantizes && kLimits == 0) {
#pragma unroll
    for (int32_t i = 0; i < kGroupHeads; ++i)
      if (is_quantized && i < heads) quantizers[i].scale = scale.of(0, group.first_head + i);
  }
  const int32_t position = p.positions.narrow(position_words);
  Angles<Element, kSize, kAligned> angles;
  if (is_rotated) angles.load(p, position, chunk * kSize);

  float factors[kGroupHeads];
  if constexpr (kNormalizes) {
#pragma unroll
    for (int32_t i = 0; i < kGroupHeads; ++i) factors[i] = x[i].sum_of_squares();
    over_lanes(factors, lanes, [](float a, float b) { return a + b; });
#pragma unroll
    for (int32_t i = 0; i < kGroupHeads; ++i)
      factors[i] = rsqrtf(__fdividef(factors[i], static_cast<float>(p.head_dim)) + p.norm_eps);
  }
  if (is_rotated) angles.widen(p, position);
  if (is_normed && p.is_interleaved != 0) weight.deinterleave();

  // Two pairs of head i that turn by an angle each, normalized and turned.
  const auto finish_pairs = [&](int32_t i, int32_t j, float offset, float (&a)[2], float (&b)[2]) {
#pragma unroll
    for (int32_t k = 0; k < 2; ++k) {
      a[k] = x[i][2 * j + k], b[k] = x[i][kSize + 2 * j + k];
      if (is_normed) {
        a[k] *= factors[i] * weight[2 * j + k] + offset;
        b[k] *= factors[i] * weight[kSize + 2 * j + k] + offset;
      }
      if (is_rotated) {
        const float cosine = __uint_as_float(angles.cosines[2 * j + k]);
        const float sine = __uint_as_float(angles.sines[2 * j + k]);
        const float first = a[k];
        a[k] = first * cosine - b[k] * sine;
        b[k] = b[k] * cosine + first * sine;
      }
    }
  };
  using Bytes = ByteChunk<kSize, kAligned, kBits == 4 ? 4 : 8>;
  const auto set_bytes = [](Bytes& bytes, int32_t i, float low, float high, const auto& rounder) {
    if constexpr (kQuantizes) bytes.set(i, low, high, rounder);
  };
  const auto quantizer_of = [&](const auto* limits) {
    return Quantizer(limits, is_v ? p.v_factor : p.k_factor, p.scales.element);
  };
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
  const bool has_kv = __any_sync(ptx::kAllLanes, !is_q);  // the warp
  if constexpr (kTakesHeads) {
    if (has_kv) {
      // A head at a time. Unless it rotates in place, it goes through shared memory: the lanes' columns may be any, but
      // rotations and blocks need neighboring ones. Gaps between the chunks avoid bank conflicts.
      const bool in_place = kRotates && !kOfBlocks && kAligned && rotates_in_place(p);
      constexpr int32_t kColumns = 2 * kSize, kStride = kColumns + 4;
      float* const row =
          reinterpret_cast<float*>(ptx::static_shared<kAppendQkvThreads * kStride * 4>()) + (thread - chunk) * kStride;
      const auto four = [&](int32_t column) {
        return reinterpret_cast<float4*>(row + column / kColumns * kStride + column % kColumns);
      };
      const int32_t low = in_place ? place.low : chunk * kColumns, high = in_place ? place.high : low + kSize;
      const int32_t slot = is_cached ? p.slots.narrow(slot_words) : 0;
      const bool is_written = heads > 0 && (is_q || p.pages.has(slot));
      const SlotPlace token = is_q || !is_written ? SlotPlace{0, group.token} : p.pages.place(slot);
      const KvTensor q_target{p.q_out.data, 0, p.q_out.token_stride, p.q_out.head_stride};
      const KvTensor& target = is_q ? q_target : is_v ? p.v_cache : p.k_cache;
      const int32_t element_bytes = is_quantized ? 1 : 2;
      char* to = static_cast<char*>(const_cast<void*>(target.data)) +
                 (target.element(token, group.first_head) + low / (kBits == 4 && is_quantized ? 2 : 1)) * element_bytes;
#pragma unroll
      for (int32_t i = 0; i < kGroupHeads; ++i) {
        const bool is_there = is_written && i < heads, writes_kv = is_there && !is_q;
        float halves[kColumns];
        x[i].opaque();
        if (p.is_interleaved != 0) x[i].deinterleave();
#pragma unroll
        for (int32_t j = 0; j < kSize / 2; ++j) {
          float a[2], b[2];
          finish_pairs(i, j, kNormalizes ? factors[i] * p.norm_offset : 0.0f, a, b);
#pragma unroll
          for (int32_t k = 0; k < 2; ++k) {
            const int32_t pair = 2 * j + k;
            if (p.is_interleaved != 0)
              halves[2 * pair] = a[k], halves[2 * pair + 1] = b[k];
            else
              halves[pair] = a[k], halves[kSize + pair] = b[k];
          }
        }
        float rotated[kColumns];
        if (in_place) {
#pragma unroll
          for (int32_t j = 0; j < kColumns; ++j) rotated[j] = halves[j];
        } else {
#pragma unroll
          for (int32_t j = 0; j < kSize; j += 4) {
            *four(place.low + j) = make_float4(halves[j], halves[j + 1], halves[j + 2], halves[j + 3]);
            *four(place.high + j) =
                make_float4(halves[kSize + j], halves[kSize + j + 1], halves[kSize + j + 2], halves[kSize + j + 3]);
          }
          __syncwarp();
#pragma unroll
          for (int32_t j = 0; j < kColumns; j += 4) {
            const float4 columns = *four(chunk * kColumns + j);
            rotated[j] = columns.x;
            rotated[j + 1] = columns.y;
            rotated[j + 2] = columns.z;
            rotated[j + 3] = columns.w;
          }
          __syncwarp();  // before the next head takes its place
        }
        if (is_q && is_there) {  // in a warp with heads of K, too
#pragma unroll
          for (int32_t j = 0; j < kSize; ++j) x[i].words[j] = Element::pack(rotated[2 * j], rotated[2 * j + 1]);
          x[i].store(reinterpret_cast<uint16_t*>(to), high - low);
        }
        if constexpr (kRotates) rotate_head(rotated, p.head_dim, low, high, lanes);
        if constexpr (kLimits > 0) {
          constexpr int32_t kBlockLanes = kScaleColumns / kColumns;
          float limits[kLimits];
#pragma unroll
          for (float& limit : limits) limit = first_limit<kLimits>();  // lanes without columns keep it
          if (kLimits == 1 || chunk * kColumns < p.head_dim) {
#pragma unroll
            for (int32_t j = 0; j < kColumns; ++j) add_to_limits<kLimits>(limits, rotated[j]);
          }
          over_lanes(limits, kOfBlocks ? kBlockLanes : lanes, larger);
          quantizers[i] = quantizer_of(limits);
          const TokenScales& written = is_v ? p.v_token_scales : p.k_token_scales;
          if constexpr (kOfBlocks) {
            if (writes_kv && chunk % kBlockLanes == 0)
              written.write_block(token, group.first_head + i, chunk / kBlockLanes, quantizers[i].stored());
          } else {
            if (writes_kv && chunk == 0) written.write(token, group.first_head + i, quantizers[i].stored());
          }
        }
        if (writes_kv && is_quantized) {
          const auto rounder = rounder_of(quantizers[i], p.scales.element);
          Bytes bytes;
#pragma unroll
          for (int32_t j = 0; j < kSize; ++j) set_bytes(bytes, j, rotated[2 * j], rotated[2 * j + 1], rounder);
          bytes.store(reinterpret_cast<uint8_t*>(to), high - low);
        } else if (writes_kv) {
#pragma unroll
          for (int32_t j = 0; j < kSize; ++j)
            x[i].words[j] = pack_finite<CacheElement>(rotated[2 * j], rotated[2 * j + 1]);
          x[i].store(reinterpret_cast<uint16_t*>(to), high - low);
        }
        to += target.head_stride * element_bytes;
      }
      return;
    }
  }
  const bool finds_scales = kScalesTokens && !kTakesHeads && has_kv;
  // Warps with heads of K or V have returned. This removes the code for them below.
  if (kTakesHeads && !is_q) __builtin_unreachable();
  if constexpr (kScalesTokens) {
    if (finds_scales) {
      float limits[kGroupHeads * kLimits];
#pragma unroll
      for (float& limit : limits) limit = first_limit<kLimits>();  // lanes without columns keep it
      if (kLimits == 1 || 2 * kSize * chunk < p.head_dim) {
#pragma unroll
        for (int32_t i = 0; i < kGroupHeads; ++i) {
          if (p.is_interleaved != 0) x[i].deinterleave();
#pragma unroll
          for (int32_t j = 0; j < kSize / 2; ++j) {
            float a[2], b[2];
            finish_pairs(i, j, kNormalizes ? factors[i] * p.norm_offset : 0.0f, a, b);
#pragma unroll
            for (int32_t k = 0; k < 2; ++k) {
              add_to_limits<kLimits>(limits + i * kLimits, a[k]);
              add_to_limits<kLimits>(limits + i * kLimits, b[k]);
            }
          }
        }
      }
      over_lanes(limits, lanes, larger);
#pragma unroll
      for (int32_t i = 0; i < kGroupHeads; ++i) quantizers[i] = quantizer_of(limits + i * kLimits);
    }
  }

  const int32_t element_bytes = is_quantized ? 1 : 2;
  KvTensor target = KvTensor{p.q_out.data, 0, p.q_out.token_stride, p.q_out.head_stride};
  SlotPlace token{0, group.token};
  if (!is_q) {
    target = is_v ? p.v_cache : p.k_cache;
    const int32_t slot = p.slots.narrow(slot_words);
    if (!p.pages.has(slot)) return;
    token = p.pages.place(slot);
    if constexpr (kScalesTokens) {
      const TokenScales& of_tokens = is_v ? p.v_token_scales : p.k_token_scales;
#pragma unroll
      for (int32_t i = 0; i < kGroupHeads; ++i)
        if (chunk == 0 && i < heads) of_tokens.write(token, group.first_head + i, quantizers[i].stored());
    }
  }
  const int64_t element =
      target.element(token, group.first_head) + (kBits == 4 && is_quantized ? place.low / 2 : place.low);
  char* to = static_cast<char*>(const_cast<void*>(target.data)) + element * element_bytes;
  const int64_t head_bytes = target.head_stride * element_bytes;
#pragma unroll
  for (int32_t i = 0; i < kGroupHeads; ++i) {
    if (i >= heads) return;
    x[i].opaque();
    if (!finds_scales && p.is_interleaved != 0) x[i].deinterleave();
    const float offset = kNormalizes ? factors[i] * p.norm_offset : 0.0f;
    const auto rounder = rounder_of(quantizers[i], p.scales.element);
    Bytes bytes;
#pragma unroll
    for (int32_t j = 0; j < kSize / 2; ++j) {
      float a[2], b[2];
      finish_pairs(i, j, offset, a, b);
      if (is_quantized) {
        set_bytes(bytes, j, a[0], a[1], rounder);
        set_bytes(bytes, kSize / 2 + j, b[0], b[1], rounder);
      } else if (!is_same<Element, CacheElement> && is_cached) {
        x[i].words[j] = pack_finite<CacheElement>(a[0], a[1]);
        x[i].words[kSize / 2 + j] = pack_finite<CacheElement>(b[0], b[1]);
      } else {
        x[i].words[j] = Element::pack(a[0], a[1]);
        x[i].words[kSize / 2 + j] = Element::pack(b[0], b[1]);
      }
    }
    if (is_quantized) {
      if (p.is_interleaved != 0) bytes.interleave();
      bytes.store(reinterpret_cast<uint8_t*>(to + i * head_bytes), distance);
    } else {
      if (p.is_interleaved != 0) x[i].interleave();
      x[i].store(reinterpret_cast<uint16_t*>(to + i * head_bytes), distance);
    }
  }
}

/// For a cache whose K and V have different types. kKernel: of Q and K, which may have norms and angles. Quantizers: a
/// QuantizerPair. CTAs take Q and K, or V.
template <class Element, QkvKernel kKernel, class Quantizers, bool kRotates>
__device__ __forceinline__ void append_pair(const QkvPairParams& p) {
  const int32_t cta = static_cast<int32_t>(blockIdx.x);
  if (cta < p.v_first_cta)
    append_qkv<Element, kKernel, typename Quantizers::K, Element, kRotates>(p.k, cta);
  else
    append_qkv<Element, kernel_of_v(kKernel), typename Quantizers::V, Element, kRotates>(p.v, cta - p.v_first_cta);
}

}  // namespace attn
