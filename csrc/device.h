// What kernels are written against: CUDA, or the emulation of a block's threads that tests use.
#pragma once

#include "cuda_types.h"
#include "sizes.h"

#ifndef KVEVICT_EMULATE
#include <cuda_runtime.h>

#include "ptx.h"

namespace kvevict {

// Dynamic shared memory of the block; every kernel carves its own from it.
inline __device__ unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

// A grid of `blocks` times `groups`; none where either is 0.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int groups, int threads, size_t shared,
            Stream stream, const Arguments&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= kMaxParameters);
  check_grid(blocks, groups);
  if (blocks == 0 || groups == 0) return;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups));
  kernel<<<grid, threads, shared, stream>>>(arguments...);
}

}  // namespace kvevict

// A broken precondition that only the device can see: loud, without a synchronisation.
#define KVEVICT_ASSERT(condition) \
  do {                            \
    if (!(condition)) __trap();   \
  } while (0)
#endif

namespace kvevict {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

// Keeps NaN, as torch's maximum does.
__device__ inline float nan_max(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace kvevict
