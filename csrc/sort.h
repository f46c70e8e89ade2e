// sort: each head's scores, highest first. One block a head, least significant byte first.
//
// A pass moves keys in order, so it is stable, and every position follows from counts alone.
#pragma once

#include "cuda_types.h"

namespace kvevict {

struct Sort {
  uint32_t* keys;         // flat, as scores: the sorted keys (csrc/ordered.h)
  uint32_t* other;        // flat: for keys on the way
  const float* scores;    // flat
  const int64_t* start;   // [rows] first score of each head
  const int32_t* length;  // [rows] scores of each head
  int64_t num_scores;
  int num_rows;
};

void launch_sort(const Sort& work, Stream stream);

}  // namespace kvevict
