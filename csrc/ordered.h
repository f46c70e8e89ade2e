// Floating-point numbers as unsigned integers that order the same way: smallest first, -0 as 0, every
// NaN alike and above infinity, which is where torch's sort puts it.
#pragma once

#include "device.h"

namespace kvevict {

__device__ inline uint32_t ordered(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float from_ordered(uint32_t key) {
  if (key == 0xffffffffu) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Not for NaN.
__device__ inline uint64_t ordered(double value) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(value == 0.0 ? 0.0 : value));
  const uint64_t sign = uint64_t{1} << 63;
  return bits & sign ? ~bits : bits | sign;
}

}  // namespace kvevict
