// defend: peaks of attention and shares of value norms to scores.
//
// ops/torch/value_shares.py in two launches, between which ranks may add up their totals;
// policies/defensive.py, the product.
#pragma once

#include "candidates.h"
#include "cuda_types.h"
#include "layers.h"
#include "numbers.h"
#include "reach.h"

namespace kvevict {

// Norms of the values of the tail's tokens, read once.
struct Norms {
  Layers<const unsigned char> caches;  // [blocks, H, block_size, slot] each
  Candidates candidates;
  float* norms;           // flat, as scores
  float* totals;          // [E, L, width]: sums over this rank's heads
  int64_t num_norms;
  Element element;
  int num_layers, slot_bytes, value_offset, value_bytes, width;
};

struct Defend {
  Layers<const float> kept;  // [blocks * H, page_tokens, stride] each: shares of the stores' tokens
  Reach reach;
  float* scores;          // flat, candidates only
  float* shares;          // likewise
  const float* norms;     // flat, as scores
  const float* totals;    // [E, L, width]
  int64_t num_scores;
  int stride, chunks, width;
};

void launch_norms(const Norms& work, int num_requests, Stream stream);
void launch_defend(const Defend& work, int64_t heads, Stream stream);

}  // namespace kvevict
