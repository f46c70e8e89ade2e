// The kernels of score.h.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "main_loop.cuh"
#include "peaks.cuh"

namespace kvevict {

template <typename T, int D, bool kPacked>
__global__ void __launch_bounds__(kScoreWarps* kWarp) lse_kernel(const __grid_constant__ Score work) {
  using Shape = Tile<T, D>;
  const ChunkTile tile = chunk_tile(work, kChunk);
  if (tile.first >= tile.last) return;
  const int first_row = first_row_of_warp<T, D>();
  int limits[Shape::kRowBlocks][2];
  find_limits<T, D>(tile, first_row, limits);
  OnlineSoftmax softmax[Shape::kRowBlocks][2];
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
    softmax[block][0] = softmax[block][1] = {-INFINITY, 0.0f};
  }
  main_loop<T, D, kPacked>(
      work, tile, first_row,
      [&](int first, int key, const float(&logits)[Shape::kRowBlocks][4]) {
#pragma unroll
        for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int left = limits[block][half] - first - key;
            softmax[block][half].add(left >= 0 ? logits[block][half * 2] : -INFINITY,
                                    left >= 1 ? logits[block][half * 2 + 1] : -INFINITY);
          }
        }
      },
      [](int) {});
  const int lane = threadIdx.x % kWarp, rows = tile.queries.rows();
  float2* partial = work.partial + (tile.row * work.chunks + tile.chunk) * rows;
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      OnlineSoftmax all = softmax[block][half];
      for (int step = 1; step < 4; step *= 2) {
        all.merge(OnlineSoftmax{__shfl_xor_sync(kAllLanes, all.max, step),
                                __shfl_xor_sync(kAllLanes, all.sum, step)});
      }
      const int row = first_row + block * 16 + half * 8 + lane / 4;
      if (row < rows && lane % 4 == 0) partial[row] = make_float2(all.max, all.sum);
    }
  }
}

constexpr int kMergeThreads = 128;

// One block a (request, layer, KV head).
static __global__ void merge_kernel(const __grid_constant__ Score work) {
  const int heads = work.candidates.num_heads, rows = work.group * work.window;
  const int64_t row = blockIdx.x;
  const int layer = row / heads % work.num_layers, request = row / heads / work.num_layers;
  const Head head = find_head(work.candidates, request, layer, row % heads, work.window);
  const int chunks = (head.columns + kChunk - 1) / kChunk;
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    OnlineSoftmax all = {-INFINITY, 0.0f};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const float2 part = work.partial[(row * work.chunks + chunk) * rows + i];
      all.merge(OnlineSoftmax{part.x, part.y});
    }
    work.lse_out[row * rows + i] = (all.max + log2f(all.sum)) / kLog2E;
  }
}

template <typename T, int D, bool kPacked>
__global__ void __launch_bounds__(kScoreWarps* kWarp) column_kernel(const __grid_constant__ Score work) {
  using Shape = Tile<T, D>;
  const ChunkTile tile = chunk_tile(work, kChunk);
  if (tile.first >= tile.last) return;
  const int first_row = first_row_of_warp<T, D>(), rows = tile.queries.rows();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warps = warps_with_rows<T, D>(rows);
  float* sums = reinterpret_cast<float*>(shared_memory() + 2 * Shape::kBytes);
  int limits[Shape::kRowBlocks][2];
  find_limits<T, D>(tile, first_row, limits);
  float lse[Shape::kRowBlocks][2];
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + block * 16 + half * 8 + lane / 4;
      lse[block][half] = row < rows ? work.lse[tile.row * rows + row] * kLog2E : 0.0f;
    }
  }
  const int wanted = tile.keys.head.summed(work.window);
  float* target = work.sums + blockIdx.y * work.num_sums + tile.keys.head.first_sum;
  KVEVICT_ASSERT(tile.keys.head.first_sum + wanted <= work.num_sums);
  main_loop<T, D, kPacked>(
      work, tile, first_row,
      [&](int first, int key, const float(&logits)[Shape::kRowBlocks][4]) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool seen = first + key + i % 2 <= limits[block][i / 2];
            if (seen) sum[i % 2] += exp2_fast(logits[block][i] - lse[block][i / 2]);
          }
        }
        for (int step = 4; step < kWarp; step *= 2) {
          sum[0] += __shfl_xor_sync(kAllLanes, sum[0], step);
          sum[1] += __shfl_xor_sync(kAllLanes, sum[1], step);
        }
        if (lane < 4) {
          sums[warp * Shape::kKeys + key] = sum[0];
          sums[warp * Shape::kKeys + key + 1] = sum[1];
        }
      },
      [&](int first) {
        for (int key = threadIdx.x; key < Shape::kKeys; key += blockDim.x) {
          float all = 0;
          for (int i = 0; i < warps; ++i) all += sums[i * Shape::kKeys + key];
          if (first + key < wanted) target[first + key] = all;
        }
      });
}

