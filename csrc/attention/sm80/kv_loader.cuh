// Streams the K and V tiles of a CTA's interval through the ring of shared-memory stages, without a break between work
// items.
//
// Three steps run ahead of each other: the page of a token is looked up (a global load, two KV tiles ahead), its row's
// addresses are published in shared memory (one KV tile ahead), and its K and V rows are copied. Thread t looks up
// token t % kv_tile, for K if t < kv_tile and for V otherwise.
#pragma once

#include "attention/params.h"
#include "attention/sm80/shape.h"
#include "attention/tile/dequantized.cuh"
#include "attention/tile/row_tile.cuh"
#include "attention/tile/shared_tile.cuh"
#include "attention/tile/work_cursor.cuh"
#include "common/platform.h"
#include "common/ptx/copy.cuh"
#include "planner/page_table.h"

namespace attn::sm80 {

/// The kernel's arguments.
template <class Traits>
using ParamsOf = typename Conditional<Traits::kIsLatent, LatentAttentionParams, AttentionParams>::Type;

template <class Traits>
constexpr SharedLayout kLayout{Traits::Shape::kDims, Traits::Element::kBytes, Traits::kKvForm};

/// Words that the TokenScales of a head have room for.
template <class Traits>
constexpr int kScaleWords = Traits::kKvForm.scale_words(Traits::Shape::kDims);

template <class Traits>
using QTile = SharedTile<typename Traits::Element, Traits::Shape::kQk>;

/// Rows of O on their way to global memory, where Q was.
template <class Traits>
using OTile = SharedTile<typename Traits::OutElement, Traits::Shape::kV>;

template <class Traits>
using KTile = SharedTile<typename Traits::KElement, stored_columns<typename Traits::KElement>(Traits::Shape::kQk)>;

template <class Traits>
using VTile = SharedTile<typename Traits::VElement, stored_columns<typename Traits::VElement>(Traits::Shape::kV)>;

/// K and V as they are multiplied. kDequantizesInTiles: they have been dequantized to other tiles before.
template <class Traits>
using MultipliedElement =
    typename Conditional<Traits::kDequantizesInTiles, typename Traits::Element, typename Traits::KvElement>::Type;

/// Stands in for the tokens of a row tile that sees nothing.
constexpr int kMaxRowBytes = 1152;
__device__ const uint4 zero_row[kMaxRowBytes / 16] = {};

/// A level, as far as lookups need it.
struct PageTableView {
  const int32_t* indices;
  int64_t num_entries;
  int32_t entry_step;
};

/// A row tile, as far as lookups need it.
struct LoadedTile {
  int64_t table_begin;
  int32_t kv_begin;       // as RowTile's
  int32_t visible_begin;  // tokens that some row of the row tile sees
  int32_t visible_end;
  int32_t num_kv_tiles;
};

/// Keeps a LoadedTile in registers; or, where the schedule is not plain, with its page table in the warp's part of
/// shared memory.
template <bool kManyLevels>
struct LoadedTileStore {
  LoadedTile tile;

  __device__ __forceinline__ explicit LoadedTileStore(char*) {}
  __device__ __forceinline__ const LoadedTile& get() const { return tile; }
  __device__ __forceinline__ void set(const LoadedTile& loaded, const AttentionParams&, int32_t) { tile = loaded; }

  /// Level 0's; read again at every KV tile, well before it is needed.
  __device__ __forceinline__ PageTableView page_table(const AttentionParams& params) const {
    const Level& level = params.schedule.header->levels[0];
    return PageTableView{level.indices, level.num_entries, level.entry_step};
  }
};

template <>
struct LoadedTileStore<true> {
  struct Entry {
    LoadedTile tile;
    PageTableView table;
  };
  static_assert(sizeof(Entry) <= kLoadedTileBytes);
  Entry& entry;

  __device__ __forceinline__ explicit LoadedTileStore(char* memory)
      : entry(reinterpret_cast<Entry*>(memory)[threadIdx.x / 32]) {}
  __device__ __forceinline__ const LoadedTile& get() const { return entry.tile; }
  __device__ __forceinline__ void set(const LoadedTile& loaded, const AttentionParams& params, int32_t level_number) {
    __syncwarp();
    const Level& level = params.schedule.header->levels[level_number];
    if (threadIdx.x % 32 == 0) entry = Entry{loaded, PageTableView{level.indices, level.num_entries, level.entry_step}};
    __syncwarp();
  }
  __device__ __forceinline__ PageTableView page_table(const AttentionParams&) const { return entry.table; }
};

template <class Traits, bool kManyLevels>
struct KvLoader {
  static constexpr Tuning kTuning = tuning(Traits::Shape::kDims, Traits::kKvForm);
  static constexpr int kTokens = kTuning.kv_tile;
  static constexpr int kPairs = kTuning.kv_stages / 2;  // KV tiles in the ring

