// The kernel of page_table.h.
#pragma once

#include "device.h"
#include "page_table.h"

namespace kvevict {

constexpr int kPageTableThreads = 128;

// A block writes one row of the table.
static __global__ void page_table_kernel(const __grid_constant__ PageTable work) {
  const int heads = work.num_heads;
  const int sequence = blockIdx.x % (work.num_requests * heads);
  const int layer = blockIdx.x / (work.num_requests * heads);
  const int request = sequence / heads, head = sequence % heads;
  const int row = work.rows[request];
  KVEVICT_ASSERT(row < work.num_rows);
  int first = 0, pages = 0, tail_start = 0, tail_tokens = 0;
  if (row >= 0) {
    tail_start = work.tail_start[row];
    tail_tokens = work.seq_lens[request] - tail_start;
    KVEVICT_ASSERT(tail_tokens >= 0);
    if (tail_start > 0) {
      const int32_t* split =
          work.head_indptr + (static_cast<int64_t>(layer) * work.num_rows + row) * (heads + 1);
      first = split[head];
      pages = split[head + 1] - first;
    }
  }
  const int tail_block = tail_start / work.block_size;
  const int used = pages + (tail_tokens + work.block_size - 1) / work.block_size;
  KVEVICT_ASSERT(used <= work.width && tail_block + used - pages <= work.num_blocks);
  KVEVICT_ASSERT(first + pages <= work.store_width * heads);
  int32_t* target = work.table + static_cast<int64_t>(blockIdx.x) * work.width;
  const int32_t* store = work.store + row * work.store_stride;
  const int32_t* tail = work.block_table + request * work.block_stride + tail_block;
  for (int column = threadIdx.x; column < work.width; column += blockDim.x) {
    int page = 0;
    if (column < pages) {
      const int flat = first + column;
      page = store[flat / heads] * heads + flat % heads;
    } else if (column < used) {
      page = tail[column - pages] * heads + head;
    }
    target[column] = page;
  }
  if (threadIdx.x == 0) work.lengths[blockIdx.x] = pages * work.block_size + tail_tokens;
}

void launch_page_table(const PageTable& work, Stream stream) {
  const int64_t blocks = static_cast<int64_t>(work.num_layers) * work.num_requests * work.num_heads;
  launch(page_table_kernel, blocks, 1, kPageTableThreads, 0, stream, work);
}

}  // namespace kvevict
