// The kernel of pool.h.
#pragma once

#include "device.h"
#include "head.cuh"
#include "pool.h"

namespace kvevict {

constexpr int kPoolThreads = 256;

static __global__ void pool_kernel(const __grid_constant__ Pool work) {
  const int heads = work.candidates.num_heads;
  const int chunk = blockIdx.x % work.chunks;
  const int64_t row = blockIdx.x / work.chunks;
  const int layer = row / heads % work.num_layers, request = row / heads / work.num_layers;
  const Head head = find_head(work.candidates, request, layer, row % heads, work.window);
  const int columns = head.summed(work.window), candidates = head.candidates();
  const int64_t protect = work.candidates.requests[request].protect_first;
  KVEVICT_ASSERT(head.first_sum + columns <= work.num_sums);
  KVEVICT_ASSERT(head.first_column + candidates <= work.num_scores);
  KVEVICT_ASSERT(candidates <= work.chunks * kChunk);
  const float* sums = work.sums + head.first_sum;
  const int end = (chunk + 1) * kChunk < candidates ? (chunk + 1) * kChunk : candidates;
  for (int column = chunk * kChunk + threadIdx.x; column < end; column += blockDim.x) {
    float pooled = work.average ? 0.0f : -INFINITY;
    for (int near = column - work.kernel / 2; near <= column + work.kernel / 2; ++near) {
      if (near < 0 || near >= columns) continue;
      float sum = 0;
      for (int i = 0; i < work.query_groups; ++i) sum += sums[i * work.num_sums + near];
      if (work.average) {
        pooled += sum;
      } else if (sum > pooled || sum != sum) {
        pooled = sum;
      }
    }
    pooled *= work.average ? work.factor / work.kernel : work.factor;
    work.scores[head.first_column + column] = column < protect ? kProtected : pooled;
  }
}

void launch_pool(const Pool& work, int64_t heads, Stream stream) {
  launch(pool_kernel, heads * work.chunks, 1, kPoolThreads, 0, stream, work);
}

}  // namespace kvevict
