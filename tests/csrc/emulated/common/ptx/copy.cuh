// As csrc/common/ptx/copy.cuh.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ptx/shared_address.h"
#include "common/ptx/types.cuh"
#include "common/tensor_map.h"
#include "cuda_emulation.h"

namespace attn::ptx {

// --- cp.async
//
// A copy is done when its thread waits for it, or when no thread can continue without
// it; until then its target holds NaN: who reads too early, and who writes what is still read, is found out.

/// Of one thread, in their order.
struct Copies {
  struct Copy {
    uint32_t to;
    const void* from;  // nullptr: zeros
    uint32_t bytes;
  };
  std::vector<Copy> all;
  std::vector<size_t> groups;  // where each commit group ends
  size_t done;

  void finish(size_t count) {
    for (; done < count; ++done) {
      char* const to = shared_pointer(all[done].to, all[done].bytes);
      if (all[done].from != nullptr)
        std::memcpy(to, all[done].from, all[done].bytes);
      else
        std::memset(to, 0, all[done].bytes);
    }
  }
};

/// Of each thread of a cluster.
inline Copies copies_of_threads[1024];
inline Copies& own_copies() { return copies_of_threads[emulation::fiber()]; }

inline void begin_copies() {
  for (Copies& copies : copies_of_threads) copies = Copies{};
}
inline void end_copies() {
  for (const Copies& copies : copies_of_threads) {
    if (copies.done < copies.all.size()) emulation::fail("a thread has ended before its cp.async");
  }
}
inline const bool kHasCopies = emulation::add_unit({begin_copies, end_copies});

inline void copy_later(uint32_t shared, const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0)
    emulation::fail("bytes are copied together that do not lie together");
  std::memset(shared_pointer(shared, bytes), emulation::kUnwritten, bytes);
  emulation::replace_shared(shared, bytes);
  own_copies().all.push_back({shared, global, bytes});
}

inline void cp_async_16(uint32_t shared, const void* global) { copy_later(shared, global, 16); }
inline void cp_async_16_or_zero(uint32_t shared, const void* global, bool exists) {
  copy_later(shared, exists ? global : nullptr, 16);
}
inline void cp_async_8_or_zero(uint32_t shared, const void* global, bool exists) {
  copy_later(shared, exists ? global : nullptr, 8);
}

inline void cp_async_4_or_zero(uint32_t shared, const void* global, bool exists) {
  copy_later(shared, exists ? global : nullptr, 4);
}

inline void cp_async_commit() { own_copies().groups.push_back(own_copies().all.size()); }

template <int kPending>
void cp_async_wait() {
  Copies& copies = own_copies();
  if (copies.groups.size() > kPending) copies.finish(copies.groups[copies.groups.size() - 1 - kPending]);
}

// --- TMA
//
// A box is loaded at any time after the instruction; until then its target holds
// NaN. A box is stored when its thread waits for it, or at once. TMA neither reads nor overwrites what a thread has
// written and not fenced.

/// What the emulation keeps in a TensorMap.
struct EncodedTensor {
  uint64_t mark;
  Tensor4d tensor;
};
static_assert(sizeof(EncodedTensor) <= sizeof(TensorMap));
constexpr uint64_t kEncodedMark = 0x7e4506;
inline int32_t element_bytes(const Tensor4d& tensor) { return bytes_of(tensor.dtype); }
inline int32_t box_row_bytes(const Tensor4d& tensor) { return tensor.box[0] * element_bytes(tensor); }

/// In the place of the driver's: refuses what cuTensorMapEncodeTiled refuses.
inline bool encode(const Tensor4d& tensor, TensorMap& map) {
  constexpr int64_t kMaxSize = int64_t{1} << 32, kMaxStride = int64_t{1} << 40;
  const int32_t row_bytes = box_row_bytes(tensor);
  if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0 || (row_bytes != 64 && row_bytes != 128)) return false;
  for (int i = 0; i < 4; ++i) {
    if (tensor.sizes[i] <= 0 || tensor.sizes[i] > kMaxSize || tensor.box[i] <= 0 || tensor.box[i] > 256) return false;
  }
  for (int i = 0; i < 3; ++i) {
    if (tensor.strides[i] < 0) return false;
    const int64_t bytes = tensor.strides[i] * element_bytes(tensor);
    if (tensor.sizes[i + 1] > 1 && (bytes % 16 != 0 || bytes >= kMaxStride)) return false;
  }
  const EncodedTensor encoded{kEncodedMark, tensor};
  std::memcpy(&map, &encoded, sizeof(encoded));
  return true;
}

inline Tensor4d decoded(const TensorMap& map) {
  EncodedTensor encoded;
  std::memcpy(&encoded, &map, sizeof(encoded));
  if (encoded.mark != kEncodedMark) emulation::fail("TMA is given something that is not a tensor map");
  return encoded.tensor;
}

