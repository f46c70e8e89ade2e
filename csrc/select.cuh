// The kernel of select.h.
#pragma once

#include "device.h"
#include "digits.cuh"
#include "ordered.h"
#include "select.h"

namespace kvevict {

constexpr int kSelectThreads = 512;

struct SelectShared {
  Selection selection;
  unsigned warps[kSelectThreads / kWarp];
};

static __global__ void select_kernel(const __grid_constant__ Select work) {
  SelectShared& shared = *reinterpret_cast<SelectShared*>(shared_memory());
  const int head = blockIdx.x % work.num_heads, group = blockIdx.x / work.num_heads;
  const int32_t* pages = work.pages + static_cast<int64_t>(group) * work.num_heads;
  const int kept = pages[head] * work.block_size, length = work.length[blockIdx.x];
  const int64_t start = work.start[blockIdx.x];
  int64_t first = work.first_kept[group];
  for (int i = 0; i < head; ++i) first += static_cast<int64_t>(pages[i]) * work.block_size;
  KVEVICT_ASSERT(kept >= 0 && kept <= length);
  KVEVICT_ASSERT(start >= 0 && start + length <= work.num_scores);
  KVEVICT_ASSERT(first >= 0 && first + kept <= work.num_columns);
  if (kept == 0) return;
  const float* scores = work.scores + start;
  int32_t* columns = work.columns + first;

  unsigned larger;
  const uint32_t last = select_largest<uint32_t>(shared.selection, length, kept, &larger,
                                                 [&](int i) { return ordered(scores[i]); });
  // A kept token of padding would be a token that does not exist.
  KVEVICT_ASSERT(last > ordered(__uint_as_float(0xff800000u)));
  const unsigned equal_kept = kept - larger;

  // Counts of larger and of equal scores, one in each half of a word, before this tile.
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  unsigned larger_before = 0, equal_before = 0;
  for (int tile = 0; tile < length; tile += kSelectThreads) {
    const int column = tile + threadIdx.x;
    const uint32_t key = column < length ? ordered(scores[column]) : 0;
    const unsigned is_larger = __ballot_sync(kAllLanes, key > last);
    const unsigned is_equal = __ballot_sync(kAllLanes, column < length && key == last);
    if (lane == 0) shared.warps[warp] = __popc(is_larger) << 16 | __popc(is_equal);
    __syncthreads();
    unsigned before = 0, all = 0;
    for (int i = 0; i < kSelectThreads / kWarp; ++i) {
      if (i == warp) before = all;
      all += shared.warps[i];
    }
    const unsigned lower = (1u << lane) - 1;
    const unsigned larger_rank = larger_before + (before >> 16) + __popc(is_larger & lower);
    const unsigned equal_rank = equal_before + (before & 0xffff) + __popc(is_equal & lower);
    const bool equal = is_equal >> lane & 1;
    if (is_larger >> lane & 1 || (equal && equal_rank < equal_kept)) {
      columns[larger_rank + (equal_rank < equal_kept ? equal_rank : equal_kept)] = column;
    }
    larger_before += all >> 16;
    equal_before += all & 0xffff;
    __syncthreads();
  }
}

void launch_select(const Select& work, Stream stream) {
  const int64_t blocks = static_cast<int64_t>(work.num_groups) * work.num_heads;
  launch(select_kernel, blocks, 1, kSelectThreads, sizeof(SelectShared), stream, work);
}

}  // namespace kvevict
