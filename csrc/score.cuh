// The kernels of score.h.
#pragma once

#include <type_traits>

#include "device.h"
#include "head.cuh"
#include "queries.cuh"
#include "score.h"
#include "tile.cuh"

namespace kvevict {

constexpr float kLog2E = 1.4426950408889634f;

// Tile coordinates of a block: a chunk of the columns of one (request, layer, KV head).
struct ChunkTile {
  int64_t row;  // of E * L * H
  int layer, chunk, first, last;
  Keys keys;
  WindowQueries queries;
};

__device__ inline ChunkTile chunk_tile(const Score& work) {
  ChunkTile tile;
  const int heads = work.candidates.num_heads;
  tile.chunk = blockIdx.x % work.chunks;
  tile.row = blockIdx.x / work.chunks;
  const int head = tile.row % heads;
  tile.layer = tile.row / heads % work.num_layers;
  const int request = tile.row / heads / work.num_layers;
  const Request& due = work.candidates.requests[request];
  tile.keys = {work.caches.at[tile.layer],
                find_head(work.candidates, request, tile.layer, head, work.window),
                work.slot_bytes, work.stored};
  tile.queries = {work.rings.at[tile.layer],
                   due.ring, due.num_tokens, work.window, work.group, work.group * heads, head};
  const int columns = tile.keys.head.columns;
  KVEVICT_ASSERT(columns <= work.chunks * kChunk);
  tile.first = tile.chunk * kChunk;
  tile.last = tile.first + kChunk < columns ? tile.first + kChunk : columns;
  return tile;
}

// State of an online softmax in powers of two: the running maximum, and the sum relative to it;
// -inf and 0 for nothing.
struct OnlineSoftmax {
  float max, sum;

  __device__ void merge(OnlineSoftmax other) {
    const float new_max = fmaxf(max, other.max);
    const float base = new_max == -INFINITY ? 0.0f : new_max;
    sum = sum * exp2_fast(max - base) + other.sum * exp2_fast(other.max - base);
    max = new_max;
  }

  __device__ void add(float first, float second) {
    const float new_max = fmaxf(max, fmaxf(first, second));
    const float base = new_max == -INFINITY ? 0.0f : new_max;
    sum = sum * exp2_fast(max - base) + exp2_fast(first - base) + exp2_fast(second - base);
    max = new_max;
  }
};

// The main loop: goes through the columns of the chunk in tiles of keys. `on_logits(first, key, logits)`
// gets the logits of a lane's rows with columns `first + key` and the next, in powers of two and not
// masked; `epilogue(first)` follows a tile of keys, behind a barrier.
template <typename T, int D, typename OnLogits, typename Epilogue>
__device__ void main_loop(const Score& work, const ChunkTile& tile, int first_row,
                          OnLogits on_logits, Epilogue epilogue) {
  using Shape = Tile<T, D>;
  unsigned char* tiles = shared_memory();
  QueryRows<T, D> rows;
  rows.load(tile.queries, first_row);
  clear_padding<T, D>(tiles);
  clear_padding<T, D>(tiles + Shape::kBytes);
  const float scale = work.scales[tile.layer], softcap = work.softcap;
  // Logits in powers of two: one multiplication where they are not capped.
  const float inner = softcap > 0 ? scale / softcap : scale * kLog2E;
  const int lane = threadIdx.x % kWarp;

  load_tile<T, D>(tile.keys, tile.first, tiles);
  int stage = 0;
  for (int first = tile.first; first < tile.last; first += Shape::kKeys) {
    if (first + Shape::kKeys < tile.last) {
      load_tile<T, D>(tile.keys, first + Shape::kKeys, tiles + (stage ^ 1) * Shape::kBytes);
    } else {
      commit_copies();
    }
    wait_copies<1>();
    __syncthreads();
    for (int key = 0; key < Shape::kKeys; key += 8) {
      float logits[Shape::kRowBlocks][4];
      rows.times(tiles + stage * Shape::kBytes + key * Shape::kRowBytes, logits);
#pragma unroll
      for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
        for (float& logit : logits[block]) logit *= inner;
      }
      if (softcap > 0) {
#pragma unroll
        for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
          for (float& logit : logits[block]) logit = tanhf(logit) * softcap * kLog2E;
        }
      }
      on_logits(first, key + lane % 4 * 2, logits);
    }
    __syncthreads();
    epilogue(first);
    stage ^= 1;
  }
}

