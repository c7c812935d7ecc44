// Functions whose arguments Python gives by name (attn_backend/kernels/native.py). A list of types and names makes
// a struct, and the table of names and their order that both sides use.
#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace attn {

using tvm::ffi::AnyView;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

/// One argument, of type T.
template <class T>
struct Argument {
  const char* name;
};

/// The requirement of a type, for messages.
template <class T>
constexpr const char* kMustBe = nullptr;
template <>
inline constexpr const char* kMustBe<bool> = "True or False";
template <>
inline constexpr const char* kMustBe<int64_t> = "an int that an int64 holds";
template <>
inline constexpr const char* kMustBe<double> = "a number";
template <>
inline constexpr const char* kMustBe<TensorView> = "a tensor";
template <>
inline constexpr const char* kMustBe<tvm::ffi::String> = "a string";
template <>
inline constexpr const char* kMustBe<tvm::ffi::Bytes> = "bytes";
template <class T>
inline constexpr const char* kMustBe<Optional<T>> = kMustBe<T>;
template <class T>
constexpr const char* kOrNone = "";
template <class T>
inline constexpr const char* kOrNone<Optional<T>> = " or None";

template <class T>
T read_argument(const char* name, const AnyView& value) {
  if constexpr (std::is_same_v<T, AnyView>) {
    return value;
  } else {
    std::optional<T> read = value.try_cast<T>();
    if (!read)
      TVM_FFI_THROW(TypeError) << name << " is of type " << value.GetTypeKey() << ", must be "
                               << kMustBe<T> << kOrNone<T>;
    return *std::move(read);
  }
}

/// Arguments after the last value are None.
template <class Struct, class... T, size_t... kIndex>
Struct read_arguments(const std::tuple<Argument<T>...>& table, std::index_sequence<kIndex...>, const AnyView* values,
                      size_t count) {
  return Struct{read_argument<T>(std::get<kIndex>(table).name, kIndex < count ? values[kIndex] : AnyView())...};
}

/// Calls `function`, which takes a struct, with what Python gave.
template <class Struct, class Result>
void call_by_name(Result (*function)(const Struct&), const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {
  constexpr auto& table = Struct::arguments;
  constexpr size_t kCount = std::tuple_size_v<std::remove_reference_t<decltype(table)>>;
  if (static_cast<size_t>(count) > kCount) TVM_FFI_THROW(TypeError) << count << " arguments for " << kCount;
  const Struct arguments = read_arguments<Struct>(table, std::make_index_sequence<kCount>{},
                                                  reinterpret_cast<const AnyView*>(values), static_cast<size_t>(count));
  if constexpr (std::is_void_v<Result>) {
    function(arguments);
  } else {
    *reinterpret_cast<tvm::ffi::Any*>(result) = function(arguments);
  }
}

template <class Struct>
tvm::ffi::Array<tvm::ffi::String> names_of() {
  return std::apply([](const auto&... argument) { return tvm::ffi::Array<tvm::ffi::String>{argument.name...}; },
                    Struct::arguments);
}

}  // namespace attn

/// The struct and its table, from a list of arguments:
///     #define SCALING(ARGUMENT) ARGUMENT(TensorView, values) ARGUMENT(double, factor)
///     ATTN_ARGUMENTS(Scaling, SCALING);
#define ATTN_ARGUMENTS(Struct, LIST)                                  \
  struct Struct {                                                     \
    LIST(ATTN_MEMBER)                                                 \
    static constexpr std::tuple arguments = {LIST(ATTN_TABLE_ENTRY)}; \
  }
#define ATTN_MEMBER(type, name) type name;
#define ATTN_TABLE_ENTRY(type, name) Argument<type>{#name},

/// Exports attn::name, which takes a Struct, and the names in its table as `name`_arguments.
#define ATTN_EXPORT_BY_NAME(name, Struct)                                                           \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* values, int32_t count, \
                                                     TVMFFIAny* result) {                           \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                      \
    attn::call_by_name<attn::Struct>(attn::name, values, count, result);                            \
    TVM_FFI_SAFE_CALL_END();                                                                        \
  }                                                                                                 \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name##_arguments, attn::names_of<attn::Struct>)