  /// How the CTA copies a tile of K or V: some rows at a time.
  template <class Tile>
  struct Passes {
    using Pieces = RowPieces<Tile, kThreads>;
    static constexpr int kRows = Pieces::kRows;
    static constexpr int kCount = kTokens / kRows;

    /// The addresses that one thread copies from lie side by side: row pass * kRows + first is number first * kCount +
    /// pass.
    __device__ __forceinline__ static int number(int row) { return row % kRows * kCount + row / kRows; }
  };
  static_assert(kThreads % (2 * kTokens) == 0, "one thread a token for K and one for V; or several that do the same");
  static_assert(max_of(KTile<Traits>::kRowBytes, VTile<Traits>::kRowBytes) <= kMaxRowBytes, "zero_row");

  const AttentionParams& params;
  const Visibility& first_visibility;  // of level 0
  char* shared;
  WorkCursor cursor;  // KV tile that is looked up
  LoadedTileStore<kManyLevels> store;
  int32_t entry;   // of the page table, for this thread's token
  bool more;       // the cursor is inside the interval
  bool published;  // value of `more` when addresses were last published: there is a KV tile to be copied

  /// TokenScales of this thread's tokens. The first is of the KV tile that is copied next.
  static constexpr int kScaleWords = sm80::kScaleWords<Traits>;
  float scales[Traits::Variant::kHasTokenScales ? kPairs : 1][kScaleWords] = {};

  __device__ __forceinline__ KvLoader(const AttentionParams& params_, const Visibility& first_visibility_,
                                      const WorkCursor& first, char* shared_)
      : params(params_),
        first_visibility(first_visibility_),
        shared(shared_),
        cursor(first),
        store(shared_ + kLayout<Traits>.loading) {
    load_row_tile();
    look_up(page_table());
  }

  /// Fills the ring except its last stage. Every thread of the CTA takes part in this and in the other public steps.
  __device__ __forceinline__ void start() {
    PageTableView table = page_table();
    publish(table, 0);
    if (advance() && kManyLevels) table = page_table();
    look_up(table);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kPairs; ++tile) {
      load_k(tile, tile);
      if (tile + 1 < kPairs) {
        load_v(tile, tile);
        __syncthreads();
      }
    }
  }

  /// Copies K of KV tile number `tile` of the interval, if there is one, into stage pair `pair`; commits one group.
  __device__ __forceinline__ void load_k(int tile, int pair) { copy<KTile<Traits>>(0, tile & 1, pair); }

  /// Copies V; commits one group. Then makes the next KV tile's addresses known.
  __device__ __forceinline__ void load_v(int tile, int pair) {
    PageTableView table = page_table();  // read before the copies are issued, to hide its latency
    copy<VTile<Traits>>(1, tile & 1, pair);
    if constexpr (Traits::Variant::kHasTokenScales) write_scales(1);
    publish(table, (tile + 1) & 1);
    if (advance() && kManyLevels) table = page_table();
    look_up(table);
  }

  /// TokenScales of K or V of the KV tile that is multiplied; written where its warps keep the state of rows at the end
  /// of an item. K's are written before the barrier that K is waited for at, V's after it.
  __device__ __forceinline__ float* tile_scales(int which) const {
    return reinterpret_cast<float*>(shared + kLayout<Traits>.row_states) + which * kTokens * kScaleWords;
  }
  __device__ __forceinline__ void write_scales(int which) const {
    static_assert(kThreads == 2 * kTokens && 2 * kTokens == 2 * kWarps * 16, "a thread for each, and their room");
    if (static_cast<int>(threadIdx.x) / kTokens != which) return;
#pragma unroll
    for (int word = 0; word < kScaleWords; ++word)
      tile_scales(which)[threadIdx.x % kTokens * kScaleWords + word] = scales[0][word];
  }

 private:
  __device__ __forceinline__ int64_t* row_addresses(int parity, int which) {
    return reinterpret_cast<int64_t*>(shared + kLayout<Traits>.row_addresses) + (parity * 2 + which) * kTokens;
  }

