// What is used of <type_traits> in device code, which NVRTC compiles without the headers of the standard library.
#pragma once

namespace attn {

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

}  // namespace attn
