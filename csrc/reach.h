// reach: the highest peak of a token's neighbours, and the mean of a head's, below which no token is.
//
// ops/torch/defensive.py, window_peaks, from the division on.
#pragma once

#include "candidates.h"
#include "cuda_types.h"

namespace kvevict {

struct Reach {
  Candidates candidates;
  float* means;        // [E * L * H]
  const float* peaks;  // [query groups, num_peaks], sums over the neighbours
  int64_t num_peaks;
  int query_groups, num_layers, window;
};

// Means of all heads; `heads` of all requests and layers.
void launch_means(const Reach& work, int64_t heads, Stream stream);

}  // namespace kvevict
