// Activation functions and their derivatives, for a result that is rounded to T: within a few ulp of one where T is
// float, and to some 2^-13 where it is narrower.
//
//   gelu          x * P(x),                 P(x) = (1 + erf(x / sqrt(2))) / 2
//   gelu_tanh     x * sigmoid(2 u),         u = sqrt(2 / pi) * (x + 0.044715 x^3)
//   silu          x * sigmoid(x),           sigmoid(v) = 1 / (1 + e^-v)
//   relu_squared  max(x, 0)^2
//
// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; Elfwing and others, "Sigmoid-weighted linear units", 2017;
// So and others, "Primer", 2021. What becomes small below zero, P and sigmoid, is found with a factor of 2^24, so that
// it has all its digits until the product with x has none.
#pragma once

#include "exponential.cuh"

namespace trtc {

enum class Function : int { gelu, gelu_tanh, silu, relu_squared };

// A part of one: `value` where it is not small; else `large` is 2^24 of it, and it is small.
struct Part {
  float value, large;
  bool is_small;

  // x times the part.
  TRTC_DEVICE float of(float x) const { return is_small ? x * large * 0x1p-24f : x * value; }
};

// Of T float, correctly rounded; else approximately, of a divisor from 2^-126 to 2^126.
template <class T>
TRTC_DEVICE float divide_for(float a, float b) {
  if constexpr (is_same<T, float>) {
    return divide(a, b);
  } else {
    return a * approximate_reciprocal(b);
  }
}

// sigmoid(v + rest) of a `rest` that is small beside v, or beside 1.
template <class T>
TRTC_DEVICE Part sigmoid(float v, float rest = 0.0f) {
  // Below -104, x e^v has no digits.
  float large = v < -104.0f || v > 104.0f ? 0.0f : large_exponential_for<T>(-magnitude(v));
  if constexpr (is_same<T, float>) large = fused_multiply_add(v < 0.0f ? rest : -rest, large, large);
  const float inverse = divide_for<T>(1.0f, fused_multiply_add(large, 0x1p-24f, 1.0f));
  const float small = large * inverse;
  return {v < 0.0f ? small * 0x1p-24f : inverse, small, v < 0.0f};
}

// 2 u of gelu_tanh: high + low. Float results have what is rounded off added up.
struct TwoFloats {
  float high, low;
};
template <class T>
TRTC_DEVICE TwoFloats doubled_u(float x) {
  const float linear = 1.59576917f, cubic = 0.0713548139f;
  const float square = x * x;
  const float factor = fused_multiply_add(cubic, square, linear);
  const float high = x * factor;
  if constexpr (!is_same<T, float>) return {high, 0.0f};
  const float term = cubic * square;
  const float rest_of_term = fused_multiply_add(cubic, square, -term) +
                             fused_multiply_add(cubic, fused_multiply_add(x, x, -square), 2.399e-9f * square);
  const float added = factor - linear;
  const float rest = (linear - (factor - added)) + (term - added) + rest_of_term - 4.534e-8f;
  const float low = fused_multiply_add(x, rest, fused_multiply_add(x, factor, -high));
  return {high, magnitude(high) < 0x1p10f ? low : 0.0f};  // beyond, nothing depends on it, and it may be infinite
}

// P of -|x| by e^(-x^2 / 2) R(|x|), where R is a polynomial in (|x| - 3) / (|x| + 3), fitted for the least relative
// error up to 15; `exponential` is 2^24 of the former. Beyond, the product has no digits.
struct Normal {
  float large;        // 2^24 P(-|x|)
  float exponential;  // 2^24 e^(-x^2 / 2)
};
template <class T>
TRTC_DEVICE Normal normal_below(float x) {
  const float t = magnitude(x) < 15.0f ? magnitude(x) : 15.0f;  // not NaN
  const float half = -0.5f * t * t;
  const float sum = t + 3.0f;
  Normal found;
  if constexpr (is_same<T, float>) {
    // What -t^2 / 2, |x| + 3 and the quotient lose by rounding is added.
    const float rest_of_half = fused_multiply_add(-0.5f * t, t, -half);
    const float large = large_exponential(half);
    found.exponential = fused_multiply_add(large, rest_of_half, large);
    const float inverse = divide(1.0f, sum);
    const float rest_of_sum = t < 3.0f ? t - (sum - 3.0f) : 3.0f - (sum - t);
    const float rest = inverse * fused_multiply_add(-inverse, rest_of_sum, fused_multiply_add(-inverse, sum, 1.0f));
    const float q = fused_multiply_add(-6.0f, inverse, 1.0f) - 6.0f * rest;
    float p = fused_multiply_add(q, 5.44891554e-05f, 0.000131330322f);
    p = fused_multiply_add(p, q, -0.000244730152f);
    p = fused_multiply_add(p, q, -0.00103257364f);
    p = fused_multiply_add(p, q, 0.00102475402f);
    p = fused_multiply_add(p, q, 0.00696931127f);
    p = fused_multiply_add(p, q, -0.0104625132f);
    p = fused_multiply_add(p, q, -0.0472626872f);
    p = fused_multiply_add(p, q, 0.230017707f);
    p = fused_multiply_add(p, q, -0.509332001f);
    p = fused_multiply_add(p, q, 0.729083717f);
    found.large = found.exponential * fused_multiply_add(p, rest, p * inverse);
  } else {
    found.exponential = large_exponential_for<T>(half);
    const float inverse = approximate_reciprocal(sum), q = fused_multiply_add(-6.0f, inverse, 1.0f);
    float p = fused_multiply_add(q, 0.00498910062f, -0.00977256708f);
    p = fused_multiply_add(p, q, -0.0463647582f);
    p = fused_multiply_add(p, q, 0.229855165f);
    p = fused_multiply_add(p, q, -0.509423375f);
    p = fused_multiply_add(p, q, 0.729090869f);
    found.large = found.exponential * p * inverse;
  }
  if (!(magnitude(x) < 15.0f)) found.large = found.exponential = 0.0f;
  return found;
}
template <class T>
TRTC_DEVICE Part normal_part(const Normal& below, float x) {
  return {x < 0.0f ? below.large * 0x1p-24f : fused_multiply_add(below.large, -0x1p-24f, 1.0f), below.large, x < 0.0f};
}

template <Function F, class T>
TRTC_DEVICE float activation(float x) {
  if constexpr (F == Function::gelu) return normal_part<T>(normal_below<T>(x), x).of(x);
  if constexpr (F == Function::gelu_tanh) {
    const TwoFloats v = doubled_u<T>(x);
    return sigmoid<T>(v.high, v.low).of(x);
  }
  if constexpr (F == Function::silu) return sigmoid<T>(x).of(x);
  return x < 0.0f ? 0.0f : x * x;  // not NaN
}

// The function and its derivative.
struct Slope {
  float value, derivative;
};
template <Function F, class T>
TRTC_DEVICE Slope activation_slope(float x) {
  if constexpr (F == Function::gelu) {
    const Normal below = normal_below<T>(x);
    const Part part = normal_part<T>(below, x);
    // x / sqrt(2 pi) e^(-x^2 / 2)
    const float density = x * (0.398942280f * below.exponential);
    const float derivative =
        part.is_small ? (part.large + density) * 0x1p-24f : fused_multiply_add(density, 0x1p-24f, part.value);
    return {part.of(x), derivative};
  }
  if constexpr (F == Function::relu_squared) return {x < 0.0f ? 0.0f : x * x, x < 0.0f ? 0.0f : 2.0f * x};
  const TwoFloats v = F == Function::silu ? TwoFloats{x, 0.0f} : doubled_u<T>(x);
  const Part part = sigmoid<T>(v.high, v.low);
  // sigmoid(v) (1 + x v' sigmoid(-v))
  const float other = sigmoid<T>(-v.high, -v.low).value;
  const float inner = F == Function::silu ? x : x * fused_multiply_add(0.214064442f * x, x, 1.59576917f);
  const float factor = other == 0.0f ? 1.0f : fused_multiply_add(inner, other, 1.0f);
  // Far below zero, where the factor may be infinite, nothing is left.
  return {part.of(x), part.is_small && part.large == 0.0f ? 0.0f : part.of(factor)};
}

}  // namespace trtc
