// The kernels of probe.h.
#pragma once

#include <type_traits>

#include "defend.cuh"
#include "device.h"
#include "head.cuh"
#include "probe.h"
#include "reach.cuh"
#include "tail_keys.cuh"

namespace kvevict {

constexpr int kProbeThreads = 256;
constexpr int kProbeWarps = kProbeThreads / kWarp;
// Tokens of a warp. With prose a token has twice the sums: more would not leave registers for two blocks.
template <bool kProse>
constexpr int kProbeTokens = kProse ? 2 : 4;
template <bool kProse>
constexpr int kProbeBlock = kProbeWarps * kProbeTokens<kProse>;

#define KVEVICT_FITS(size) static_assert(kProbeBlock<false> * (size) / 2 * sizeof(float2) <= kMaxShared);
KVEVICT_HEAD_SIZES(KVEVICT_FITS)
#undef KVEVICT_FITS

// Cosines and sines that turn the keys of a warp's tokens back.
__device__ inline void find_turns(const TailKeys& keys, const unsigned char* rotary, int64_t position,
                                  int tokens, float2* turns) {
  KVEVICT_ASSERT(position + tokens <= keys.num_positions);
  for (int i = threadIdx.x % kWarp; i < tokens * keys.pairs; i += kWarp) {
    turns[i] = find_turn(keys, rotary, position + i / keys.pairs, i % keys.pairs);
  }
}

// Sums over the dimensions of a token's key, and with two parts of its value.
template <int kProbes>
struct ProbeSums {
  float dots[kProbes], key, value;
};

// What a lane adds to the sums of a warp's tokens of a head, for the pairs of a unit.
template <Element kElement, int kProbes, bool kValues, int kTokens>
__device__ inline void add_pairs(const TailKeys& keys, const unsigned char* const* slots,
                                 const float* weights, const float2* turns, int unit,
                                 ProbeSums<kProbes>* sums) {
  constexpr int kPairs = kInWord<kElement>;
  const Pairs pairs = find_pairs<kElement>(keys, turns != nullptr, unit);
  uint32_t words[kTokens][2];
  uint2 values[kTokens];
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    words[j][0] = *reinterpret_cast<const uint32_t*>(slots[j] + pairs.low);
    words[j][1] = *reinterpret_cast<const uint32_t*>(slots[j] + pairs.high);
  }
  if constexpr (kValues) {
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      values[j] = *reinterpret_cast<const uint2*>(slots[j] + keys.slot_bytes / 2 + unit * 8);
    }
  }
  float of_first[kProbes][kPairs], of_second[kProbes][kPairs];
#pragma unroll
  for (int c = 0; c < kProbes; ++c) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float* mine = weights + c * (keys.head_size + kProbeRest);
      of_first[c][i] = mine[pairs.dimension(i)];
      of_second[c][i] = mine[pairs.other(i)];
    }
  }
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    float numbers[2 * kPairs];
    widen<kElement>(words[j][0], numbers);
    widen<kElement>(words[j][1], numbers + kPairs);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 turn =
          pairs.turned ? turns[j * keys.pairs + pairs.first + i] : make_float2(1, 0);
      const float2 key = turned_back<kPairs>(numbers, pairs, i, turn);
      sums[j].key += key.x * key.x + key.y * key.y;
#pragma unroll
      for (int c = 0; c < kProbes; ++c) {
        sums[j].dots[c] += key.x * of_first[c][i] + key.y * of_second[c][i];
      }
    }
    if constexpr (kValues) {
      sums[j].value += squares(values[j].x, kElement) + squares(values[j].y, kElement);
    }
  }
}

