// The types that tensor cores multiply.
#pragma once

namespace attn::ptx {

enum class MmaType { kFloat16, kBFloat16, kFloat8E4M3 };

}  // namespace attn::ptx
