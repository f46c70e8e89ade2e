// observe: the last queries of requests with a ring slot, to their rings. One layer a launch.
//
// The query of position p goes to entry p % window of its slot. All sizes come from tensors at fixed
// addresses, so a CUDA graph can record the launch: a request without a slot has ring -1.
#pragma once

#include "cuda_types.h"

namespace kvevict {

struct Observe {
  unsigned char* rings;             // [slots * window, bytes]
  const unsigned char* query;       // [T, bytes], token_bytes apart
  const int32_t* query_start_loc;   // [R + 1]
  const int32_t* seq_lens;          // [R]
  const int32_t* ring;              // [R]
  int64_t token_bytes, num_tokens, slots;
  int bytes, window, num_requests, queries;
};

void launch_observe(const Observe& work, Stream stream);

}  // namespace kvevict
