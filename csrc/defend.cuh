// The kernels of defend.h.
#pragma once

#include "defend.h"
#include "device.h"
#include "fp8.cuh"
#include "head.cuh"
#include "store_page.cuh"

namespace kvevict {

constexpr int kNormThreads = 256;
constexpr int kNormTokens = 4;  // of a warp
constexpr int kNormBlock = kNormThreads / kWarp * kNormTokens;
constexpr int kMeanThreads = 1024;
constexpr int kDefendThreads = 256;
constexpr int kKeepThreads = 128;

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
    const int store_columns = head.store_pages * head.block_size;
    if (first >= tokens) continue;
    const unsigned char* values[kNormTokens];
    float sums[kNormTokens] = {};
#pragma unroll
    for (int j = 0; j < kNormTokens; ++j) {
      const int column = store_columns + (first + j < tokens ? first + j : tokens - 1);
      values[j] = cache + head.slot(column) * work.slot_bytes + work.value_offset;
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

// The highest peak of a column and its neighbours.
__device__ inline float peak_of(const Defend& work, const Head& head, int column) {
  const int last = head.columns - work.window - 1;
  const int from = column > kReach / 2 ? column - kReach / 2 : 0;
  const int to = column + kReach / 2 < last ? column + kReach / 2 : last;
  float highest = 0;
  for (int i = 0; i < work.query_groups; ++i) {
    const float* peaks = work.peaks + i * work.num_peaks + head.first_sum;
    for (int near = from; near <= to; ++near) highest = nan_max(highest, peaks[near]);
  }
  return highest / kNeighbours;
}

// One block a (request, layer, KV head); sums in one order.
static __global__ void __launch_bounds__(kMeanThreads) mean_kernel(const __grid_constant__ Defend work) {
  float* sums = reinterpret_cast<float*>(shared_memory());
  const int heads = work.candidates.num_heads;
  const int64_t row = blockIdx.x;
  const int layer = row / heads % work.num_layers, request = row / heads / work.num_layers;
  const Head head = find_head(work.candidates, request, layer, row % heads, work.window);
  const int columns = head.columns - work.window;
  KVEVICT_ASSERT(head.first_sum + columns <= work.num_peaks);
  float sum = 0;
  for (int column = threadIdx.x; column < columns; column += blockDim.x) {
    sum += peak_of(work, head, column);
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) work.means[row] = sums[0] / static_cast<float>(columns);
}

static __global__ void defend_kernel(const __grid_constant__ Defend work) {
  const int heads = work.candidates.num_heads;
  const int chunk = blockIdx.x % work.chunks;
  const int64_t row = blockIdx.x / work.chunks;
  const int layer = row / heads % work.num_layers, request = row / heads / work.num_layers;
  const Head head = find_head(work.candidates, request, layer, row % heads, work.window);
  const int candidates = head.candidates(), store_columns = head.store_pages * head.block_size;
  const int64_t protect = work.candidates.requests[request].protect_first;
  KVEVICT_ASSERT(head.first_column + candidates <= work.num_scores);
  KVEVICT_ASSERT(candidates <= work.chunks * kChunk);
  const float mean = work.means[row];
  const float* totals =
      work.totals + (static_cast<int64_t>(request) * work.num_layers + layer) * work.width;
  const int end = (chunk + 1) * kChunk < candidates ? (chunk + 1) * kChunk : candidates;
  for (int column = chunk * kChunk + threadIdx.x; column < end; column += blockDim.x) {
    float share;
    if (column < store_columns) {
      share = work.kept.at[layer][head.slot(column)];
    } else {
      share = work.norms[head.first_column + column] / totals[column - store_columns];
      // No number, or a token without values in any head.
      if (!(share <= 3.4e38f)) share = 0.0f;
    }
    const float score = nan_max(peak_of(work, head, column), mean) * share;
    work.scores[head.first_column + column] = column < protect ? kProtected : score;
    work.shares[head.first_column + column] = share;
  }
}

// A block fills one page of one layer.
static __global__ void keep_kernel(const __grid_constant__ Keep work) {
  StorePage page;
  if (!find_store_page(work, 0, work.num_layers, &page)) return;
  float* target = work.kept.at[page.layer] + page.target * work.candidates.block_size;
  for (int i = threadIdx.x; i < work.candidates.block_size; i += blockDim.x) {
    KVEVICT_ASSERT(page.columns[i] >= 0 && page.columns[i] < page.head.candidates());
    target[i] = work.shares[page.head.first_column + page.columns[i]];
  }
}

void launch_norms(const Norms& work, int num_requests, Stream stream) {
  const int64_t parts = (work.width + kNormBlock - 1) / kNormBlock;
  launch(norm_kernel, parts * work.num_layers * num_requests, 1, kNormThreads, 0, stream, work);
}

void launch_defend(const Defend& work, int64_t heads, Stream stream) {
  launch(mean_kernel, heads, 1, kMeanThreads, kMeanThreads * sizeof(float), stream, work);
  launch(defend_kernel, heads * work.chunks, 1, kDefendThreads, 0, stream, work);
}

void launch_keep(const Keep& work, int num_requests, Stream stream) {
  const int64_t blocks = static_cast<int64_t>(num_requests) * work.num_layers * work.store_width *
                         work.candidates.num_heads;
  launch(keep_kernel, blocks, 1, kKeepThreads, 0, stream, work);
}

}  // namespace kvevict