// Last column that each row of a lane sees: query i of the window sees its own; -1 for no row.
template <typename T, int D>
__device__ void find_limits(const ChunkTile& tile, int first_row,
                            int (&limits)[Tile<T, D>::kRowBlocks][2]) {
  const int window = tile.queries.window, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int block = 0; block < Tile<T, D>::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + block * 16 + half * 8 + lane / 4;
      limits[block][half] =
          row < tile.queries.rows() ? tile.keys.head.columns - window + row % window : -1;
    }
  }
}

template <typename T, int D>
__device__ int first_row_of_warp() {
  const int warps = blockDim.x / kWarp;
  return (blockIdx.y * warps + threadIdx.x / kWarp) * Tile<T, D>::kRowsPerWarp;
}

template <typename T, int D>
__global__ void __launch_bounds__(kScoreWarps* kWarp) lse_kernel(const __grid_constant__ Score work) {
  using Shape = Tile<T, D>;
  const ChunkTile tile = chunk_tile(work);
  if (tile.first >= tile.last) return;
  const int first_row = first_row_of_warp<T, D>();
  int limits[Shape::kRowBlocks][2];
  find_limits<T, D>(tile, first_row, limits);
  OnlineSoftmax softmax[Shape::kRowBlocks][2];
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
    softmax[block][0] = softmax[block][1] = {-INFINITY, 0.0f};
  }
  main_loop<T, D>(
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

template <typename T, int D>
__global__ void __launch_bounds__(kScoreWarps* kWarp) column_kernel(const __grid_constant__ Score work) {
  using Shape = Tile<T, D>;
  const ChunkTile tile = chunk_tile(work);
  if (tile.first >= tile.last) return;
  const int first_row = first_row_of_warp<T, D>(), rows = tile.queries.rows();
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
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
  const int wanted = tile.keys.head.columns - work.window;
  float* target = work.sums + blockIdx.y * work.num_sums + tile.keys.head.first_sum;
  KVEVICT_ASSERT(tile.keys.head.first_sum + wanted <= work.num_sums);
  main_loop<T, D>(
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
  int warps, groups;
  size_t shared;

  explicit ScoreShape(int rows) {
    const int needed = (rows + Tile<T, D>::kRowsPerWarp - 1) / Tile<T, D>::kRowsPerWarp;
    groups = (needed + kScoreWarps - 1) / kScoreWarps;
    warps = (needed + groups - 1) / groups;
    shared = 2 * Tile<T, D>::kBytes + warps * Tile<T, D>::kKeys * sizeof(float);
  }
};

template <typename T, int D>
void launch_lse(const Score& work, int64_t heads, Stream stream) {
  const ScoreShape<T, D> shape(work.group * work.window);
  launch(lse_kernel<T, D>, heads * work.chunks, shape.groups, shape.warps * kWarp, shape.shared,
         stream, work);
  launch(merge_kernel, heads, 1, kMergeThreads, 0, stream, work);
}

template <typename T, int D>
void launch_columns(const Score& work, int64_t heads, Stream stream) {
  const ScoreShape<T, D> shape(work.group * work.window);
  launch(column_kernel<T, D>, heads * work.chunks, shape.groups, shape.warps * kWarp, shape.shared,
         stream, work);
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
      if (pass == Pass::kLse) {                                                                 \
        launch_lse<T, D>(work, heads, stream);                                                  \
      } else {                                                                                  \
        launch_columns<T, D>(work, heads, stream);                                              \
      }                                                                                         \
    };                                                                                          \
    switch (head_size) {                                                                        \
      KVEVICT_HEAD_SIZES(KVEVICT_CASE)                                                          \
      default: throw std::runtime_error("score is not compiled for this head size");            \
    }                                                                                           \
  }

}  // namespace kvevict
