// The kernel of rows.h.
#pragma once

#include "device.h"
#include "head.cuh"
#include "rows.h"

namespace kvevict {

constexpr int kRowThreads = 128;

// A thread writes the numbers of one head, and the first head of a layer those of the layer.
static __global__ void rows_kernel(const __grid_constant__ Rows work) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= work.num_heads) return;
  const int heads = work.candidates.num_heads, index = row % heads;
  const int64_t layer_row = row / heads;
  const int layer = layer_row % work.num_layers, request = layer_row / work.num_layers;
  const Head head = find_head(work.candidates, request, layer, index);
  work.start[row] = head.first_column;
  work.length[row] = head.candidates();
  const int tail = head.tail_pages << head.block_shift;
  work.caps[row] = head.store_pages + tail / head.page_tokens;
  if (index > 0) return;
  const Request& due = work.candidates.requests[request];
  work.first_kept[layer_row] =
      due.first_kept + layer * due.store_blocks * heads * work.candidates.page_tokens;
  work.store_blocks[layer_row] = static_cast<int32_t>(due.store_blocks);
}

void launch_rows(const Rows& work, Stream stream) {
  const int64_t blocks = (work.num_heads + kRowThreads - 1) / kRowThreads;
  launch(rows_kernel, blocks, 1, kRowThreads, 0, stream, work);
}

}  // namespace kvevict
