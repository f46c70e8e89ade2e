// FP8 to other formats, bit by bit: exact, and the same on every GPU.
#pragma once

#include "device.h"
#include "numbers.h"

namespace kvevict {

__device__ inline float from_e4m3(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fc00000u);
  // As a float32 with these exponent bits the value is 2^120 too small, subnormals included.
  const float value = __uint_as_float(magnitude << 20) * 0x1p120f;
  return byte & 0x80u ? -value : value;
}

__device__ inline float from_e5m2(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7fu;
  float value = __uint_as_float(magnitude << 21) * 0x1p112f;
  if (magnitude >= 0x7cu) value = __uint_as_float(magnitude == 0x7cu ? 0x7f800000u : 0x7fc00000u);
  return byte & 0x80u ? -value : value;
}

// FP8 values are exact in every one of these.
__device__ inline void set_exact(float value, Half* out) { out->bits = half_bits(value); }
__device__ inline void set_exact(float value, float* out) { *out = value; }
__device__ inline void set_exact(float value, BFloat16* out) {
  out->bits = static_cast<uint16_t>(__float_as_uint(value) >> 16);
}

}  // namespace kvevict
