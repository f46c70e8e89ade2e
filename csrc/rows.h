// rows: where the candidates of each head lie in the flat scores, and where survivors go.
//
// What allocate and select ask for, from the state before the eviction; EvictionBatch has the layout.
#pragma once

#include "candidates.h"
#include "cuda_types.h"

namespace kvevict {

struct Rows {
  int64_t* start;         // [E, L, H] first score of a head
  int32_t* length;        // [E, L, H] its scores
  int32_t* caps;          // [E, L, H] pages of them
  int64_t* first_kept;    // [E, L] first kept column of a layer
  int32_t* store_blocks;  // [E, L] S
  Candidates candidates;
  int64_t num_heads;      // of all requests and layers
  int num_layers;
};

void launch_rows(const Rows& work, Stream stream);

}  // namespace kvevict
