// select: columns of the best scores of each head, ascending; ties to the lower column.
//
// ops/torch/select.py. A block works on one head: four passes find the score of the last kept
// token, a fifth writes the columns. Nothing depends on the order in which threads run.
#pragma once

#include "cuda_types.h"

namespace kvevict {

struct Select {
  int32_t* columns;           // kept columns, flat
  const float* scores;        // flat
  const int64_t* start;       // [groups * H] first score of each head
  const int32_t* length;      // [groups * H] scores of each head
  const int32_t* pages;       // [groups * H] pages each head keeps
  const int64_t* first_kept;  // [groups] where each group's kept columns begin
  int64_t num_scores, num_columns;
  int num_groups, num_heads, page_tokens;
};

void launch_select(const Select& work, Stream stream);

}  // namespace kvevict
