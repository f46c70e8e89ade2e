// The kernels of allocate.h.
#pragma once

#include "allocate.h"
#include "device.h"
#include "digits.cuh"
#include "ordered.h"

namespace kvevict {

constexpr int kGainThreads = 256;
constexpr int kAllocateThreads = 1024;
constexpr int kPagesPerLane = 4;  // that a thread asks for at once

// Pages of a head that may be taken. By fixed shares no head goes beyond what its layer keeps.
__device__ inline int pages_of(const Allocate& work, int64_t row) {
  const int total = work.store_blocks[row / work.num_heads] * work.num_heads, cap = work.caps[row];
  return work.shares != nullptr && cap > total ? total : cap;
}

// A block divides the share of one head.
static __global__ void share_kernel(const __grid_constant__ Allocate work) {
  const int head = blockIdx.x % work.num_heads;
  const int layer = blockIdx.x / work.num_heads % work.num_layers;
  const double share = work.shares[layer * work.num_heads + head];
  const int pages = pages_of(work, blockIdx.x);
  uint64_t* gains = work.gains + work.start[blockIdx.x] / work.page_tokens;
  KVEVICT_ASSERT(share > 0 && pages >= 1);
  KVEVICT_ASSERT(work.start[blockIdx.x] / work.page_tokens + pages <= work.num_gains);
  for (int page = threadIdx.x; page < pages; page += blockDim.x) {
    gains[page] = page == 0 ? ~uint64_t{0} : ordered(share / (page + 0.5));
  }
}

// A block sums the pages of one head.
static __global__ void gain_kernel(const __grid_constant__ Allocate work) {
  const int size = work.page_tokens, pages = work.caps[blockIdx.x];
  const int64_t start = work.start[blockIdx.x];
  const int store_blocks = work.store_blocks[blockIdx.x / work.num_heads];
  const int share = static_cast<int>(work.floor * store_blocks);
  const int guaranteed = share > 1 ? share : 1;
  KVEVICT_ASSERT(start >= 0 && pages >= 0 && pages * size <= work.length[blockIdx.x]);
  KVEVICT_ASSERT(start / size + pages <= work.num_gains);
  for (int page = threadIdx.x; page < pages; page += blockDim.x) {
    const uint32_t* keys = work.keys + start + static_cast<int64_t>(page) * size;
    double sum = 0;
    for (int i = 0; i < size; ++i) sum += from_ordered(keys[i]);
    // A page whose sum is no number, or infinite, ranks with the extremes of float64.
    constexpr double kMost = 1.7976931348623157e308;
    if (!(sum >= -kMost)) sum = -kMost;
    if (sum > kMost) sum = kMost;
    work.gains[start / size + page] = page < guaranteed ? ~uint64_t{0} : ordered(sum);
  }
}

struct AllocateShared {
  Selection selection;
  unsigned larger[kMaxHeads], equal[kMaxHeads];
  int first[kMaxHeads + 1];
  int64_t offset[kMaxHeads];  // from a page's number in the layer to that of its gain
};
static_assert(sizeof(AllocateShared) <= kMaxShared);

// A block shares the pages of one layer.
static __global__ void __launch_bounds__(kAllocateThreads) allocate_kernel(const __grid_constant__ Allocate work) {
  AllocateShared& shared = *reinterpret_cast<AllocateShared*>(shared_memory());
  const int heads = work.num_heads, size = work.page_tokens;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * heads;
  const int total = work.store_blocks[blockIdx.x] * heads;
  for (int head = threadIdx.x; head < heads; head += blockDim.x) {
    shared.larger[head] = shared.equal[head] = 0;
  }
  if (threadIdx.x == 0) {
    int before = 0;
    for (int head = 0; head < heads; ++head) {
      shared.first[head] = before;
      before += pages_of(work, row + head);
    }
    shared.first[heads] = before;
  }
  __syncthreads();
  const int pages = shared.first[heads];
  KVEVICT_ASSERT(total >= 1 && total <= pages);
  for (int head = threadIdx.x; head < heads; head += blockDim.x) {
    shared.offset[head] = work.start[row + head] / size - shared.first[head];
  }
  // The first barrier of select_largest is this one's too.
  const auto head_of = [&](int index) {
    int low = 0, high = heads - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (shared.first[middle] <= index) low = middle; else high = middle - 1;
    }
    return low;
  };
  const auto gain = [&](int index) {
    return work.gains[shared.offset[head_of(index)] + index];
  };
  unsigned num_larger;
  const uint64_t last =
      select_largest<kPagesPerLane, uint64_t>(shared.selection, pages, total, &num_larger, gain);
  for_each_key<kPagesPerLane>(pages, gain, [&](int index, uint64_t key, bool real) {
    if (real && key > last) atomicAdd(&shared.larger[head_of(index)], 1u);
    if (real && key == last) atomicAdd(&shared.equal[head_of(index)], 1u);
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned left = total - num_larger;
    for (int head = 0; head < heads; ++head) {
      const unsigned taken = shared.equal[head] < left ? shared.equal[head] : left;
      left -= taken;
      work.pages[row + head] = static_cast<int32_t>(shared.larger[head] + taken);
    }
  }
}

void launch_allocate(const Allocate& work, Stream stream) {
  const int64_t rows = static_cast<int64_t>(work.num_groups) * work.num_heads;
  launch(work.shares != nullptr ? share_kernel : gain_kernel, rows, 1, kGainThreads, 0, stream, work);
  launch(allocate_kernel, work.num_groups, 1, kAllocateThreads, sizeof(AllocateShared), stream, work);
}

}  // namespace kvevict
