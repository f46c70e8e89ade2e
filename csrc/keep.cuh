// The kernel of keep.h.
#pragma once

#include "device.h"
#include "keep.h"
#include "store_page.cuh"

namespace kvevict {

constexpr int kKeepThreads = 128;

// A block fills one page of one layer.
static __global__ void keep_kernel(const __grid_constant__ Keep work) {
  StorePage page;
  if (!find_store_page(work, 0, work.num_layers, &page)) return;
  float* target = work.kept.at[page.layer] + page.target * work.candidates.page_tokens * work.stride;
  for (int i = threadIdx.x; i < work.candidates.page_tokens; i += blockDim.x) {
    KVEVICT_ASSERT(page.columns[i] >= 0 && page.columns[i] < page.head.candidates());
    const int64_t from = page.head.first_column + page.columns[i];
    KVEVICT_ASSERT(from < work.num_numbers);
    for (int c = 0; c < work.channels; ++c) {
      target[i * work.stride + c] = work.numbers[c * work.num_numbers + from];
    }
  }
}

void launch_keep(const Keep& work, int num_requests, Stream stream) {
  const int64_t blocks = static_cast<int64_t>(num_requests) * work.num_layers * work.store_width *
                         work.candidates.num_heads;
  launch(keep_kernel, blocks, 1, kKeepThreads, 0, stream, work);
}

}  // namespace kvevict