// A warp takes a few tokens of a layer, one head after another: cosines are read once, and a
// total has one order.
template <Element kElement, int kChannels, bool kProse>
static __global__ void __launch_bounds__(kProbeThreads) probe_key_kernel(const __grid_constant__ ProbeKeys work) {
  constexpr int kProbes = kProse ? 2 * kChannels : kChannels;
  constexpr int kTokens = kProbeTokens<kProse>, kBlock = kProbeBlock<kProse>;
  const TailKeys& keys = work.keys;
  const int blocks = (keys.width + kBlock - 1) / kBlock;
  const int layer = blockIdx.x / blocks % keys.num_layers;
  const int request = blockIdx.x / blocks / keys.num_layers;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = blockIdx.x % blocks * kBlock + warp * kTokens;
  const int heads = keys.candidates.num_heads;
  const Request& due = keys.candidates.requests[request];
  const int tokens = static_cast<int>(due.tail_start - due.old_tail_start);
  KVEVICT_ASSERT(tokens <= keys.width);
  const int mine = tokens - first < kTokens ? tokens - first : kTokens;
  float2* turns = nullptr;
  if (keys.rotary.at[layer] != nullptr && mine > 0) {
    turns = reinterpret_cast<float2*>(shared_memory()) + warp * kTokens * keys.pairs;
    find_turns(keys, keys.rotary.at[layer], due.old_tail_start + first, mine, turns);
  }
  __syncwarp();
  float totals[kTokens] = {}, ages[kTokens];
  if constexpr (kProse) {
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const int64_t age = due.num_tokens - due.old_tail_start - first - j;
      ages[j] = j < mine ? logf(static_cast<float>(age)) : 0.0f;
    }
  }
  for (int index = 0; index < heads && mine > 0; ++index) {
    const Head head = find_head(keys.candidates, request, layer, index);
    KVEVICT_ASSERT(head.first_column + head.candidates() <= work.num_parts);
    const int store_columns = head.store_columns;
    const unsigned char* slots[kTokens];
    ProbeSums<kProbes> sums[kTokens] = {};
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const int64_t slot = head.tail_slot(first + (j < mine ? j : mine - 1));
      slots[j] = keys.caches.at[layer] + slot * keys.slot_bytes;
    }
    const int stride = keys.head_size + kProbeRest;
    const float* weights =
        work.weights + static_cast<int64_t>(layer * heads + index) * kProbes * stride;
    for (int unit = lane; unit < keys.head_size / (2 * kInWord<kElement>); unit += kWarp) {
      add_pairs<kElement, kProbes, (kChannels > 1), kTokens>(keys, slots, weights, turns, unit, sums);
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      for (int step = 1; step < kWarp; step *= 2) {
        sums[j].key += __shfl_xor_sync(kAllLanes, sums[j].key, step);
        if constexpr (kChannels > 1) sums[j].value += __shfl_xor_sync(kAllLanes, sums[j].value, step);
#pragma unroll
        for (int c = 0; c < kProbes; ++c) {
          sums[j].dots[c] += __shfl_xor_sync(kAllLanes, sums[j].dots[c], step);
        }
      }
      const float norm = sqrtf(sums[j].value), length = sqrtf(sums[j].key);
      totals[j] += norm;
      if (lane > 0 || j >= mine) continue;
      const int64_t at = head.first_column + store_columns + first + j;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float* rest = weights + c * stride + keys.head_size;
        float part = sums[j].dots[c] + rest[0] * length + rest[1];
        if constexpr (kProse) {
          const int p = kChannels + c;
          const float* more = weights + p * stride + keys.head_size;
          const float old = ages[j] - work.ages[2 * request];
          const float older = ages[j] * ages[j] - work.ages[2 * request + 1];
          const float prose = sums[j].dots[p] + more[0] * length + more[1] + more[2] * old + more[3] * older;
          part += nan_max(prose, 0.0f);
        }
        work.parts[c * work.num_parts + at] = part;
      }
      if constexpr (kChannels > 1) work.norms[at] = norm;
    }
  }
  if constexpr (kChannels == 1) return;
  float* target = work.totals + (static_cast<int64_t>(request) * keys.num_layers + layer) * keys.width;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (lane == 0 && first + j < keys.width) target[first + j] = j < mine ? totals[j] : 0.0f;
  }
}

