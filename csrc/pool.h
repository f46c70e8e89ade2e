// pool: column sums to scores. Adds the query groups, averages, smooths along each head's columns.
//
// ops/torch/score.py, pool, and the protection of first tokens (policies/base.py).
#pragma once

#include "candidates.h"
#include "cuda_types.h"
#include "sizes.h"

namespace kvevict {

struct Pool {
  float* scores;      // flat, candidates only
  const float* sums;  // [query groups, num_sums]
  Candidates candidates;
  int64_t num_scores, num_sums;
  float factor;
  int query_groups, num_layers, window, kernel, chunks;
  bool average;
};

void launch_pool(const Pool& work, int64_t heads, Stream stream);

}  // namespace kvevict
