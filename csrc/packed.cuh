// A token of a packed store in a warp: lane l has the dimensions l, l + 32, ... of its key or value.
#pragma once

#include "device.h"
#include "numbers.h"
#include "packed.h"

namespace kvevict {

// 1 over the root of the rotation's blocks.
constexpr float rotation_scale(int head_size) {
  float scale = 1;
  for (int size = rotation_block(head_size); size > 1; size /= 4) {
    scale *= size == 2 ? 0.70710678118654752f : 0.5f;
  }
  return scale;
}

// What device code may name.
template <int D>
constexpr int kEach = (D + kWarp - 1) / kWarp;
template <int D>
constexpr int kScaleGroups = scale_groups(D);
template <int D>
constexpr int kRotationBlock = rotation_block(D);
template <int D>
constexpr float kRotationScale = rotation_scale(D);

// Products with Hadamard matrices along the diagonal, not normalised. They are their own transposes.
template <int D>
__device__ inline void hadamard(float (&x)[kEach<D>]) {
  constexpr int kBlock = kRotationBlock<D>;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kBlock && step < kWarp; step *= 2) {
#pragma unroll
    for (int i = 0; i < kEach<D>; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int step = 1; step * kWarp < kBlock; step *= 2) {
#pragma unroll
    for (int i = 0; i < kEach<D>; ++i) {
      if (i & step) continue;
      const float low = x[i], high = x[i + step];
      x[i] = low + high;
      x[i + step] = low - high;
    }
  }
}

__device__ inline float signed_by(const Packed& format, int dimension, float value) {
  return format.signs[dimension / kWarp] >> dimension % kWarp & 1 ? -value : value;
}

// x times the transpose of the rotation, as stores hold it.
template <int D>
__device__ inline void rotate(const Packed& format, float (&x)[kEach<D>]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kEach<D>; ++i) x[i] = signed_by(format, i * kWarp + lane, x[i]);
  hadamard<D>(x);
#pragma unroll
  for (int i = 0; i < kEach<D>; ++i) x[i] *= kRotationScale<D>;
}

// The centre of a dimension of a head's keys, without which they are stored.
template <int D>
__device__ inline float centre_of(const Packed& format, int layer, int num_heads, int head, int d) {
  return format.centres[(static_cast<int64_t>(layer) * num_heads + head) * D + d];
}

// x times the rotation: what rotate() was given.
template <int D>
__device__ inline void rotate_back(const Packed& format, float (&x)[kEach<D>]) {
  const int lane = threadIdx.x % kWarp;
  hadamard<D>(x);
#pragma unroll
  for (int i = 0; i < kEach<D>; ++i) {
    x[i] = signed_by(format, i * kWarp + lane, x[i] * kRotationScale<D>);
  }
}

// The nearest number of a format, ties to even.
__device__ inline void set_rounded(float value, Half* out) { out->bits = half_bits(value); }
__device__ inline void set_rounded(float value, float* out) { *out = value; }
__device__ inline void set_rounded(float value, BFloat16* out) {
  const uint32_t word = __float_as_uint(value);
  const bool number = (word & 0x7fffffffu) <= 0x7f800000u;
  out->bits = static_cast<uint16_t>(number ? (word + 0x7fffu + (word >> 16 & 1)) >> 16 : 0x7fc0u);
}

// The level of an element by 1 over its scale, 0 for no number.
__device__ inline float level_of(float value, float inverse, float middle) {
  const float level = rintf(value * inverse + middle);
  if (!(level > 0)) return 0;
  return level > 2 * middle ? 2 * middle : level;
}

// Levels and scales of a rotated key or value; every lane gets the scales. Keys get the scale with the
// least squared error, values the one that leaves the product with the original as it is.
template <int D, bool kValues>
__device__ inline void quantise(const float (&x)[kEach<D>], int bits, const float (&factors)[kClips],
                                uint32_t (&levels)[kEach<D>], uint16_t (&scales)[kScaleGroups<D>]) {
  constexpr int kGroups = kScaleGroups<D>, kOfGroup = kEach<D> / kGroups;
  const int lane = threadIdx.x % kWarp;
  const float middle = static_cast<float>((1 << bits) - 1) / 2;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float largest = 0;
#pragma unroll
    for (int i = group * kOfGroup; i < (group + 1) * kOfGroup; ++i) {
      if (i * kWarp + lane < D) largest = nan_max(fabsf(x[i]), largest);
    }
    for (int step = 1; step < kWarp; step *= 2) {
      largest = nan_max(__shfl_xor_sync(kAllLanes, largest, step), largest);
    }
    float best = 0, least = 0;
    for (int clip = 0; clip < kClips; ++clip) {
      float scale = half_to_float(half_bits(largest * factors[clip]));
      // The least scale keeps a group of zeros from a division by 0.
      scale = scale < 0x1p-24f ? 0x1p-24f : scale;
      // One division for all elements: 56 of them would be most of the kernel's instructions.
      const float inverse = 1.0f / scale;
      float error = 0;
#pragma unroll
      for (int i = group * kOfGroup; i < (group + 1) * kOfGroup; ++i) {
        const float off = (level_of(x[i], inverse, middle) - middle) * scale - x[i];
        if (i * kWarp + lane < D) error += off * off;
      }
      for (int step = 1; step < kWarp; step *= 2) error += __shfl_xor_sync(kAllLanes, error, step);
      if (clip == 0 || error < least) {
        best = scale;
        least = error;
      }
    }
    const float inverse = 1.0f / best;
    float common = 0, square = 0;
#pragma unroll
    for (int i = group * kOfGroup; i < (group + 1) * kOfGroup; ++i) {
      const float level = level_of(x[i], inverse, middle);
      levels[i] = static_cast<uint32_t>(level);
      if (i * kWarp + lane >= D) continue;
      common += x[i] * (level - middle);
      square += kValues ? x[i] * x[i] : (level - middle) * (level - middle);
    }
    for (int step = 1; step < kWarp; step *= 2) {
      common += __shfl_xor_sync(kAllLanes, common, step);
      square += __shfl_xor_sync(kAllLanes, square, step);
    }
    if (kValues) {
      // A group of zeros has no such scale.
      if (common > 0) best = square / common;
    } else {
      best = common / square;
    }
    scales[group] = half_bits(best < 0x1p-24f ? 0x1p-24f : best);
  }
}

}  // namespace kvevict
