// keep: numbers beside the survivors, where compact put those.
//
// worker/eviction.py writes the same after the PyTorch operations.
#pragma once

#include "candidates.h"
#include "cuda_types.h"
#include "layers.h"

namespace kvevict {

struct Keep {
  Layers<float> kept;  // [blocks * H, page_tokens, stride] each
  Candidates candidates;
  const float* numbers;    // [channels, num_numbers] flat, as scores
  const int32_t* columns;  // as compact takes them, and the three below
  const int32_t* pages;
  const int32_t* store;
  int64_t num_numbers, num_pages;
  int channels, stride, num_layers, store_width;
};

void launch_keep(const Keep& work, int num_requests, Stream stream);

}  // namespace kvevict
