// As csrc/common/ptx/wgmma.cuh. A warp's part of a product, 16 rows of it, is computed when the warp waits for it, or
// at once: operands must be there when it begins, and stay until it is waited for. Until then the accumulators hold
// NaN; and what a thread has written to shared memory without a fence is NaN to a product.
#pragma once

#include <list>
#include <vector>

#include "common/cpu/elements.h"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared_address.h"
#include "common/ptx/types.cuh"
#include "cuda_emulation.h"

namespace attn::ptx {

constexpr int kProductRows = 16, kProductDepth = 16, kMaxProductDepth = 32, kMaxProductColumns = 256;

/// What a warp accumulates in, while products are under way that do.
struct Accumulators {
  float (*of_lanes[32])[4];  // [columns / 8]
  int columns;
  int products;  // under way
  float sums[kProductRows][kMaxProductColumns];

  /// Calls visit(what a lane holds, its place in `sums`). As C in mma.cuh.
  template <class Visit>
  void for_each(const Visit& visit) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int n = 0; n < columns / 8; ++n) {
        for (int i = 0; i < 4; ++i)
          visit(of_lanes[lane][n][i], sums[lane / 4 + i / 2 * 8][n * 8 + lane % 4 * 2 + i % 2]);
      }
    }
  }
};

/// A matrix in shared memory, as the PTX ISA describes it ("Asynchronous Warpgroup Level Matrix Shared Memory Layout").
struct DescribedMatrix {
  uint32_t start;
  uint32_t leading_bytes;  // where columns are not the k dimension: from 64 of them to the next
  uint32_t stride_bytes;   // from 8 rows to the next

  explicit DescribedMatrix(uint64_t descriptor)
      : start(of_own_cta(field(descriptor, 0))),
        leading_bytes(field(descriptor, 16)),
        stride_bytes(field(descriptor, 32)) {
    constexpr uint64_t kSwizzle128 = 1;
    if (descriptor >> 62 != kSwizzle128 || (descriptor >> 49 & 7) != 0)
      emulation::fail("only the swizzle of 128 bytes is emulated, without a base offset");
  }

  /// Eight elements of a row, from column `column` on; nullptr: they are not visible.
  const char* chunk(int row, int column) const {
    return bytes(row, static_cast<uint32_t>(column / 64) * leading_bytes + static_cast<uint32_t>(column % 64) * 2);
  }

  /// 16 bytes of a row, the first of them `offset` bytes after the row's beginning.
  const char* bytes(int row, uint32_t offset) const {
    const uint32_t address =
        start + static_cast<uint32_t>(row / 8) * stride_bytes + static_cast<uint32_t>(row % 8) * 128 + offset;
    const uint32_t at = swizzled(address);
    const char* const elements = shared_pointer(at, 16);
    return emulation::unfenced_writer(at, 16) < 0 ? elements : nullptr;
  }

 private:
  static uint32_t field(uint64_t descriptor, int shift) { return (descriptor >> shift & 0x3fff) << 4; }
  /// A descriptor has the lowest 18 bits of an address, and is of the CTA whose warp multiplies.
  static uint32_t of_own_cta(uint32_t bits) {
    const uint32_t part = static_cast<uint32_t>(emulation::shared_bytes) / emulation::cluster_size();
    const uint32_t first = part * static_cast<uint32_t>(emulation::cluster_rank());
    return first + ((bits - first) & 0x3ffff);
  }
};

template <MmaType kType>
float product_element(uint16_t bits) {
  return kType == MmaType::kBFloat16 ? bf16_element(bits, 0) : f16_element(bits, 0);
}

/// Of one product: A's columns are B's rows.
struct Factors {
  float a[kProductRows][kMaxProductDepth];
  float b[kMaxProductDepth][kMaxProductColumns];
};

/// sums = A B (+ sums)
struct Product {
  Accumulators* to;
  uint64_t a;                      // descriptor, if A is in shared memory
  const uint32_t* a_of_lanes[32];  // otherwise
  uint64_t b;                      // descriptor
  int warp;                        // of the warpgroup
  bool accumulates;
  int depth;
  void (*load)(const Product& product, Factors& factors);
  float (*rounded)(float sum);  // how many bits of it there are; nullptr: all

