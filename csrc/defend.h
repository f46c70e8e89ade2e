// defend: peaks of attention and shares of value norms to scores, and shares beside the survivors.
//
// ops/reference/defensive.py, window_peaks, from the division on; ops/reference/shares.py, value_shares,
// in two launches, between which ranks may add up their totals; policies/defensive.py, the product.
#pragma once

#include "candidates.h"
#include "cuda_types.h"
#include "layers.h"

namespace kvevict {

enum class Element { kFloat, kHalf, kBFloat16, kE4M3, kE5M2 };

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
  Layers<const float> kept;  // [blocks * H, block_size] each: shares of the stores' tokens
  Candidates candidates;
  float* scores;          // flat, candidates only
  float* shares;          // likewise
  float* means;           // [E * L * H]
  const float* peaks;     // [query groups, num_peaks], sums over the neighbours
  const float* norms;     // flat, as scores
  const float* totals;    // [E, L, width]
  int64_t num_scores, num_peaks;
  int query_groups, num_layers, window, chunks, width;
};

// Shares of the survivors to where compact put them.
struct Keep {
  Layers<float> kept;
  Candidates candidates;
  const float* shares;     // flat, as scores
  const int32_t* columns;  // as compact takes them, and the three below
  const int32_t* pages;
  const int32_t* store;
  int64_t num_pages;
  int num_layers, store_width;
};

void launch_norms(const Norms& work, int num_requests, Stream stream);
void launch_defend(const Defend& work, int64_t heads, Stream stream);
void launch_keep(const Keep& work, int num_requests, Stream stream);

}  // namespace kvevict
