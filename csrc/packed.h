// Stored tokens in few bits: PackedFormat of ops/token_format.py, as kernels read and write it.
//
// A store's page consists of planes: the bytes of all its tokens' keys and values, each one byte for a
// dimension, or one byte for both; then their scales, keys' groups before values' groups, in float16.
#pragma once

#include <cstdint>

namespace kvevict {

constexpr int kScaleGroup = 64;  // most dimensions of a scale, where they divide the head
constexpr int kClips = 6;        // scales that are tried for each group

// Factors of the largest element of a group.
constexpr double kClipFactors[kClips] = {1.0, 0.93, 0.86, 0.79, 0.72, 0.65};

constexpr int scale_groups(int head_size) {
  return head_size % kScaleGroup == 0 ? head_size / kScaleGroup : 1;
}

// Hadamard matrices of this size lie along the diagonal of the rotation.
constexpr int rotation_block(int head_size) { return head_size & -head_size; }

struct Packed {
  int key_bits, value_bits;  // 0 where stores are as all other pages
  int value_plane;           // bytes of a page before the codes of values: 0 where they share those of keys
  int scale_plane;           // bytes of a page before the scales
  int used_bytes;            // of a page
  float factors[2][kClips];  // of keys, of values: from the largest element to a scale
  uint32_t signs[8];         // a bit for each dimension that the rotation multiplies by -1
  const float* centres;      // [L, H, D]: keys are stored without them
};

// From the first page of a cache's bytes on.
inline Packed packed_format(int page_tokens, int head_size, int key_bits, int value_bits) {
  Packed format{};
  const bool joint = key_bits + value_bits <= 8;
  const int codes = page_tokens * head_size;
  format.key_bits = key_bits;
  format.value_bits = value_bits;
  format.value_plane = joint ? 0 : codes;
  format.scale_plane = joint ? codes : 2 * codes;
  format.used_bytes = format.scale_plane + page_tokens * 4 * scale_groups(head_size);
  for (int i = 0; i < kClips; ++i) {
    format.factors[0][i] = static_cast<float>(kClipFactors[i] / (((1 << key_bits) - 1) / 2.0));
    format.factors[1][i] = static_cast<float>(kClipFactors[i] / (((1 << value_bits) - 1) / 2.0));
  }
  return format;
}

}  // namespace kvevict
