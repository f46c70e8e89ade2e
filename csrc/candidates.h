// Where the cached tokens of a (request, layer, KV head) lie: store pages, then the tail's pages.
// The flat layout of ops/torch/pages.py. Candidates of a layer lie one head after another, with
// no padding: S_old * H store pages and H times the tail's pages, a number that the host knows.
// A store's page holds page_tokens of them, others block_size (ops/token_format.py).
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
  int page_tokens;
  uint32_t page_inverse;      // inverse_of(page_tokens)
};

// The factor by which page_of divides: the high word of a product is the quotient.
constexpr uint32_t inverse_of(int page_tokens) {
  return static_cast<uint32_t>(((int64_t{1} << 32) + page_tokens - 1) / page_tokens);
}

}  // namespace kvevict
