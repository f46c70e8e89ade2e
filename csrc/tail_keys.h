// The keys of a tail's tokens, and what takes their rotation out: what the kernels of probe read.
#pragma once

#include "candidates.h"
#include "cuda_types.h"
#include "layers.h"
#include "numbers.h"

namespace kvevict {

struct TailKeys {
  Layers<const unsigned char> caches;  // [blocks, H, block_size, slot] each
  Layers<const unsigned char> rotary;  // [positions, 2 * pairs] each, cosines first; null: not rotated
  Candidates candidates;
  int64_t num_positions;
  Element element, angle;  // of the caches, and of cosines and sines
  int head_size, pairs, num_layers, slot_bytes, width;
  bool interleaved;        // pairs are (2i, 2i + 1), else (i, i + pairs)
};

}  // namespace kvevict
