// network: what a small network of a key, its norm and its share of the value norms adds to probe's parts.
//
// ops/torch/probe.py, network_scores. It runs behind probe's first launch, after the ranks have added up
// the norms of values, and reads the keys of the tail again. A head has U units with weights a, b, c, d, e
// each, and adds the sum of e * gelu(a . k + b * |k| + c + d * s) over them, and g * s: s the logarithm of
// the head's share of the value norms. Every part gains the same.
#pragma once

#include "cuda_types.h"
#include "tail_keys.h"

namespace kvevict {

constexpr int kNetworkRest = 4;  // weights of a unit behind those of the key: b, c, d, e

struct Networks {
  TailKeys keys;
  const float* weights;  // [L, H, head_size + kNetworkRest, units]
  const float* shares;   // [L, H]: g
  float* parts;          // [channels, num_parts] flat, as scores; to be added to
  const float* norms;    // flat, as scores
  const float* totals;   // [E, L, width]
  int64_t num_parts;
  int channels, units;
};

void launch_networks(const Networks& work, int num_requests, Stream stream);

}  // namespace kvevict
