// A token of MLA's cache as DeepSeek V3.2 stores it (DataType::kScaledLatent): a row of bytes that carries its scales.
#pragma once

#include "common/platform.h"

namespace attn {

/// 512 e4m3 numbers, the latent; a float32 for each 128 of them that they are multiplied by; 64 bf16 numbers, the
/// rotated part. The first 512 columns are V, all 576 K.
struct ScaledLatentRow {
  static constexpr int32_t kLatentColumns = 512;
  static constexpr int32_t kRopeColumns = 64;
  static constexpr int32_t kColumnsOfScale = 128;
  static constexpr int32_t kScales = kLatentColumns / kColumnsOfScale;
  static constexpr int32_t kScalesAt = kLatentColumns;  // bytes from the row's first
  static constexpr int32_t kRopeAt = kScalesAt + kScales * 4;
  static constexpr int32_t kBytes = kRopeAt + kRopeColumns * 2;
};
static_assert(ScaledLatentRow::kBytes == 656);

}  // namespace attn
