// The kernel of select.h.
#pragma once

#include "device.h"
#include "digits.cuh"
#include "ordered.h"
#include "select.h"

namespace kvevict {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / kWarp;
constexpr int kColumnsPerLane = 8;  // columns of a lane in a tile
constexpr int kSelectTile = kSelectThreads * kColumnsPerLane;

struct SelectShared {
  Selection selection;
  unsigned warps[kSelectWarps];
};
static_assert(sizeof(SelectShared) <= kMaxShared && kSelectTile <= 0xffff);

static __global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ Select work) {
  SelectShared& shared = *reinterpret_cast<SelectShared*>(shared_memory());
  const int head = blockIdx.x % work.num_heads, group = blockIdx.x / work.num_heads;
  const int32_t* pages = work.pages + static_cast<int64_t>(group) * work.num_heads;
  const int kept = pages[head] * work.page_tokens, length = work.length[blockIdx.x];
  const int64_t start = work.start[blockIdx.x];
  int64_t first = work.first_kept[group];
  for (int i = 0; i < head; ++i) first += static_cast<int64_t>(pages[i]) * work.page_tokens;
  KVEVICT_ASSERT(kept >= 0 && kept <= length);
  KVEVICT_ASSERT(start >= 0 && start + length <= work.num_scores);
  KVEVICT_ASSERT(first >= 0 && first + kept <= work.num_columns);
  if (kept == 0) return;
  const float* scores = work.scores + start;
  int32_t* columns = work.columns + first;

  unsigned larger;
  const auto score = [&](int i) { return ordered(scores[i]); };
  const uint32_t last =
      select_largest<kColumnsPerLane, uint32_t>(shared.selection, length, kept, &larger, score);
  // A kept token of padding would be a token that does not exist.
  KVEVICT_ASSERT(last > ordered(__uint_as_float(0xff800000u)));
  const unsigned equal_kept = kept - larger;

  // Counts of larger and of equal scores, one in each half of a word, before this tile.
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned lower = (1u << lane) - 1;
  unsigned larger_before = 0, equal_before = 0;
  for (int tile = 0; tile < length; tile += kSelectTile) {
    // A warp has neighbouring columns, so that they are written in their order.
    const int first = tile + warp * kWarp * kColumnsPerLane + lane;
    unsigned is_larger[kColumnsPerLane], is_equal[kColumnsPerLane];
    uint32_t keys[kColumnsPerLane];
#pragma unroll
    for (int i = 0; i < kColumnsPerLane; ++i) {
      keys[i] = first + i * kWarp < length ? score(first + i * kWarp) : 0;
    }
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < kColumnsPerLane; ++i) {
      is_larger[i] = __ballot_sync(kAllLanes, keys[i] > last);
      is_equal[i] = __ballot_sync(kAllLanes, first + i * kWarp < length && keys[i] == last);
      mine += __popc(is_larger[i]) << 16 | __popc(is_equal[i]);
    }
    if (lane == 0) shared.warps[warp] = mine;
    __syncthreads();
    unsigned before = 0, all = 0;
    for (int i = 0; i < kSelectWarps; ++i) {
      if (i == warp) before = all;
      all += shared.warps[i];
    }
    unsigned larger_here = larger_before + (before >> 16);
    unsigned equal_here = equal_before + (before & 0xffff);
#pragma unroll
    for (int i = 0; i < kColumnsPerLane; ++i) {
      const unsigned larger_rank = larger_here + __popc(is_larger[i] & lower);
      const unsigned equal_rank = equal_here + __popc(is_equal[i] & lower);
      const bool equal = is_equal[i] >> lane & 1;
      if (is_larger[i] >> lane & 1 || (equal && equal_rank < equal_kept)) {
        const unsigned equal_first = equal_rank < equal_kept ? equal_rank : equal_kept;
        columns[larger_rank + equal_first] = first + i * kWarp;
      }
      larger_here += __popc(is_larger[i]);
      equal_here += __popc(is_equal[i]);
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
