// SPDX-License-Identifier: Apache-2.0
// Activation functions and their derivatives, as floats that are rounded to T.
//
//   gelu          x * P(x),                 P(x) = (1 + erf(x / sqrt(2))) / 2
//   gelu_tanh     x * sigmoid(v),           v = 2 sqrt(2 / pi) * (x + 0.044715 x^3)
//   silu          x * sigmoid(x),           sigmoid(v) = 1 / (1 + e^-v)
//   relu_squared  max(x, 0)^2
//
// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; Elfwing and others, "Sigmoid-weighted linear units", 2017;
// So and others, "Primer", 2021. For a T of float they are within a few ulp; for a narrower one within 2^-13, and the
// terms of a derivative within 2^-12, by half as many instructions: the memory leaves no time for more. What becomes
// small below zero, P and sigmoid, is found with a factor of 2^24 or 2^12: it has all its digits until the product with
// x has none.
#pragma once

#include "exponential.cuh"

namespace trtc {

enum class Function : int { gelu, gelu_tanh, silu, relu_squared };

// The function and its derivative.
struct Slope {
  float value, derivative;
};

constexpr TRTC_DEVICE float linear_of_v() { return 1.59576917f; }    // 2 sqrt(2 / pi)
constexpr TRTC_DEVICE float cubic_of_v() { return 0.0713548139f; }   // that times 0.044715
constexpr TRTC_DEVICE float density_of_0() { return 0.398942280f; }  // 1 / sqrt(2 pi)

// The nearest number to x in [-most, most]; NaN stays NaN.
TRTC_DEVICE float clamped(float x, float most) { return -larger_or_nan(-larger_or_nan(x, -most), -most); }

// ---- For a narrow T -------------------------------------------------------------------------------------------------

// 2^-24 R(t) of P(-t) = e^(-t^2 / 2) R(t). R is a polynomial in 1 / (t + 4), fitted for the least relative error up to
// 14.6, where the product is 0.
TRTC_DEVICE float narrow_ratio(float t) {
  const float inverse = approximate_reciprocal(t + 4.0f);
  float p = fused_multiply_add(inverse, 0x1p-24f * 254.890137f, 0x1p-24f * -31.7400093f);
  p = fused_multiply_add(p, inverse, 0x1p-24f * 12.8852377f);
  p = fused_multiply_add(p, inverse, 0x1p-24f * 1.12357998f);
  p = fused_multiply_add(p, inverse, 0x1p-24f * 0.414939582f);
  return fused_multiply_add(p, inverse, 0x1p-24f * -0.000208903017f);
}

// 2^24 e^(-x^2 / 2).
TRTC_DEVICE float narrow_bell(float x) { return approximate_exp2(fused_multiply_add(x * x, -0.5f * log2_e(), 24.0f)); }

// 2^12 sigmoid(v) of v = x * slope: it has all its digits from v = -95 on.
TRTC_DEVICE float narrow_sigmoid(float x, float slope) {
  return approximate_reciprocal(approximate_exp2(fused_multiply_add(x, -log2_e() * slope, -12.0f)) + 0x1p-12f);
}

template <Function F>
TRTC_DEVICE float narrow_activation(float x) {
  if constexpr (F == Function::relu_squared) {
    const float positive = larger_or_nan(x, 0.0f);
    return positive * positive;
  } else if constexpr (F == Function::gelu) {
    // max(x, 0) - |x| P(-|x|)
    const float t = larger(-magnitude(x), -30.0f);
    return fused_multiply_add(narrow_bell(t) * t, narrow_ratio(-t), larger_or_nan(x, 0.0f));
  } else {
    const float slope = F == Function::silu ? 1.0f : fused_multiply_add(cubic_of_v(), x * x, linear_of_v());
    return 0x1p-12f * x * narrow_sigmoid(x, slope);
  }
}

template <Function F>
TRTC_DEVICE Slope narrow_slope(float x) {
  if constexpr (F == Function::relu_squared) {
    const float positive = larger_or_nan(x, 0.0f);
    return {positive * positive, 2.0f * positive};
  } else if constexpr (F == Function::gelu) {
    // The step from 0 to 1, and e^(-x^2 / 2) (x / sqrt(2 pi) - R(|x|)) above zero, or with + below.
    const float near = clamped(x, 30.0f), bell = narrow_bell(near), ratio = narrow_ratio(magnitude(near));
    const bool is_below = bits_from_float(x) >> 31 != 0;
    const float factor = fused_multiply_add(near, 0x1p-24f * density_of_0(), is_below ? ratio : -ratio);
    const float value = fused_multiply_add(-magnitude(near) * bell, ratio, larger_or_nan(x, 0.0f));
    return {value, fused_multiply_add(bell, factor, is_below ? 0.0f : 1.0f)};
  } else {
    // sigmoid(v) (1 + x v' (1 - sigmoid(v))), which is 0 or 1 from `near` on.
    const float near = clamped(x, F == Function::silu ? 200.0f : 30.0f), square = near * near;
    const float slope = F == Function::silu ? 1.0f : fused_multiply_add(cubic_of_v(), square, linear_of_v());
    const float steep = F == Function::silu ? 1.0f : fused_multiply_add(3.0f * cubic_of_v(), square, linear_of_v());
    const float large = narrow_sigmoid(near, slope), other = fused_multiply_add(-0x1p-12f, large, 1.0f);
    return {0x1p-12f * x * large, 0x1p-12f * large * fused_multiply_add(near * steep, other, 1.0f)};
  }
}

// ---- For float ------------------------------------------------------------------------------------------------------

// 1 / value, of a value from 1 to 2^24.
TRTC_DEVICE float reciprocal(float value) {
  const float near = approximate_reciprocal(value);
  return fused_multiply_add(near, fused_multiply_add(-value, near, 1.0f), near);
}

// v of a sigmoid, in two parts: the low one has most of what rounding takes from the other.
struct Argument {
  float high, low;
};
template <Function F>
TRTC_DEVICE Argument argument_of(float x) {
  if constexpr (F == Function::silu) return {x, 0.0f};
  const float square = x * x, slope = fused_multiply_add(cubic_of_v(), square, linear_of_v()), high = x * slope;
  const float low =
      fused_multiply_add(x * cubic_of_v(), fused_multiply_add(x, x, -square), fused_multiply_add(x, slope, -high));
  return {high, magnitude(high) < 200.0f ? low : 0.0f};  // beyond, it may be no number, and does not count
}

// sigmoid(v), and sigmoid(-v). `large` is 2^24 sigmoid(v) below zero, where the value may lose digits.
struct Sigmoid {
  float value, other, large;
  bool is_below;

