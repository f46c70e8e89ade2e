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

// Calls use(i, key, real) for the keys 0 .. count - 1, and for as many that are not real as fill the
// last warp. Called by a whole block; a thread's next kBatch keys are asked for before one is used.
template <int kBatch, typename At, typename Use>
__device__ inline void for_each_key(int count, At at, Use use) {
  using Key = decltype(at(0));
  const int step = static_cast<int>(blockDim.x);
  for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x % kWarp) < count;
       first += step * kBatch) {
    Key keys[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * step;
      keys[i] = index < count ? at(index) : Key{0};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) use(first + i * step, keys[i], first + i * step < count);
  }
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
template <int kBatch, typename Key, typename At>
__device__ Key select_largest(Selection& shared, int count, unsigned rank, unsigned* num_larger,
                              At at) {
  Key prefix = 0, mask = 0;
  unsigned larger = 0;
  for (int shift = 8 * (static_cast<int>(sizeof(Key)) - 1); shift >= 0; shift -= 8) {
    clear_digits(shared.bins, kDigits);
    __syncthreads();
    for_each_key<kBatch>(count, at, [&](int, Key key, bool real) {
      const bool counts = real && (key & mask) == prefix;
      count_digit(shared.bins, static_cast<unsigned>(key >> shift) & (kDigits - 1), counts);
    });
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
