// The part of <type_traits> that device code uses: NVRTC compiles without the headers of the standard library.
#pragma once

namespace attn {

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <bool kCondition, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

}  // namespace attn
