// The kernel of reach.h, and what reads its result.
#pragma once

#include "device.h"
#include "head.cuh"
#include "reach.h"

namespace kvevict {

constexpr int kMeanThreads = 1024;

// The highest peak that covers a column.
__device__ inline float peak_of(const Reach& work, const Head& head, int column) {
  const int last = head.summed(work.window) - 1;
  const int from = column > kAfter ? column - kAfter : 0;
  const int to = column + kBefore < last ? column + kBefore : last;
  float highest = 0;
  for (int i = 0; i < work.query_groups; ++i) {
    const float* peaks = work.peaks + i * work.num_peaks + head.first_sum;
    for (int near = from; near <= to; ++near) highest = nan_max(highest, peaks[near]);
  }
  return highest / kNeighbours;
}

// One block a (request, layer, KV head); sums in one order.
static __global__ void __launch_bounds__(kMeanThreads) mean_kernel(const __grid_constant__ Reach work) {
  float* sums = reinterpret_cast<float*>(shared_memory());
  const int heads = work.candidates.num_heads;
  const int64_t row = blockIdx.x;
  const int layer = row / heads % work.num_layers, request = row / heads / work.num_layers;
  const Head head = find_head(work.candidates, request, layer, row % heads, work.window);
  const int columns = head.summed(work.window);
  KVEVICT_ASSERT(head.first_sum + columns <= work.num_peaks);
  float sum = 0;
  for (int column = threadIdx.x; column < columns; column += blockDim.x) {
    sum += peak_of(work, head, column);
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) work.means[row] = sums[0] / static_cast<float>(columns);
}

void launch_means(const Reach& work, int64_t heads, Stream stream) {
  launch(mean_kernel, heads, 1, kMeanThreads, kMeanThreads * sizeof(float), stream, work);
}

}  // namespace kvevict