/// A box of a tensor and its place in shared memory.
struct Box {
  Tensor4d tensor;
  int64_t first[4];
  uint32_t shared;

  Box(const TensorMap& map, uint32_t shared_, int32_t c0, int32_t c1, int32_t c2, int32_t c3)
      : tensor(decoded(map)), first{c0, c1, c2, c3}, shared(shared_) {
    shared_pointer(shared, 128);
    if (shared + bytes() > emulation::shared_bytes) emulation::fail("a box reaches beyond shared memory");
  }

  uint32_t bytes() const {
    return static_cast<uint32_t>(box_row_bytes(tensor) * tensor.box[1] * tensor.box[2] * tensor.box[3]);
  }

  /// Calls visit(address of an element in shared memory, element of the tensor or nullptr) for each.
  template <class Visit>
  void for_each(const Visit& visit) const {
    uint32_t address = shared;
    int64_t i[4] = {};
    for (; i[3] < tensor.box[3]; ++i[3], i[2] = 0) {
      for (; i[2] < tensor.box[2]; ++i[2], i[1] = 0) {
        for (; i[1] < tensor.box[1]; ++i[1], i[0] = 0) {
          for (; i[0] < tensor.box[0]; ++i[0], address += static_cast<uint32_t>(element_bytes(tensor)))
            visit(swizzled(address, static_cast<uint32_t>(box_row_bytes(tensor))), element(i));
        }
      }
    }
  }

 private:
  char* element(const int64_t (&i)[4]) const {
    int64_t offset = first[0] + i[0];
    for (int dim = 0; dim < 4; ++dim) {
      const int64_t at = first[dim] + i[dim];
      if (at < 0 || at >= tensor.sizes[dim]) return nullptr;
      if (dim > 0) offset += at * tensor.strides[dim - 1];
    }
    return static_cast<char*>(const_cast<void*>(tensor.data)) + offset * element_bytes(tensor);
  }
};

inline void prefetch_tensor_map(const TensorMap&) {}

inline void copy_box(uint32_t shared, const TensorMap& map, uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                     int32_t c3, CachePolicy) {
  const Box box(map, shared, c0, c1, c2, c3);
  if (emulation::unfenced_writer(shared, box.bytes()) >= 0)
    emulation::fail("TMA fills what no fence.proxy.async has followed");
  std::memset(emulation::shared_memory + shared, emulation::kUnwritten, box.bytes());
  emulation::replace_shared(shared, box.bytes());
  emulation::begin_work([box, barrier] {
    box.for_each([bytes = static_cast<size_t>(element_bytes(box.tensor))](uint32_t address, const char* element) {
      const uint16_t zero = 0;
      std::memcpy(emulation::shared_memory + address,
                  element == nullptr ? reinterpret_cast<const char*>(&zero) : element, bytes);
    });
    emulation::mbarrier_add(barrier, 0, -static_cast<int64_t>(box.bytes()));
  });
}

/// Boxes that a thread stores, and how many of them belong to its commit groups.
struct Stores {
  std::vector<Box> boxes;
  size_t committed;
};
inline Stores stores_of_threads[1024];

inline void begin_stores() {
  for (Stores& stores : stores_of_threads) stores = Stores{};
}
inline void end_stores() {
  for (const Stores& stores : stores_of_threads) {
    if (!stores.boxes.empty()) emulation::fail("a thread has ended before TMA has read what it stores");
  }
}
inline const bool kHasStores = emulation::add_unit({begin_stores, end_stores});

inline void store_box(const TensorMap& map, uint32_t shared, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  const Box box(map, shared, c0, c1, c2, c3);
  if (emulation::unfenced_writer(shared, box.bytes()) >= 0)
    emulation::fail("TMA stores what no fence.proxy.async has followed");
  stores_of_threads[emulation::fiber()].boxes.push_back(box);
}

inline void bulk_commit() {
  Stores& stores = stores_of_threads[emulation::fiber()];
  stores.committed = stores.boxes.size();
}

inline void bulk_wait_read() {
  Stores& stores = stores_of_threads[emulation::fiber()];
  for (size_t i = 0; i < stores.committed; ++i) {
    stores.boxes[i].for_each(
        [bytes = static_cast<size_t>(element_bytes(stores.boxes[i].tensor))](uint32_t address, char* element) {
          if (element != nullptr) std::memcpy(element, emulation::shared_memory + address, bytes);
        });
  }
  stores.boxes.erase(stores.boxes.begin(), stores.boxes.begin() + static_cast<ptrdiff_t>(stores.committed));
  stores.committed = 0;
}

// --- prefetch
//
// there is no cache.

inline void prefetch_to_l2(const char*) {}
inline void prefetch_bytes_to_l2(const char*, uint32_t) {}

}  // namespace attn::ptx
