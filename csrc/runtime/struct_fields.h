// Tables of the fields of structs, for those who fill and read them from Python (attn_backend/kernels/native.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace attn {

/// One field of a struct, or bytes between two fields.
struct Field {
  const char* name;  // nullptr: padding
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

/// Bytes between two fields, or after the last, that belong to none.
constexpr Field padding(size_t bytes) { return Field{nullptr, nullptr, bytes, 0, 0}; }

/// Whether the table accounts for every byte of the struct.
template <class Struct>
constexpr bool is_covered() {
  size_t end = 0;
  for (const Field& field : StructFields<Struct>::fields) {
    if (field.name != nullptr && field.offset != end) return false;
    end += field.bytes();
  }
  return end == sizeof(Struct);
}

}  // namespace attn

/// The table of a struct: ATTN_STRUCT(RowLink, ATTN_FIELD(group), ATTN_FIELD(index));
#define ATTN_STRUCT(Struct, ...)                     \
  template <>                                        \
  struct StructFields<Struct> {                      \
    using Self = Struct;                             \
    static constexpr const char* name = #Struct;     \
    static constexpr Field fields[] = {__VA_ARGS__}; \
  };                                                 \
  static_assert(is_covered<Struct>(), "the table of " #Struct " lacks a field, or has them in another order")
#define ATTN_FIELD(member) make_field<decltype(Self::member)>(#member, offsetof(Self, member))