  void compute() const {
    static Factors factors;
    load(*this, factors);
    for (int row = 0; row < kProductRows; ++row) {
      float* const sums = to->sums[row];
      for (int n = 0; n < to->columns; n += 8) {
        Eight sum{}, of_b;
        if (accumulates) std::memcpy(&sum, sums + n, sizeof(sum));
        for (int k = 0; k < depth; ++k) {
          std::memcpy(&of_b, &factors.b[k][n], sizeof(of_b));
          sum += factors.a[row][k] * of_b;
        }
        std::memcpy(sums + n, &sum, sizeof(sum));
      }
      for (int n = 0; n < to->columns && rounded != nullptr; ++n) sums[n] = rounded(sums[n]);
    }
  }
};

template <MmaType kType>
void load_chunk(const char* chunk, float* to, int step) {
  uint16_t bits[8];
  std::memset(bits, emulation::kUnwritten, sizeof(bits));
  if (chunk != nullptr) std::memcpy(bits, chunk, sizeof(bits));
  for (int i = 0; i < 8; ++i) to[i * step] = product_element<kType>(bits[i]);
}

/// Of B, whose rows are the k dimension.
template <MmaType kType>
void load_rows(const Product& product, Factors& factors) {
  const DescribedMatrix b(product.b);
  for (int k = 0; k < kProductDepth; ++k) {
    for (int n = 0; n < product.to->columns; n += 8) load_chunk<kType>(b.chunk(k, n), &factors.b[k][n], 1);
  }
}

/// Of wgmma_shared(): columns of both are the k dimension; and of wgmma_shared_rows(): B's rows are. A warp may read
/// all rows of A, those of the other warps too: its products are NaN if one of these is not visible.
template <MmaType kType, bool kRowsOfB = false>
void load_shared(const Product& product, Factors& factors) {
  const DescribedMatrix a(product.a), b(product.b);
  for (int k = 0; k < kProductDepth; k += 8) {
    bool is_visible = true;
    for (int row = 0; row < 4 * kProductRows; ++row) is_visible &= a.chunk(row, k) != nullptr;
    for (int row = 0; row < kProductRows; ++row) {
      const char* const chunk = a.chunk(product.warp * kProductRows + row, k);
      load_chunk<kType>(is_visible ? chunk : nullptr, &factors.a[row][k], 1);
    }
    for (int n = 0; n < product.to->columns && !kRowsOfB; ++n)
      load_chunk<kType>(b.chunk(n, k), &factors.b[k][n], kMaxProductColumns);
  }
  if (kRowsOfB) load_rows<kType>(product, factors);
}

/// Of wgmma_registers(): A is in registers, as in mma.cuh; B's rows are the k dimension.
template <MmaType kType>
void load_registers(const Product& product, Factors& factors) {
  for (int lane = 0; lane < 32; ++lane) {
    visit_elements_of_a(lane, [&](int i, int half, int row, int column) {
      factors.a[row][column] = product_element<kType>(static_cast<uint16_t>(product.a_of_lanes[lane][i] >> half * 16));
    });
  }
  load_rows<kType>(product, factors);
}

/// Of one warp.
struct WarpProducts {
  bool fenced;                                  // since the last wait
  std::vector<std::vector<Product>> groups{1};  // that have not been waited for; the last one is open
  size_t computed;                              // of all their products, the first
  std::list<Accumulators> accumulators;
  std::vector<uint64_t> issued;  // what all warps of a warpgroup must agree on
};

inline WarpProducts products_of_warps[32];
inline WarpProducts& own_products() { return products_of_warps[emulation::fiber() / 32]; }

inline void begin_products() {
  for (WarpProducts& products : products_of_warps) products = WarpProducts{};
}
inline void end_products() {
  for (int warp = 0; warp < 32; ++warp) {
    const WarpProducts& products = products_of_warps[warp];
    if (!products.accumulators.empty()) emulation::fail("a warp has ended before its wgmma");
    if (products.issued != products_of_warps[warp / 4 * 4].issued)
      emulation::fail("the warps of a warpgroup have issued different wgmma");
  }
}
inline const bool kHasProducts = emulation::add_unit({begin_products, end_products});

