// Where the cached tokens of a (request, layer, KV head) lie: store pages, then the tail's pages.
// The flat layout of ops/torch/pages.py. Candidates of a layer lie one head after another, with
// no padding: S_old * H store pages and H times the tail's pages, a number that the host knows.
#pragma once

#include "cuda_types.h"
#include "request.h"

namespace kvevict {

struct Candidates {
  const Request* requests;    // [E]
  const int32_t* head_indptr; // [L, rows, H + 1]
  const int32_t* store;       // [rows, S] block ids, rows store_stride apart
  const int32_t* positional;  // [E, positional_width] block ids from the old tail start on
  int64_t store_stride;
  int num_rows, num_heads, positional_width, block_size;
  int block_shift;            // block_size == 1 << block_shift
};

}  // namespace kvevict