// Sizes of a launch: enough warps for the rows, up to kScoreWarps; more rows take more blocks.
template <typename T, int D>
struct ScoreShape {
  static_assert(2 * Tile<T, D>::kBytes + kScoreWarps * Tile<T, D>::kKeys * sizeof(float) <= kMaxShared);
  int warps, groups;
  size_t shared;

  explicit ScoreShape(int rows) {
    const int needed = (rows + Tile<T, D>::kRowsPerWarp - 1) / Tile<T, D>::kRowsPerWarp;
    groups = (needed + kScoreWarps - 1) / kScoreWarps;
    warps = (needed + groups - 1) / groups;
    warps = warps < kLeastScoreWarps ? kLeastScoreWarps : warps;
    shared = 2 * Tile<T, D>::kBytes + warps * Tile<T, D>::kKeys * sizeof(float);
  }
};

template <typename T, int D, bool kPacked>
void launch_lse(const Score& work, int64_t heads, Stream stream) {
  const ScoreShape<T, D> shape(work.group * work.window);
  launch(lse_kernel<T, D, kPacked>, heads * work.chunks, shape.groups, shape.warps * kWarp, shape.shared,
         stream, work);
  launch(merge_kernel, heads, 1, kMergeThreads, 0, stream, work);
}

template <typename T, int D, bool kPacked>
void launch_pass_of(const Score& work, Pass pass, int64_t heads, Stream stream) {
  if (pass == Pass::kLse) return launch_lse<T, D, kPacked>(work, heads, stream);
  const ScoreShape<T, D> shape(work.group * work.window);
  const auto kernel =
      pass == Pass::kColumns ? column_kernel<T, D, kPacked> : peak_kernel<T, D, kPacked>;
  launch(kernel, heads * work.chunks, shape.groups, shape.warps * kWarp, shape.shared, stream, work);
}

// Kernels of their own for packed stores: what unpacks keys takes registers.
template <typename T, int D>
void launch_pass(const Score& work, Pass pass, int64_t heads, Stream stream) {
  if (work.packed.key_bits > 0) return launch_pass_of<T, D, true>(work, pass, heads, stream);
  launch_pass_of<T, D, false>(work, pass, heads, stream);
}

// One dtype a file: they compile side by side.
#define KVEVICT_CASE(D) \
  case D: return run(std::integral_constant<int, D>{});
#define KVEVICT_SCORE(T)                                                                        \
  template <>                                                                                   \
  void launch_score<T>(const Score& work, Pass pass, int head_size, int64_t heads,              \
                       Stream stream) {                                                         \
    const auto run = [&](auto size) {                                                           \
      constexpr int D = decltype(size)::value;                                                  \
      launch_pass<T, D>(work, pass, heads, stream);                                             \
    };                                                                                          \
    switch (head_size) {                                                                        \
      KVEVICT_HEAD_SIZES(KVEVICT_CASE)                                                          \
      default: throw std::runtime_error("score is not compiled for this head size");            \
    }                                                                                           \
  }

}  // namespace kvevict