/// Computes what has been issued, but for the last `groups` groups and the open one.
inline void compute_products(WarpProducts& products, size_t groups) {
  size_t number = 0;
  for (size_t i = 0; i + groups < products.groups.size(); ++i) {
    for (const Product& product : products.groups[i]) {
      if (number++ < products.computed) continue;
      product.compute();
      ++products.computed;
    }
  }
}

inline void wgmma_fence() {
  emulation::exchange({}, "wgmma.fence", [](const emulation::Words*) { own_products().fenced = true; });
}

inline void wgmma_commit() {
  emulation::exchange({}, "wgmma.commit_group", [](const emulation::Words*) { own_products().groups.emplace_back(); });
}

template <int kPending>
void wgmma_wait() {
  if (emulated_lane() == 0) emulation::pause();
  emulation::exchange({}, "wgmma.wait_group", [](const emulation::Words*) {
    WarpProducts& products = own_products();
    products.fenced = false;
    compute_products(products, kPending + 1);
    while (products.groups.size() > kPending + 1) {
      for (const Product& product : products.groups.front()) {
        if (--product.to->products == 0) {
          product.to->for_each([](float& held, float sum) { held = sum; });
          products.accumulators.remove_if([&](const Accumulators& a) { return &a == product.to; });
        }
        --products.computed;
      }
      products.groups.erase(products.groups.begin());
    }
  });
}

template <int kBlocks>
void wgmma_fence_operand(float (&)[kBlocks][4]) {}

/// Accumulators that products under way have, or new ones.
inline Accumulators& accumulators_of(WarpProducts& products, const emulation::Words* lanes, int columns) {
  for (Accumulators& known : products.accumulators) {
    if (known.of_lanes[0] == reinterpret_cast<float (*)[4]>(lanes[0].word[0])) return known;
  }
  Accumulators& made = products.accumulators.emplace_back();
  made.columns = columns;
  made.products = 0;
  for (int lane = 0; lane < 32; ++lane) made.of_lanes[lane] = reinterpret_cast<float (*)[4]>(lanes[lane].word[0]);
  made.for_each([](float& held, float& sum) {
    sum = held;
    held = NAN;
  });
  return made;
}

/// One warp issues its part of a product. Words of the lanes: accumulators; A, a descriptor or registers; B;
/// `accumulates`.
template <int kColumns, bool kInRegisters>
void issue_product(const emulation::Words* lanes, void (*load)(const Product&, Factors&), int depth = kProductDepth,
                   float (*rounded)(float) = nullptr) {
  WarpProducts& products = own_products();
  if (!products.fenced) emulation::fail("wgmma without wgmma.fence after what changed registers");
  for (int lane = 1; lane < 32; ++lane) {
    if ((!kInRegisters && lanes[lane].word[1] != lanes[0].word[1]) || lanes[lane].word[2] != lanes[0].word[2] ||
        lanes[lane].word[3] != lanes[0].word[3])
      emulation::fail("the lanes of a warp multiply different matrices");
  }
  Product product{};
  product.to = &accumulators_of(products, lanes, kColumns);
  ++product.to->products;
  if constexpr (kInRegisters) {
    for (int lane = 0; lane < 32; ++lane)
      product.a_of_lanes[lane] = reinterpret_cast<const uint32_t*>(lanes[lane].word[1]);
  } else {
    product.a = lanes[0].word[1];
    products.issued.push_back(product.a);
  }
  product.b = lanes[0].word[2];
  product.accumulates = lanes[0].word[3] != 0;
  product.warp = emulation::fiber() / 32 % 4;
  product.depth = depth;
  product.load = load;
  product.rounded = rounded;
  products.issued.push_back(product.b);
  products.groups.back().push_back(product);
  if (emulation::random() % 2 == 0) compute_products(products, 0);
}

// --- 8-bit elements

constexpr int kFloat8Depth = 32;

inline float e4m3_element(uint32_t byte) { return cpu::to_float(cpu::Float8E4M3{static_cast<uint8_t>(byte)}); }

/// Sixteen elements; of what is not visible, NaN.
inline void load_float8_chunk(const char* chunk, float* to, int step) {
  for (int i = 0; i < 16; ++i) to[i * step] = e4m3_element(static_cast<uint8_t>(chunk == nullptr ? '\x7f' : chunk[i]));
}

