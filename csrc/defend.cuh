// The kernels of defend.h.
#pragma once

#include "defend.h"
#include "device.h"
#include "fp8.cuh"
#include "head.cuh"
#include "reach.cuh"

namespace kvevict {

constexpr int kNormThreads = 256;
constexpr int kNormTokens = 4;  // of a warp
constexpr int kNormBlock = kNormThreads / kWarp * kNormTokens;
constexpr int kDefendThreads = 256;

// Sum of the squares of the numbers in four bytes.
__device__ inline float squares(uint32_t word, Element element) {
  float sum = 0;
  const auto add = [&](float value) { sum += value * value; };
  if (element == Element::kFloat) {
    add(__uint_as_float(word));
  } else if (element == Element::kHalf || element == Element::kBFloat16) {
    for (int i = 0; i < 2; ++i) {
      const uint32_t bits = word >> 16 * i & 0xffffu;
      add(element == Element::kHalf ? half_to_float(static_cast<uint16_t>(bits))
                                    : __uint_as_float(bits << 16));
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      const uint32_t byte = word >> 8 * i & 0xffu;
      add(element == Element::kE4M3 ? from_e4m3(byte) : from_e5m2(byte));
    }
  }
  return sum;
}

// A warp takes kNormTokens tokens of a layer, one head after another: a total has one order.
static __global__ void norm_kernel(const __grid_constant__ Norms work) {
  const int parts = (work.width + kNormBlock - 1) / kNormBlock;
  const int part = blockIdx.x % parts, layer = blockIdx.x / parts % work.num_layers;
  const int request = blockIdx.x / parts / work.num_layers;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = part * kNormBlock + warp * kNormTokens;
  const unsigned char* cache = work.caches.at[layer];
  float totals[kNormTokens] = {};
  int tokens = 0;
  for (int i = 0; i < work.candidates.num_heads; ++i) {
    const Head head = find_head(work.candidates, request, layer, i);
    tokens = head.tail_pages * head.block_size;
    KVEVICT_ASSERT(tokens <= work.width);
    KVEVICT_ASSERT(head.first_column + head.candidates() <= work.num_norms);
    const int store_columns = head.store_columns;
    if (first >= tokens) continue;
    const unsigned char* values[kNormTokens];
    float sums[kNormTokens] = {};
#pragma unroll
    for (int j = 0; j < kNormTokens; ++j) {
      const int64_t slot = head.tail_slot(first + j < tokens ? first + j : tokens - 1);
      values[j] = cache + slot * work.slot_bytes + work.value_offset;
    }
    for (int at = lane * 8; at < work.value_bytes; at += kWarp * 8) {
      uint2 words[kNormTokens];
#pragma unroll
      for (int j = 0; j < kNormTokens; ++j) words[j] = *reinterpret_cast<const uint2*>(values[j] + at);
#pragma unroll
      for (int j = 0; j < kNormTokens; ++j) {
        sums[j] += squares(words[j].x, work.element) + squares(words[j].y, work.element);
      }
    }
    for (int step = 1; step < kWarp; step *= 2) {
#pragma unroll
      for (int j = 0; j < kNormTokens; ++j) sums[j] += __shfl_xor_sync(kAllLanes, sums[j], step);
    }
#pragma unroll
    for (int j = 0; j < kNormTokens; ++j) {
      const float norm = sqrtf(sums[j]);
      totals[j] += norm;
      if (lane == 0 && first + j < tokens) {
        work.norms[head.first_column + store_columns + first + j] = norm;
      }
    }
  }
  float* target = work.totals + (static_cast<int64_t>(request) * work.num_layers + layer) * work.width;
#pragma unroll
  for (int j = 0; j < kNormTokens; ++j) {
    if (lane == 0 && first + j < work.width) target[first + j] = first + j < tokens ? totals[j] : 0.0f;
  }
}

// A head's part in the norms of a token's values. 0 for no number, or a token without values in any head.
__device__ inline float share_of(float norm, float total) {
  const float share = norm / total;
  return share <= 3.4e38f ? share : 0.0f;
}

static __global__ void defend_kernel(const __grid_constant__ Defend work) {
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
  const float mean = work.reach.means[row];
  const float* totals = work.totals + (static_cast<int64_t>(request) * layers + layer) * work.width;
  const int end = (chunk + 1) * kChunk < count ? (chunk + 1) * kChunk : count;
  for (int column = chunk * kChunk + threadIdx.x; column < end; column += blockDim.x) {
    const int64_t at = head.first_column + column;
    const float share = column < store_columns
                            ? work.kept.at[layer][head.stored_slot(column) * work.stride]
                            : share_of(work.norms[at], totals[column - store_columns]);
    const float score = nan_max(peak_of(work.reach, head, column), mean) * share;
    work.scores[at] = column < protect ? kProtected : score;
    work.shares[at] = share;
  }
}

void launch_norms(const Norms& work, int num_requests, Stream stream) {
  const int64_t parts = (work.width + kNormBlock - 1) / kNormBlock;
  launch(norm_kernel, parts * work.num_layers * num_requests, 1, kNormThreads, 0, stream, work);
}

void launch_defend(const Defend& work, int64_t heads, Stream stream) {
  launch_means(work.reach, heads, stream);
  launch(defend_kernel, heads * work.chunks, 1, kDefendThreads, 0, stream, work);
}

}  // namespace kvevict
