// How a warp reads keys and takes their rotation out.
#pragma once

#include "device.h"
#include "fp8.cuh"
#include "head.cuh"
#include "tail_keys.h"

namespace kvevict {

// The numbers of a word.
template <Element kElement>
__device__ inline void widen(uint32_t word, float* numbers) {
#pragma unroll
  for (int i = 0; i < kInWord<kElement>; ++i) {
    if constexpr (kElement == Element::kFloat) {
      numbers[i] = __uint_as_float(word);
    } else if constexpr (kElement == Element::kHalf) {
      numbers[i] = half_to_float(static_cast<uint16_t>(word >> 16 * i));
    } else if constexpr (kElement == Element::kBFloat16) {
      numbers[i] = __uint_as_float(word >> 16 * i << 16);
    } else if constexpr (kElement == Element::kE4M3) {
      numbers[i] = from_e4m3(word >> 8 * i & 0xffu);
    } else {
      numbers[i] = from_e5m2(word >> 8 * i & 0xffu);
    }
  }
}

// Cosine and sine that turn a pair of dimensions back, over the square of what the model's rotary
// module scales lengths by.
__device__ inline float2 find_turn(const TailKeys& keys, const unsigned char* rotary, int64_t position,
                                   int pair) {
  const int64_t at = position * 2 * keys.pairs + pair;
  float cosine, sine;
  // Both loads before either is used.
  if (keys.angle == Element::kFloat) {
    cosine = reinterpret_cast<const float*>(rotary)[at];
    sine = reinterpret_cast<const float*>(rotary)[at + keys.pairs];
  } else {
    const uint16_t low = reinterpret_cast<const uint16_t*>(rotary)[at];
    const uint16_t high = reinterpret_cast<const uint16_t*>(rotary)[at + keys.pairs];
    const bool half = keys.angle == Element::kHalf;
    cosine = half ? half_to_float(low) : __uint_as_float(static_cast<uint32_t>(low) << 16);
    sine = half ? half_to_float(high) : __uint_as_float(static_cast<uint32_t>(high) << 16);
  }
  const float scale = 1.0f / (cosine * cosine + sine * sine);
  return make_float2(cosine * scale, sine * scale);
}

// The pairs of dimensions that a lane takes at once: as many as a word has numbers. They are two
// words where pairs lie side by side, or one of each half of the rotated part.
struct Pairs {
  int first, apart;  // the first pair, and how far the halves of a pair lie apart if `split`
  int low, high;     // bytes of a key where the words begin
  bool turned, split;

  __device__ int dimension(int i) const { return split ? first + i : 2 * (first + i); }
  __device__ int other(int i) const { return split ? first + i + apart : 2 * (first + i) + 1; }
};

template <Element kElement>
__device__ inline Pairs find_pairs(const TailKeys& keys, bool rotated, int unit) {
  constexpr int kPairs = kInWord<kElement>, kBytes = 4 / kPairs;
  Pairs found;
  found.first = unit * kPairs;
  found.apart = keys.pairs;
  found.turned = rotated && found.first < keys.pairs;
  found.split = found.turned && !keys.interleaved;
  found.low = found.split ? unit * 4 : unit * 8;
  found.high = found.split ? found.low + keys.pairs * kBytes : found.low + 4;
  return found;
}

// The i-th pair of two words' numbers, its rotation taken out.
template <int kPairs>
__device__ inline float2 turned_back(const float (&numbers)[2 * kPairs], const Pairs& pairs, int i,
                                     float2 turn) {
  const float x = pairs.split ? numbers[i] : numbers[2 * i];
  const float y = pairs.split ? numbers[kPairs + i] : numbers[2 * i + 1];
  // As it is where it is not turned: infinity times 0 would be no number.
  if (!pairs.turned) return make_float2(x, y);
  return make_float2(x * turn.x + y * turn.y, y * turn.x - x * turn.y);
}

}  // namespace kvevict
