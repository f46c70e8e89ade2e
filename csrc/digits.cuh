// Radix selection inside a block: the k-th largest of a stream of keys, eight bits a pass.
//
// Counts are integers, so the order in which threads add to them does not matter.
#pragma once

#include "device.h"

namespace kvevict {

constexpr int kDigits = 256;
constexpr int kDigitsPerLane = kDigits / kWarp;

// Adds one for each lane that counts to the bin of its digit; lanes that agree add once.
__device__ inline void count_digit(unsigned* bins, unsigned digit, bool counts) {
  const unsigned peers = __match_any_sync(kAllLanes, counts ? digit : kDigits);
  const int lane = threadIdx.x % kWarp;
  if (counts && __ffs(peers) - 1 == lane) atomicAdd(&bins[digit], __popc(peers));
}

__device__ inline void clear_digits(unsigned* bins, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) bins[i] = 0;
}

// The digit that holds the `rank`-th largest key (from 1), and how many keys have a larger digit.
// Called by one whole warp; every lane gets the result.
__device__ inline void find_digit(const unsigned* bins, unsigned rank, unsigned* digit,
                                  unsigned* larger) {
  const int lane = threadIdx.x % kWarp;
  unsigned mine = 0;
  for (int i = 0; i < kDigitsPerLane; ++i) mine += bins[kDigits - 1 - lane * kDigitsPerLane - i];
  unsigned through = mine;
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned other = __shfl_up_sync(kAllLanes, through, step);
    if (lane >= step) through += other;
  }
  const int owner = __ffs(__ballot_sync(kAllLanes, through >= rank)) - 1;
  KVEVICT_ASSERT(owner >= 0);
  unsigned at = 0, before = through - mine;
  if (lane == owner) {
    for (at = kDigits - 1 - lane * kDigitsPerLane; before + bins[at] < rank; --at) before += bins[at];
  }
  *digit = __shfl_sync(kAllLanes, at, owner);
  *larger = __shfl_sync(kAllLanes, before, owner);
}

// Shared memory of select_largest.
struct Selection {
  unsigned bins[kDigits];
  unsigned digit, larger;
};

// The `rank`-th largest of `count` keys and how many keys are larger. Called by a whole block; `at`
// gives the i-th key. Reads every key once for each byte of it.
template <typename Key, typename At>
__device__ Key select_largest(Selection& shared, int count, unsigned rank, unsigned* num_larger,
                              At at) {
  Key prefix = 0, mask = 0;
  unsigned larger = 0;
  for (int shift = 8 * (static_cast<int>(sizeof(Key)) - 1); shift >= 0; shift -= 8) {
    clear_digits(shared.bins, kDigits);
    __syncthreads();
    const int whole = (count + kWarp - 1) / kWarp * kWarp;
#pragma unroll 4
    for (int i = threadIdx.x; i < whole; i += blockDim.x) {
      const Key key = i < count ? at(i) : Key{0};
      const bool counts = i < count && (key & mask) == prefix;
      count_digit(shared.bins, static_cast<unsigned>(key >> shift) & (kDigits - 1), counts);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      unsigned digit, more;
      find_digit(shared.bins, rank - larger, &digit, &more);
      if (threadIdx.x == 0) {
        shared.digit = digit;
        shared.larger = more;
      }
    }
    __syncthreads();
    larger += shared.larger;
    prefix |= static_cast<Key>(shared.digit) << shift;
    mask |= Key{kDigits - 1} << shift;
  }
  *num_larger = larger;
  return prefix;
}

}  // namespace kvevict
