// The kernel of observe.h.
#pragma once

#include "device.h"
#include "observe.h"

namespace kvevict {

constexpr int kObserveThreads = 128;

// A block copies one query of one request; `queries` blocks a request.
static __global__ void observe_kernel(const __grid_constant__ Observe work) {
  const int request = blockIdx.x / work.queries;
  const int slot = work.ring[request];
  if (slot < 0) return;
  KVEVICT_ASSERT(slot < work.slots);
  const int end = work.query_start_loc[request + 1];
  const int length = end - work.query_start_loc[request];
  const int count = length < work.window ? length : work.window;
  KVEVICT_ASSERT(count <= work.queries);
  const int back = count - static_cast<int>(blockIdx.x) % work.queries;
  if (back <= 0) return;
  const int64_t position = static_cast<int64_t>(work.seq_lens[request]) - back;
  const int64_t token = static_cast<int64_t>(end) - back;
  KVEVICT_ASSERT(position >= 0 && token >= 0 && token < work.num_tokens);
  const int64_t entry = static_cast<int64_t>(slot) * work.window + position % work.window;
  const unsigned char* source = work.query + token * work.token_bytes;
  unsigned char* target = work.rings + entry * work.bytes;
  for (int at = threadIdx.x * 16; at < work.bytes; at += blockDim.x * 16) {
    store16(target + at, load16(source + at));
  }
}

void launch_observe(const Observe& work, Stream stream) {
  const int64_t blocks = static_cast<int64_t>(work.num_requests) * work.queries;
  launch(observe_kernel, blocks, 1, kObserveThreads, 0, stream, work);
}

}  // namespace kvevict