  template <class Tile>
  __device__ __forceinline__ void copy(int which, int parity, int pair) {
    if constexpr (Traits::kDequantizesOnLoad) return copy_dequantized<Tile>(which, parity, pair);
    constexpr SharedLayout layout = kLayout<Traits>;
    constexpr int kPasses = Passes<Tile>::kCount;
    const uint32_t target =
        ptx::shared_address(shared + layout.kv) + pair * layout.pair_bytes + which * layout.k_stage_bytes;
    if (published) {
      using Pieces = typename Passes<Tile>::Pieces;
      constexpr int kChunks = Pieces::kChunks;
      constexpr int kBatch = min_of(4, kPasses);
      const int chunk = threadIdx.x % kChunks;
      const int first_row = threadIdx.x / kChunks;
      const int64_t* addresses = row_addresses(parity, which) + first_row * kPasses;
#pragma unroll
      for (int pass = 0; pass < kPasses; pass += kBatch) {
        longlong2 rows[kBatch / 2];
#pragma unroll
        for (int i = 0; i < kBatch / 2; ++i) rows[i] = *reinterpret_cast<const longlong2*>(addresses + pass + 2 * i);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const char* row = reinterpret_cast<const char*>(i % 2 == 0 ? rows[i / 2].x : rows[i / 2].y);
#pragma unroll
          for (int piece = 0; piece < Pieces::kPieces; ++piece) {
            const int row_chunk = chunk + piece * kChunks;
            const uint32_t to = target + Tile::offset(first_row + (pass + i) * Passes<Tile>::kRows, row_chunk);
            copy_chunk<Tile>(to, row + row_chunk * 16, row_chunk);
          }
        }
      }
    }
    ptx::cp_async_commit();
  }

  /// The same for rows that are dequantized on their way, in registers. Four threads take a row.
  template <class Tile>
  __device__ __forceinline__ void copy_dequantized(int which, int parity, int pair) {
    if (!published) return;
    constexpr SharedLayout layout = kLayout<Traits>;
    using Stored = typename Traits::StoredElement;
    using Row = StoredRow<typename Traits::Element, Stored, Tile::kHeadColumns / 64>;
    constexpr int kAtOnce = 5;  // pieces of a row that are on their way
    static_assert(kThreads / 4 == kTokens && Tile::kHeadColumns % 64 == 0);
    char* const tile = shared + layout.kv + pair * layout.pair_bytes + which * layout.k_stage_bytes;
    // Eight lanes write a pair of rows, chosen so that their stores fall into different banks.
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * 8 + (lane / 8 ^ lane / 4 % 2 * 5);
    const Row from{reinterpret_cast<const char*>(row_addresses(parity, which)[Passes<Tile>::number(row)]), lane % 4};
    using VariantParams = typename Traits::Variant::Params;
    float scale_of_cache = 1.0f;  // scores and outputs are multiplied by it
    if constexpr (Traits::kLoadsScaled) scale_of_cache = params.variant.template as<VariantParams>().scales.k.of(0, 0);
#pragma unroll
    for (int first = 0; first < Row::kPieces; first += kAtOnce) {
      uint4 pieces[kAtOnce];
      float scales[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= Row::kPieces) break;
        pieces[i] = from.load(first + i);
        scales[i] = scale_of_cache;
        if constexpr (Stored::kRowsHaveScales) scales[i] = from.scale(first + i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= Row::kPieces) break;
        from.template store<Tile>(tile, row, first + i, pieces[i], scales[i]);
      }
    }
  }

  /// This thread's token. A token that no row of the row tile sees is replaced by the nearest token that some row sees.
  /// The cache may hold NaN or the page of another request there, which must not reach the output. The replacement is
  /// masked.
  __device__ __forceinline__ int32_t token() const {
    const LoadedTile& tile = store.get();
    const int32_t first =
        kv_tile_start<Traits::Variant::kSkipsTiles>(params.schedule, params.schedule.tiles[cursor.now.tile].group,
                                                    tile.kv_begin, cursor.now.kv_tile, kTokens)
            .token;
    const int32_t t = first + static_cast<int32_t>(threadIdx.x) % kTokens;
    return clamp(t, tile.visible_begin, tile.visible_end - 1);
  }

  __device__ __forceinline__ bool sees_nothing() const { return store.get().visible_begin >= store.get().visible_end; }

  /// Reads what the lookups need of the row tile under the cursor. After the end of the interval: a row tile that sees
  /// nothing.
  __device__ __forceinline__ void load_row_tile() {
    more = !cursor.done();
    LoadedTile loaded{};
    if (!more) {
      store.set(loaded, params, 0);
      return;
    }
    const RowTile& tile = params.schedule.tiles[cursor.now.tile];
    const RowGroup& group = params.schedule.groups[tile.group];
    const RowTileRows<kManyLevels> rows(params.schedule, tile, group, params.group_size.divisor);
    const Visibility visibility =
        kManyLevels ? params.schedule.header->levels[group.level].visibility : first_visibility;
    const TokenRange all{0, params.num_pages > 0 ? tile.kv_end : 0};
    loaded.visible_begin =
        visibility
            .seen_by_any(rows.position(0, params.group_size), rows.position(rows.count - 1, params.group_size), all)
            .begin;
    loaded.visible_end = all.end;
    loaded.kv_begin = tile.kv_begin;
    loaded.num_kv_tiles = tile.num_kv_tiles;
    loaded.table_begin = group.table_begin;
    store.set(loaded, params, group.level);
  }

  __device__ __forceinline__ PageTableView page_table() const { return store.page_table(params); }

  /// Starts to read the page table for the KV tile under the cursor.
  __device__ __forceinline__ void look_up(const PageTableView& table) {
    if (sees_nothing()) return;
    const int32_t page = params.page_size.divide(token());
    if (table.indices != nullptr) {
      const int64_t index = clamp<int64_t>(store.get().table_begin + static_cast<int64_t>(page) * table.entry_step, 0,
                                           table.num_entries - 1);
      entry = __ldg(table.indices + index);
    } else {
      entry = static_cast<int32_t>(min_of<int64_t>(store.get().table_begin + page, 0x7fffffff));
    }
  }

  /// Makes the addresses of the KV tile under the cursor known.
  __device__ __forceinline__ void publish(const PageTableView& table, int parity) {
    const bool is_v = (kThreads == 2 * kTokens ? threadIdx.x : threadIdx.x % (2 * kTokens)) >= kTokens;
    int64_t address = reinterpret_cast<int64_t>(zero_row);
    [[maybe_unused]] float scale[kScaleWords] = {};
    if (!sees_nothing()) {
      const int32_t wanted =
          table.indices == nullptr || table.entry_step == 1 ? entry : page_of_slot(entry, table.entry_step);
      const int32_t page = clamp(wanted, 0, params.num_pages - 1);
      if (page != wanted) atomicOr(&params.schedule.header->errors, kPageIndexInvalid);
      const KvTensor& tensor = is_v ? params.v : params.k;
      const int64_t element = page * tensor.page_stride + params.page_size.modulo(token()) * tensor.token_stride +
                              cursor.now.head * tensor.head_stride;
      address = reinterpret_cast<int64_t>(tensor.data) + element * Traits::StoredElement::kBytes;
      if constexpr (Traits::Variant::kHasTokenScales) {
        using VariantParams = typename Traits::Variant::Params;
        const AttentionTokenScales& of_tokens = params.variant.template as<VariantParams>().scales;
        const SlotPlace place{page, params.page_size.modulo(token())};
        const float* const words = &(is_v ? of_tokens.v : of_tokens.k).of(place, cursor.now.head);
#pragma unroll
        for (int word = 0; word < kScaleWords; ++word) {
          constexpr KvForm kForm = Traits::kKvForm;
          if (word < (is_v ? kForm.scale_words(Traits::Shape::kV, true) : kForm.scale_words(Traits::Shape::kQk, false)))
            scale[word] = words[word];
        }
      }
    }
    if constexpr (Traits::Variant::kHasTokenScales) {
#pragma unroll
      for (int word = 0; word < kScaleWords; ++word) {
#pragma unroll
        for (int i = 0; i + 1 < kPairs; ++i) scales[i][word] = scales[i + 1][word];
        scales[kPairs - 1][word] = scale[word];
      }
    }
    const int row = threadIdx.x % kTokens;
    row_addresses(parity, is_v)[is_v ? Passes<VTile<Traits>>::number(row) : Passes<KTile<Traits>>::number(row)] =
        address;
    published = more;
  }

  /// Moves to the next KV tile of the interval. Returns whether it belongs to another row tile, perhaps with another
  /// page table.
  __device__ __forceinline__ bool advance() {
    if (!more || ++cursor.now.kv_tile < cursor.end_kv_tile(store.get().num_kv_tiles)) return false;
    const int32_t tile = cursor.now.tile;
    cursor.next_pair(params.num_kv_heads);
    if (!cursor.done() && cursor.now.tile == tile) return false;
    load_row_tile();
    return true;
  }
};

}  // namespace attn::sm80
