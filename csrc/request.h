// One due eviction, as the host knows it. vllm_kvevict/ops/cuda/batch.py writes the table.
#pragma once

#include <cstdint>

namespace kvevict {

// A row of `requests` [E, 11] int64.
struct Request {
  int64_t row;               // of the state tables head_indptr and store
  int64_t ring;              // slot with the queries of the last w tokens
  int64_t num_tokens;        // n
  int64_t old_tail_start;    // T of the last eviction in tokens, 0 for none
  int64_t tail_start;        // T of this one
  int64_t old_store_blocks;  // S of the last one, 0 for none
  int64_t store_blocks;      // S of this one
  int64_t protect_first;     // tokens that stay whatever their score
  int64_t first_column;      // of its scores in the flat buffer of all requests
  int64_t first_sum;         // of its column sums, likewise
  int64_t first_kept;        // of its kept columns, likewise
};

constexpr int kRequestFields = sizeof(Request) / sizeof(int64_t);

}  // namespace kvevict