  // x sigmoid(v).
  TRTC_DEVICE float times(float x) const { return is_below ? x * large * 0x1p-24f : x * value; }
};
TRTC_DEVICE Sigmoid sigmoid(Argument argument) {
  const float v = argument.high;
  // Below -104, x e^v has no digits.
  float small = v < -104.0f || v > 104.0f ? 0.0f : large_exponential(-magnitude(v));
  small = fused_multiply_add(v < 0.0f ? argument.low : -argument.low, small, small);
  const float inverse = reciprocal(fused_multiply_add(small, 0x1p-24f, 1.0f)), large = small * inverse;
  const float rest = large * 0x1p-24f;
  return v < 0.0f ? Sigmoid{rest, inverse, large, true} : Sigmoid{inverse, rest, large, false};
}

// Of |x|, or 15 where that is less: P(-|x|) by e^(-x^2 / 2) R(|x|), where R is a polynomial in (|x| - 3) / (|x| + 3),
// fitted for the least relative error up to 15; beyond, nothing is left of the product.
struct Normal {
  float t;
  float large;        // 2^24 P(-t)
  float exponential;  // 2^24 e^(-t^2 / 2)
};
TRTC_DEVICE Normal normal_below(float x) {
  const float t = -larger(-magnitude(x), -15.0f), sum = t + 3.0f;
  const float exponential = large_exponential(-0.5f * t * t);
  // What rounding takes from |x| + 3 and from the quotient is added.
  const float inverse = reciprocal(sum);
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
  return {t, exponential * fused_multiply_add(p, rest, p * inverse), exponential};
}
// max(x, 0) - |x| P(-|x|)
TRTC_DEVICE float gelu_of(const Normal& below, float x) {
  return fused_multiply_add(-below.t * below.large, 0x1p-24f, larger_or_nan(x, 0.0f));
}

template <Function F, class T>
TRTC_DEVICE float activation(float x) {
  if constexpr (!is_same<T, float> || F == Function::relu_squared) {
    return narrow_activation<F>(x);
  } else if constexpr (F == Function::gelu) {
    return gelu_of(normal_below(x), x);
  } else {
    return sigmoid(argument_of<F>(x)).times(x);
  }
}

template <Function F, class T>
TRTC_DEVICE Slope activation_slope(float x) {
  if constexpr (!is_same<T, float> || F == Function::relu_squared) {
    return narrow_slope<F>(x);
  } else if constexpr (F == Function::gelu) {
    // P(x) + x / sqrt(2 pi) e^(-x^2 / 2)
    const Normal below = normal_below(x);
    const float near = clamped(x, 15.0f);
    const bool is_below = bits_from_float(x) >> 31 != 0;
    const float density = near * (density_of_0() * below.exponential);
    const float part = density + (is_below ? below.large : -below.large);
    return {gelu_of(below, x), fused_multiply_add(part, 0x1p-24f, is_below ? 0.0f : 1.0f)};
  } else {
    // sigmoid(v) (1 + x v' sigmoid(-v)), which is 0 or 1 from `near` on.
    const float near = clamped(x, F == Function::silu ? 200.0f : 30.0f);
    const float steep =
        F == Function::silu ? 1.0f : fused_multiply_add(3.0f * cubic_of_v() * near, near, linear_of_v());
    const Sigmoid of = sigmoid(argument_of<F>(near));
    return {of.times(x), of.times(fused_multiply_add(near * steep, of.other, 1.0f))};
  }
}

}  // namespace trtc
