// The kernel of network.h.
#pragma once

#include "defend.cuh"
#include "device.h"
#include "head.cuh"
#include "network.h"
#include "tail_keys.cuh"

namespace kvevict {

constexpr int kNetworkThreads = 128;
constexpr int kNetworkTokens = 8;  // of a warp
constexpr int kNetworkBlock = kNetworkThreads / kWarp * kNetworkTokens;

#define KVEVICT_FITS(size) static_assert(kNetworkBlock * (size) * sizeof(float) <= kMaxShared && (size) % 4 == 0);
KVEVICT_HEAD_SIZES(KVEVICT_FITS)
#undef KVEVICT_FITS

// As torch's, by the error function.
__device__ inline float gelu(float value) { return 0.5f * value * (1.0f + erff(value * 0.70710678f)); }

// Writes the keys of a warp's tokens, their rotation taken out, and returns what the lane adds to the
// squares of their norms.
template <Element kElement>
__device__ inline void stage_keys(const TailKeys& keys, const Head& head, int layer, int64_t position,
                                  int column, int mine, float* staged, float (&squares)[kNetworkTokens]) {
  constexpr int kPairs = kInWord<kElement>;
  const unsigned char* rotary = keys.rotary.at[layer];
  KVEVICT_ASSERT(rotary == nullptr || position + mine <= keys.num_positions);
#pragma unroll
  for (int j = 0; j < kNetworkTokens; ++j) {
    squares[j] = 0;
    const int token = j < mine ? j : mine - 1;
    const unsigned char* slot = keys.caches.at[layer] + head.slot(column + token) * keys.slot_bytes;
    for (int unit = threadIdx.x % kWarp; unit < keys.head_size / (2 * kPairs); unit += kWarp) {
      const Pairs pairs = find_pairs<kElement>(keys, rotary != nullptr, unit);
      float numbers[2 * kPairs];
      widen<kElement>(*reinterpret_cast<const uint32_t*>(slot + pairs.low), numbers);
      widen<kElement>(*reinterpret_cast<const uint32_t*>(slot + pairs.high), numbers + kPairs);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float2 turn = make_float2(1, 0);
        if (pairs.turned) turn = find_turn(keys, rotary, position + token, pairs.first + i);
        const float2 key = turned_back<kPairs>(numbers, pairs, i, turn);
        squares[j] += key.x * key.x + key.y * key.y;
        staged[j * keys.head_size + pairs.dimension(i)] = key.x;
        staged[j * keys.head_size + pairs.other(i)] = key.y;
      }
    }
  }
}

// A warp takes a few tokens of a head, and a lane one unit at a time of the network: a weight is read
// once for all tokens of the warp, and a key from shared memory by all lanes at once.
template <Element kElement>
static __global__ void __launch_bounds__(kNetworkThreads) network_kernel(const __grid_constant__ Networks work) {
  const TailKeys& keys = work.keys;
  const int heads = keys.candidates.num_heads, units = work.units, size = keys.head_size;
  const int blocks = (keys.width + kNetworkBlock - 1) / kNetworkBlock;
  const int row = blockIdx.x / blocks;  // of a request, layer and head
  const int layer = row / heads % keys.num_layers, request = row / heads / keys.num_layers;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = blockIdx.x % blocks * kNetworkBlock + warp * kNetworkTokens;
  const Head head = find_head(keys.candidates, request, layer, row % heads);
  const int tokens = head.tail_pages * head.block_size;
  KVEVICT_ASSERT(tokens <= keys.width);
  KVEVICT_ASSERT(head.first_column + head.candidates() <= work.num_parts);
  const int mine = tokens - first < kNetworkTokens ? tokens - first : kNetworkTokens;
  if (mine <= 0) return;
  const int column = head.store_pages * head.block_size + first;
  const int64_t at = head.first_column + column;
  const int64_t position = keys.candidates.requests[request].old_tail_start + first;
  float* staged = reinterpret_cast<float*>(shared_memory()) + warp * kNetworkTokens * size;
  float lengths[kNetworkTokens], shares[kNetworkTokens], found[kNetworkTokens] = {};
  stage_keys<kElement>(keys, head, layer, position, column, mine, staged, lengths);
  float share = 0;
  if (lane < mine) {
    const int64_t line = static_cast<int64_t>(request) * keys.num_layers + layer;
    share = share_of(work.norms[at + lane], work.totals[line * keys.width + first + lane]);
    share = logf(share > kLeastShare ? share : kLeastShare);
  }
#pragma unroll
  for (int j = 0; j < kNetworkTokens; ++j) {
    for (int step = 1; step < kWarp; step *= 2) {
      lengths[j] += __shfl_xor_sync(kAllLanes, lengths[j], step);
    }
    lengths[j] = sqrtf(lengths[j]);
    shares[j] = __shfl_sync(kAllLanes, share, j);
  }
  __syncwarp();  // The keys of the warp are there.
  const int64_t of_head = static_cast<int64_t>(layer) * heads + row % heads;
  for (int from = 0; from < units; from += kWarp) {
    const bool used = from + lane < units;
    const float* weights =
        work.weights + of_head * (size + kNetworkRest) * units + (used ? from + lane : units - 1);
    float sums[kNetworkTokens] = {};
    for (int d = 0; d < size; d += 4) {
      float of_key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) of_key[i] = weights[(d + i) * units];
#pragma unroll
      for (int j = 0; j < kNetworkTokens; ++j) {
        const float4 key = *reinterpret_cast<const float4*>(staged + j * size + d);
        sums[j] += key.x * of_key[0] + key.y * of_key[1] + key.z * of_key[2] + key.w * of_key[3];
      }
    }
    const float* rest = weights + size * units;
    const float of_length = rest[0], of_one = rest[units], of_share = rest[2 * units];
    const float out = rest[3 * units];
#pragma unroll
    for (int j = 0; j < kNetworkTokens; ++j) {
      const float unit = gelu(sums[j] + of_length * lengths[j] + of_one + of_share * shares[j]);
      // Lanes without a unit count nothing, whatever number they found.
      if (used) found[j] += out * unit;
    }
  }
  const float of_share = work.shares[of_head];
#pragma unroll
  for (int j = 0; j < kNetworkTokens; ++j) {
    for (int step = 1; step < kWarp; step *= 2) {
      found[j] += __shfl_xor_sync(kAllLanes, found[j], step);
    }
    if (lane != j || j >= mine) continue;
    for (int c = 0; c < work.channels; ++c) {
      work.parts[c * work.num_parts + at + j] += found[j] + of_share * shares[j];
    }
  }
}

void launch_networks(const Networks& work, int num_requests, Stream stream) {
  const int64_t blocks = (work.keys.width + kNetworkBlock - 1) / kNetworkBlock;
  const int64_t rows = static_cast<int64_t>(num_requests) * work.keys.num_layers * work.keys.candidates.num_heads;
  const size_t shared = static_cast<size_t>(kNetworkBlock) * work.keys.head_size * sizeof(float);
  const auto run = [&](auto kernel) {
    launch(kernel, rows * blocks, 1, kNetworkThreads, shared, stream, work);
  };
  switch (work.keys.element) {
    case Element::kFloat: return run(network_kernel<Element::kFloat>);
    case Element::kHalf: return run(network_kernel<Element::kHalf>);
    case Element::kBFloat16: return run(network_kernel<Element::kBFloat16>);
    case Element::kE4M3: return run(network_kernel<Element::kE4M3>);
    case Element::kE5M2: return run(network_kernel<Element::kE5M2>);
  }
}

}  // namespace kvevict