/// Of B, whose columns are the k dimension.
inline void load_float8_b(const Product& product, Factors& factors) {
  const DescribedMatrix b(product.b);
  for (int k = 0; k < kFloat8Depth; k += 16) {
    for (int n = 0; n < product.to->columns; ++n)
      load_float8_chunk(b.bytes(n, static_cast<uint32_t>(k)), &factors.b[k][n], kMaxProductColumns);
  }
}

/// A warp may read all rows of A, as in load_shared().
inline void load_float8_shared(const Product& product, Factors& factors) {
  const DescribedMatrix a(product.a);
  for (int k = 0; k < kFloat8Depth; k += 16) {
    bool is_visible = true;
    for (int row = 0; row < 4 * kProductRows; ++row) is_visible &= a.bytes(row, static_cast<uint32_t>(k)) != nullptr;
    for (int row = 0; row < kProductRows; ++row) {
      const char* const chunk = a.bytes(product.warp * kProductRows + row, static_cast<uint32_t>(k));
      load_float8_chunk(is_visible ? chunk : nullptr, &factors.a[row][k], 1);
    }
  }
  load_float8_b(product, factors);
}

/// Of wgmma_registers(): four bytes in each word, of row g or g + 8, columns 4t on, or 16 + 4t on (PTX ISA,
/// "Register Fragments for wgmma.mma_async.m64nNk32").
inline void load_float8_registers(const Product& product, Factors& factors) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      float* const four = &factors.a[lane / 4 + i % 2 * 8][lane % 4 * 4 + i / 2 * 16];
      for (int byte = 0; byte < 4; ++byte) four[byte] = e4m3_element(product.a_of_lanes[lane][i] >> byte * 8 & 0xff);
    }
  }
  load_float8_b(product, factors);
}

/// The ISA says nothing of how products of 8-bit elements are added; Hopper keeps about 14 bits of a sum, and cuts the
/// others off.
inline float float8_sum(float sum) {
  constexpr uint32_t kDropped = (1u << 10) - 1;
  return emulation::from_bits<float>(emulation::to_bits(sum) & ~static_cast<uint64_t>(kDropped));
}

/// c = a * b^T (+ c if `accumulates`): the columns of both are the k dimension.
template <MmaType kType, int kBlocks>
void wgmma_shared(float (&c)[kBlocks][4], MatrixDescriptor a, MatrixDescriptor b, int32_t accumulates) {
  emulation::exchange({{reinterpret_cast<uint64_t>(c), a.value(), b.value(), accumulates != 0}}, "wgmma",
                      [](const emulation::Words* lanes) {
                        if constexpr (kType == MmaType::kFloat8E4M3)
                          issue_product<kBlocks * 8, false>(lanes, load_float8_shared, kFloat8Depth, float8_sum);
                        else
                          issue_product<kBlocks * 8, false>(lanes, load_shared<kType>);
                      });
}

/// c = a * b (+ c if `accumulates`): a's columns and b's rows are the k dimension.
template <MmaType kType, int kBlocks>
void wgmma_shared_rows(float (&c)[kBlocks][4], MatrixDescriptor a, MatrixDescriptor b, int32_t accumulates) {
  emulation::exchange(
      {{reinterpret_cast<uint64_t>(c), a.value(), b.value(), accumulates != 0}}, "wgmma",
      [](const emulation::Words* lanes) { issue_product<kBlocks * 8, false>(lanes, load_shared<kType, true>); });
}

/// c = a * b (+ c if `accumulates`): a in registers, b's rows are the k dimension. 8-bit elements: c = a * b^T.
template <MmaType kType, int kBlocks>
void wgmma_registers(float (&c)[kBlocks][4], const uint32_t (&a)[4], MatrixDescriptor b, int32_t accumulates) {
  emulation::exchange({{reinterpret_cast<uint64_t>(c), reinterpret_cast<uint64_t>(a), b.value(), accumulates != 0}},
                      "wgmma", [](const emulation::Words* lanes) {
                        if constexpr (kType == MmaType::kFloat8E4M3)
                          issue_product<kBlocks * 8, true>(lanes, load_float8_registers, kFloat8Depth, float8_sum);
                        else
                          issue_product<kBlocks * 8, true>(lanes, load_registers<kType>);
                      });
}

}  // namespace attn::ptx
