// page table: one sequence per (request, KV head), all layers in one launch.
//
// ops/reference/pages.py, head_page_table, on rows of the state tables. Graph-safe: every size but the
// bounds comes from tensors at fixed addresses. A request with tail start 0 is not evicted and has
// its positional blocks alone; a row of -1 is padding and has no tokens.
#pragma once

#include "cuda_types.h"

namespace kvevict {

struct PageTable {
  int32_t* table;              // [L, R * H, width]
  int32_t* lengths;            // [L, R * H]
  const int32_t* head_indptr;  // [L, rows, H + 1]
  const int32_t* store;        // [rows, store_width], rows store_stride apart
  const int32_t* tail_start;   // [rows]
  const int32_t* rows;         // [R]
  const int32_t* seq_lens;     // [R]
  const int32_t* block_table;  // [R, blocks], rows block_stride apart
  int64_t store_stride, block_stride;
  int num_rows, num_layers, num_requests, num_heads, store_width, num_blocks, width, block_size;
};

void launch_page_table(const PageTable& work, Stream stream);

}  // namespace kvevict
