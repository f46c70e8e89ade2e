// The highest attention of any window query, each averaged over its neighbours: for score.cuh.
//
// ops/torch/defensive.py, window_peaks, up to the division by the neighbours and the floor. A
// lane has two columns of every eight, so the neighbours of a pair are the pairs of the lanes beside
// it, of the eight before and the eight behind: results come one step of eight columns late.
#pragma once

#include "main_loop.cuh"

namespace kvevict {

// Weights of a row with a lane's pair of columns.
struct Pair {
  float low, high;
};

__device__ inline Pair shuffle(Pair pair, int lane) {
  return {__shfl_sync(kAllLanes, pair.low, lane), __shfl_sync(kAllLanes, pair.high, lane)};
}

template <typename T, int D, bool kPacked>
__global__ void __launch_bounds__(kScoreWarps* kWarp, 2) peak_kernel(const __grid_constant__ Score work) {
  using Shape = Tile<T, D>;
  const ChunkTile tile = chunk_tile(work, kPeakChunk, kStep);
  const int wanted = tile.keys.head.summed(work.window), begin = tile.chunk * kPeakChunk;
  const int end = begin + kPeakChunk < wanted ? begin + kPeakChunk : wanted;
  if (begin >= end) return;
  const int first_in_window = tile.keys.head.columns - work.window;
  const int first_row = first_row_of_warp<T, D>(), rows = tile.queries.rows();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warps = warps_with_rows<T, D>(rows);
  const int quad = lane % 4, left = (lane & ~3) | ((lane + 3) & 3), right = (lane & ~3) | ((lane + 1) & 3);
  float* peaks = reinterpret_cast<float*>(shared_memory() + 2 * Shape::kBytes);
  float lse[Shape::kRowBlocks][2];
  Pair before[Shape::kRowBlocks][2], recent[Shape::kRowBlocks][2];
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + block * 16 + half * 8 + lane / 4;
      // No row has no weight.
      lse[block][half] = row < rows ? work.lse[tile.row * rows + row] * kLog2E : INFINITY;
      before[block][half] = recent[block][half] = {0.0f, 0.0f};
    }
  }
  float* target = work.sums + blockIdx.y * work.num_sums + tile.keys.head.first_sum;
  KVEVICT_ASSERT(tile.keys.head.first_sum + wanted <= work.num_sums);
  main_loop<T, D, kPacked>(
      work, tile, first_row,
      [&](int first, int key, const float(&logits)[Shape::kRowBlocks][4]) {
        const int column = first + key;
        // A bit for each weight that counts; the others are zeros: neighbours without a sum, and
        // what a query of the window does not see. A limit for every row would take 16 registers.
        unsigned seen = (column < wanted ? 0x55555555u : 0u) | (column + 1 < wanted ? 0xaaaaaaaau : 0u);
        if (column + 1 > first_in_window) {
#pragma unroll 1
          for (int bit = 0; bit < 4 * Shape::kRowBlocks; bit += 2) {
            const int row = first_row + bit / 4 * 16 + bit / 2 % 2 * 8 + lane / 4;
            const int own = first_in_window + row % work.window;
            if (column > own) seen &= ~(1u << bit);
            if (column + 1 > own) seen &= ~(2u << bit);
          }
        }
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float base = lse[block][half];
            const unsigned mask = seen >> (4 * block + 2 * half);
            const Pair next{mask & 1 ? exp2_fast(logits[block][half * 2] - base) : 0.0f,
                            mask & 2 ? exp2_fast(logits[block][half * 2 + 1] - base) : 0.0f};
            const Pair mine = recent[block][half];
            const Pair lower = shuffle(quad == 3 ? before[block][half] : mine, left);
            const Pair upper = shuffle(quad == 0 ? next : mine, right);
            const float shared = lower.high + mine.low + mine.high + upper.low;
            low = nan_max(low, shared + lower.low);
            high = nan_max(high, shared + upper.high);
            before[block][half] = mine;
            recent[block][half] = next;
          }
        }
        for (int step = 4; step < kWarp; step *= 2) {
          low = nan_max(low, __shfl_xor_sync(kAllLanes, low, step));
          high = nan_max(high, __shfl_xor_sync(kAllLanes, high, step));
        }
        if (lane < 4) {
          peaks[warp * Shape::kKeys + key] = low;
          peaks[warp * Shape::kKeys + key + 1] = high;
        }
      },
      [&](int first) {
        for (int key = threadIdx.x; key < Shape::kKeys; key += blockDim.x) {
          const int column = first + key - kStep;
          float highest = 0;
          for (int i = 0; i < warps; ++i) highest = nan_max(highest, peaks[i * Shape::kKeys + key]);
          if (column >= begin && column < end) target[column] = highest;
        }
      });
}

}  // namespace kvevict
