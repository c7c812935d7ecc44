// Tables of the fields of structs, for those who fill and read them from Python (attn_backend/kernels/native.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace attn {

/// One field of a struct.
struct Field {
  const char* name;
  const char* type;  // as NumPy abbreviates it ("i4"), or the name of another struct
  size_t type_bytes;
  size_t count;  // elements of an array; 0: not an array
  size_t offset;

  constexpr size_t bytes() const { return type_bytes * (count == 0 ? 1 : count); }
};

/// Says of a struct its `name` and its `fields`, in the order in which they lie in memory.
template <class Struct>
struct StructFields;

template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, bool>) {
    return "?";
  } else if constexpr (std::is_pointer_v<T>) {
    return "u8";
  } else if constexpr (std::is_enum_v<T>) {
    return type_name<std::underlying_type_t<T>>();
  } else if constexpr (std::is_same_v<T, float>) {
    return "f4";
  } else if constexpr (std::is_same_v<T, double>) {
    return "f8";
  } else if constexpr (std::is_integral_v<T>) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "an integer of another size");
    return sizeof(T) == 4 ? (std::is_signed_v<T> ? "i4" : "u4") : (std::is_signed_v<T> ? "i8" : "u8");
  } else {
    return StructFields<T>::name;
  }
}

template <class Member>
constexpr Field make_field(const char* name, size_t offset) {
  using T = std::remove_extent_t<Member>;
  static_assert(!std::is_array_v<T>, "an array of arrays");
  return Field{name, type_name<T>(), sizeof(T), std::extent_v<Member>, offset};
}

/// Whether the table accounts for every byte of the struct, in order. `padding`: bytes that belong to no field.
template <class Struct>
constexpr bool is_covered(size_t padding) {
  size_t end = 0, bytes = padding;
  for (const Field& field : StructFields<Struct>::fields) {
    if (field.offset < end) return false;
    end = field.offset + field.bytes();
    bytes += field.bytes();
  }
  return bytes == sizeof(Struct);
}

}  // namespace attn

// ATTN_FOR_EACH(MACRO, context, a, b, ...) is MACRO(context, a) MACRO(context, b) ... A macro cannot expand itself:
// each step names the next one, which the scans of ATTN_EXPAND, 64 in all, expand.
#define ATTN_EXPAND(...) ATTN_EXPAND_16(ATTN_EXPAND_16(ATTN_EXPAND_16(ATTN_EXPAND_16(__VA_ARGS__))))
#define ATTN_EXPAND_16(...) ATTN_EXPAND_4(ATTN_EXPAND_4(ATTN_EXPAND_4(ATTN_EXPAND_4(__VA_ARGS__))))
#define ATTN_EXPAND_4(...) ATTN_EXPAND_1(ATTN_EXPAND_1(ATTN_EXPAND_1(ATTN_EXPAND_1(__VA_ARGS__))))
#define ATTN_EXPAND_1(...) __VA_ARGS__
#define ATTN_FOR_EACH(MACRO, context, ...) ATTN_EXPAND(ATTN_FOR_STEP(MACRO, context, __VA_ARGS__))
#define ATTN_FOR_STEP(MACRO, context, first, ...) \
  MACRO(context, first) __VA_OPT__(ATTN_NEXT_STEP ATTN_NO_ARGUMENTS(MACRO, context, __VA_ARGS__))
#define ATTN_NEXT_STEP() ATTN_FOR_STEP
#define ATTN_NO_ARGUMENTS ()

/// The table of a struct, with the bytes that belong to no field: ATTN_STRUCT(RowLink, 0, group, index);
#define ATTN_STRUCT(Struct, padding, ...)                                               \
  template <>                                                                           \
  struct StructFields<Struct> {                                                         \
    static constexpr const char* name = #Struct;                                        \
    static constexpr Field fields[] = {ATTN_FOR_EACH(ATTN_FIELD, Struct, __VA_ARGS__)}; \
  };                                                                                    \
  static_assert(is_covered<Struct>(padding), "the table of " #Struct " lacks a field, or has them in another order")
#define ATTN_FIELD(Struct, member) make_field<decltype(Struct::member)>(#member, offsetof(Struct, member)),
