// probe: what linear probes of its unrotated key say a token is worth, joined with the window or not.
//
// ops/torch/probe.py in two launches, between which ranks may add up the norms of values. The first
// reads each new token once, key and value. A probe says a . k + b * |k| + c. A part is what one says,
// and where prose counts what another one says and d * l + e * m, if that is above 0: l the logarithm of
// the token's age, m its square, each less its mean. The second of two parts also counts the logarithm
// of the head's share of the value norms, and the window joins that one. Networks add to the parts between
// both launches (network.h).
#pragma once

#include "cuda_types.h"
#include "layers.h"
#include "reach.h"
#include "tail_keys.h"

namespace kvevict {

constexpr int kProbeRest = 4;  // weights of a probe behind those of the key: b, c, d, e

// Parts of the tail's tokens: with two of them, the second still lacks its share.
struct ProbeKeys {
  TailKeys keys;
  const float* weights;  // [L, H, channels, or twice as many with prose, head_size + kProbeRest]
  const float* ages;     // [E, 2]: means of l and m over what is new
  float* parts;          // [channels, num_parts] flat, as scores
  float* norms;          // flat, as scores; of values, with two channels
  float* totals;         // [E, L, width]: sums over this rank's heads, with two channels
  int64_t num_parts;
  int channels;
  bool prose;            // the second half of the probes is prose's
};

struct ProbeScores {
  Layers<const float> kept;  // [blocks * H, page_tokens, stride] each: parts of the stores' tokens
  Reach reach;               // without peaks: no window is joined
  float* scores;               // flat, candidates only
  float* parts;                // [channels, num_scores], to be completed
  const float* norms;          // flat, as scores
  const float* totals;         // [E, L, width]
  const float* window_weights; // [L, H]
  int64_t num_scores;
  int channels, stride, chunks, width;
};

void launch_probe_keys(const ProbeKeys& work, int num_requests, Stream stream);
void launch_probe_scores(const ProbeScores& work, int64_t heads, Stream stream);

}  // namespace kvevict
