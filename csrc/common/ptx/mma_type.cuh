// The types that tensor cores multiply.
#pragma once

namespace attn::ptx {

enum class MmaType { kFloat16, kBFloat16 };

}  // namespace attn::ptx