static __global__ void probe_score_kernel(const __grid_constant__ ProbeScores work) {
  const Candidates& candidates = work.reach.candidates;
  const int heads = candidates.num_heads, layers = work.reach.num_layers;
  const int chunk = blockIdx.x % work.chunks;
  const int64_t row = blockIdx.x / work.chunks;
  const int layer = row / heads % layers, request = row / heads / layers;
  const Head head = find_head(candidates, request, layer, row % heads, work.reach.window);
  const int count = head.candidates(), store_columns = head.store_columns;
  const int64_t protect = candidates.requests[request].protect_first;
  KVEVICT_ASSERT(head.first_column + count <= work.num_scores);
  KVEVICT_ASSERT(count <= work.chunks * kChunk);
  const bool joined = work.reach.peaks != nullptr;
  const float mean = joined ? work.reach.means[row] : 0.0f;
  const float weight = work.channels > 1 ? work.window_weights[layer * heads + row % heads] : 0.0f;
  const float* totals = work.totals + (static_cast<int64_t>(request) * layers + layer) * work.width;
  const int end = (chunk + 1) * kChunk < count ? (chunk + 1) * kChunk : count;
  for (int column = chunk * kChunk + threadIdx.x; column < end; column += blockDim.x) {
    const int64_t at = head.first_column + column;
    float score;
    if (column < store_columns) {
      const float* kept = work.kept.at[layer] + head.stored_slot(column) * work.stride;
      for (int c = 0; c < work.channels; ++c) {
        work.parts[c * work.num_scores + at] = kept[c];
      }
      score = kept[joined ? 1 : 0];
    } else {
      score = work.parts[at];
      if (work.channels > 1) {
        const float share = share_of(work.norms[at], totals[column - store_columns]);
        float* second = work.parts + work.num_scores + at;
        *second += weight * logf(share > kLeastShare ? share : kLeastShare);
        if (joined) score = *second;
      }
    }
    if (joined) {
      const float peak = nan_max(peak_of(work.reach, head, column), mean);
      score += weight * logf(nan_max(peak, kLeastShare));
    }
    // Nothing counts as padding, however little a key is worth.
    work.scores[at] = column < protect ? kProtected : nan_max(score, -kProtected);
  }
}

void launch_probe_keys(const ProbeKeys& work, int num_requests, Stream stream) {
  const int block = work.prose ? kProbeBlock<true> : kProbeBlock<false>;
  const int64_t blocks = (work.keys.width + block - 1) / block;
  const size_t shared = static_cast<size_t>(block) * work.keys.pairs * sizeof(float2);
  const auto run = [&](auto kernel) {
    launch(kernel, blocks * work.keys.num_layers * num_requests, 1, kProbeThreads, shared, stream, work);
  };
  const auto run_for = [&](auto channels, auto prose) {
    constexpr int kChannels = decltype(channels)::value;
    constexpr bool kProse = decltype(prose)::value;
    switch (work.keys.element) {
      case Element::kFloat: return run(probe_key_kernel<Element::kFloat, kChannels, kProse>);
      case Element::kHalf: return run(probe_key_kernel<Element::kHalf, kChannels, kProse>);
      case Element::kBFloat16: return run(probe_key_kernel<Element::kBFloat16, kChannels, kProse>);
      case Element::kE4M3: return run(probe_key_kernel<Element::kE4M3, kChannels, kProse>);
      case Element::kE5M2: return run(probe_key_kernel<Element::kE5M2, kChannels, kProse>);
    }
  };
  const auto run_with = [&](auto prose) {
    if (work.channels > 1) return run_for(std::integral_constant<int, 2>{}, prose);
    run_for(std::integral_constant<int, 1>{}, prose);
  };
  work.prose ? run_with(std::true_type{}) : run_with(std::false_type{});
}

void launch_probe_scores(const ProbeScores& work, int64_t heads, Stream stream) {
  if (work.reach.peaks != nullptr) launch_means(work.reach, heads, stream);
  launch(probe_score_kernel, heads * work.chunks, 1, kDefendThreads, 0, stream, work);
}

}  // namespace kvevict
