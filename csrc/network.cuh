// The kernel of network.h.
#pragma once

#include "defend.cuh"
#include "device.h"
#include "head.cuh"
#include "network.h"
#include "tail_keys.cuh"

namespace kvevict {

constexpr int kNetworkThreads = 128;
constexpr int kNetworkBlocks = 6;  // of a multiprocessor, by registers
constexpr int kNetworkTokens = 8;  // of a warp
constexpr int kNetworkStaged = 4;  // tokens loaded at once; more would exhaust the registers
constexpr int kNetworkBlock = kNetworkThreads / kWarp * kNetworkTokens;

// Shared memory of a block: the keys of each warp's tokens, their norms, and the logarithms of their shares.
constexpr size_t network_bytes(int head_size) {
  return kNetworkBlock * static_cast<size_t>(head_size + 2) * sizeof(float);
}

#define KVEVICT_FITS(size) static_assert(network_bytes(size) <= kMaxShared && (size) % 4 == 0);
KVEVICT_HEAD_SIZES(KVEVICT_FITS)
#undef KVEVICT_FITS
#define KVEVICT_WHOLE(size) static_assert((size) % kNetworkTokens == 0);
KVEVICT_BLOCK_SIZES(KVEVICT_WHOLE)
#undef KVEVICT_WHOLE

// As torch's, by the error function.
__device__ inline float gelu(float value) { return 0.5f * value * (1.0f + erff(value * 0.70710678f)); }

// Writes the keys of consecutive tokens without their rotation, and adds the lane's part of the squares of
// their norms.
template <Element kElement, int kTokens>
__device__ inline void stage_keys(const TailKeys& keys, const unsigned char* slots,
                                  const unsigned char* rotary, int64_t position, float* staged,
                                  float (&squares)[kTokens]) {
  constexpr int kPairs = kInWord<kElement>;
  KVEVICT_ASSERT(rotary == nullptr || position + kTokens <= keys.num_positions);
  for (int unit = threadIdx.x % kWarp; unit < keys.head_size / (2 * kPairs); unit += kWarp) {
    const Pairs pairs = find_pairs<kElement>(keys, rotary != nullptr, unit);
    uint32_t words[kTokens][2];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      words[j][0] = *reinterpret_cast<const uint32_t*>(slots + j * keys.slot_bytes + pairs.low);
      words[j][1] = *reinterpret_cast<const uint32_t*>(slots + j * keys.slot_bytes + pairs.high);
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float numbers[2 * kPairs];
      widen<kElement>(words[j][0], numbers);
      widen<kElement>(words[j][1], numbers + kPairs);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float2 turn = make_float2(1, 0);
        if (pairs.turned) turn = find_turn(keys, rotary, position + j, pairs.first + i);
        const float2 key = turned_back<kPairs>(numbers, pairs, i, turn);
        squares[j] += key.x * key.x + key.y * key.y;
        staged[j * keys.head_size + pairs.dimension(i)] = key.x;
        staged[j * keys.head_size + pairs.other(i)] = key.y;
      }
    }
  }
}

// Sums over a warp; a lane gets the one of its remainder.
template <int kCount>
__device__ inline float sum_of_lane(const float (&numbers)[kCount]) {
  float mine = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    float sum = numbers[j];
    for (int step = 1; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (static_cast<int>(threadIdx.x % kCount) == j) mine = sum;
  }
  return mine;
}

// A warp takes a few tokens of a head, and a lane one unit at a time of the network: a weight is read
// once for all tokens of the warp, and a key from shared memory by all lanes at once.
template <Element kElement>
static __global__ void __launch_bounds__(kNetworkThreads, kNetworkBlocks) network_kernel(const __grid_constant__ Networks work) {
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
  if (first >= tokens) return;
  // All tokens of the warp are there, and in one page.
  const int column = head.store_columns + first;
  const int64_t at = head.first_column + column;
  const unsigned char* slots = keys.caches.at[layer] + head.tail_slot(first) * keys.slot_bytes;
  const int64_t position = keys.candidates.requests[request].old_tail_start + first;
  float* staged = reinterpret_cast<float*>(shared_memory()) + warp * kNetworkTokens * (size + 2);
  float* lengths = staged + kNetworkTokens * size;
  float* shares = lengths + kNetworkTokens;
  float square = 0;
#pragma unroll 1
  for (int from = 0; from < kNetworkTokens; from += kNetworkStaged) {
    float squares[kNetworkStaged] = {};
    stage_keys<kElement>(keys, slots + from * keys.slot_bytes, keys.rotary.at[layer], position + from,
                         staged + from * size, squares);
    const float sum = sum_of_lane(squares);
    if (lane / kNetworkStaged * kNetworkStaged == from) square = sum;
  }
  if (lane < kNetworkTokens) {
    const int64_t line = static_cast<int64_t>(request) * keys.num_layers + layer;
    const float share = share_of(work.norms[at + lane], work.totals[line * keys.width + first + lane]);
    lengths[lane] = sqrtf(square);
    shares[lane] = logf(share > kLeastShare ? share : kLeastShare);
  }
  __syncwarp();
  const int64_t of_head = static_cast<int64_t>(layer) * heads + row % heads;
  float found[kNetworkTokens] = {};
  for (int from = 0; from < units; from += kWarp) {
    const bool used = from + lane < units;
    const float* weights =
        work.weights + of_head * (size + kNetworkRest) * units + (used ? from + lane : units - 1);
    float sums[kNetworkTokens] = {};
#pragma unroll 1
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
  const float sum = sum_of_lane(found);
  if (lane >= kNetworkTokens) return;
  const float added = sum + work.shares[of_head] * shares[lane];
  work.parts[at + lane] += added;
  if (work.channels > 1) work.parts[work.num_parts + at + lane] += added;
}

void launch_networks(const Networks& work, int num_requests, Stream stream) {
  const int64_t blocks = (work.keys.width + kNetworkBlock - 1) / kNetworkBlock;
  const int64_t rows = static_cast<int64_t>(num_requests) * work.keys.num_layers * work.keys.candidates.num_heads;
  const auto run = [&](auto kernel) {
    launch(kernel, rows * blocks, 1, kNetworkThreads, network_bytes(work.keys.head_size), stream, work);
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
