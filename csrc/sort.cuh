// The kernel of sort.h.
#pragma once

#include "device.h"
#include "digits.cuh"
#include "ordered.h"
#include "sort.h"

namespace kvevict {

constexpr int kSortThreads = 1024;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kKeysPerLane = 8;  // keys of a lane in a tile

struct SortShared {
  unsigned digits[4][kDigits];            // of each pass: how often, then where the next key goes
  unsigned warps[kSortWarps][kDigits];    // of this tile
};
static_assert(sizeof(SortShared) <= kMaxShared);

// Turns counts into first positions, the largest digit first.
__device__ inline void scan_digits(unsigned* bins) {
  const int lane = threadIdx.x % kWarp;
  unsigned mine = 0;
  for (int i = 0; i < kDigitsPerLane; ++i) mine += bins[kDigits - 1 - lane * kDigitsPerLane - i];
  unsigned through = mine;
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned other = __shfl_up_sync(kAllLanes, through, step);
    if (lane >= step) through += other;
  }
  unsigned before = through - mine;
  for (int i = 0; i < kDigitsPerLane; ++i) {
    unsigned* bin = &bins[kDigits - 1 - lane * kDigitsPerLane - i];
    const unsigned count = *bin;
    *bin = before;
    before += count;
  }
}

// Moves all keys of a row by one byte.
template <typename At>
__device__ void sort_pass(SortShared& shared, unsigned* next, int shift, int length,
                          uint32_t* target, At at) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int tile = 0; tile < length; tile += kSortThreads * kKeysPerLane) {
    clear_digits(&shared.warps[0][0], kSortWarps * kDigits);
    __syncthreads();
    uint32_t keys[kKeysPerLane];
    unsigned ranks[kKeysPerLane];
    // All are asked for before one is ranked.
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int index = tile + (warp * kKeysPerLane + i) * kWarp + lane;
      keys[i] = index < length ? at(index) : 0;
    }
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int index = tile + (warp * kKeysPerLane + i) * kWarp + lane;
      const unsigned digit = keys[i] >> shift & (kDigits - 1);
      const unsigned peers = __match_any_sync(kAllLanes, index < length ? digit : kDigits);
      const unsigned before = index < length ? shared.warps[warp][digit] : 0;
      ranks[i] = before + __popc(peers & ((1u << lane) - 1));
      __syncwarp();
      if (index < length && __ffs(peers) - 1 == lane) {
        shared.warps[warp][digit] = before + __popc(peers);
      }
      __syncwarp();
    }
    __syncthreads();
    for (int digit = threadIdx.x; digit < kDigits; digit += kSortThreads) {
      unsigned position = next[digit];
      for (int i = 0; i < kSortWarps; ++i) {
        const unsigned count = shared.warps[i][digit];
        shared.warps[i][digit] = position;
        position += count;
      }
      next[digit] = position;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int index = tile + (warp * kKeysPerLane + i) * kWarp + lane;
      const unsigned digit = keys[i] >> shift & (kDigits - 1);
      if (index < length) target[shared.warps[warp][digit] + ranks[i]] = keys[i];
    }
    __syncthreads();
  }
}

static __global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ Sort work) {
  SortShared& shared = *reinterpret_cast<SortShared*>(shared_memory());
  const int length = work.length[blockIdx.x];
  const int64_t start = work.start[blockIdx.x];
  KVEVICT_ASSERT(length >= 0 && start >= 0 && start + length <= work.num_scores);
  const float* scores = work.scores + start;
  uint32_t* keys = work.keys + start;
  uint32_t* other = work.other + start;

  clear_digits(&shared.digits[0][0], 4 * kDigits);
  __syncthreads();
  const auto score = [&](int i) { return ordered(scores[i]); };
  for_each_key<kKeysPerLane>(length, score, [&](int, uint32_t key, bool real) {
    for (int pass = 0; pass < 4; ++pass) {
      count_digit(shared.digits[pass], key >> 8 * pass & (kDigits - 1), real);
    }
  });
  __syncthreads();
  if (threadIdx.x < 4 * kWarp) scan_digits(shared.digits[threadIdx.x / kWarp]);
  // The first barrier of sort_pass is this one's too.
  sort_pass(shared, shared.digits[0], 0, length, other, score);
  sort_pass(shared, shared.digits[1], 8, length, keys, [&](int i) { return other[i]; });
  sort_pass(shared, shared.digits[2], 16, length, other, [&](int i) { return keys[i]; });
  sort_pass(shared, shared.digits[3], 24, length, keys, [&](int i) { return other[i]; });
}

void launch_sort(const Sort& work, Stream stream) {
  launch(sort_kernel, work.num_rows, 1, kSortThreads, sizeof(SortShared), stream, work);
}

}  // namespace kvevict
