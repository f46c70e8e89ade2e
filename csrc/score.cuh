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

// What one block works on.
struct Place {
  int64_t row;  // of E * L * H
  int layer, chunk, first, last;
  Keys keys;
  WindowQueries queries;
};

__device__ inline Place find_place(const Score& work) {
  Place place;
  const int heads = work.candidates.num_heads;
  place.chunk = blockIdx.x % work.chunks;
  place.row = blockIdx.x / work.chunks;
  const int head = place.row % heads;
  place.layer = place.row / heads % work.num_layers;
  const int request = place.row / heads / work.num_layers;
  const Request& due = work.candidates.requests[request];
  place.keys = {static_cast<const unsigned char*>(work.caches.at[place.layer]),
                find_head(work.candidates, request, place.layer, head, work.window),
                work.slot_bytes, work.stored};
  place.queries = {static_cast<const unsigned char*>(work.rings.at[place.layer]),
                   due.ring, due.num_tokens, work.window, work.group, work.group * heads, head};
  const int columns = place.keys.head.columns;
  KVEVICT_ASSERT(columns <= work.chunks * kChunk);
  place.first = place.chunk * kChunk;
  place.last = place.first + kChunk < columns ? place.first + kChunk : columns;
  return place;
}

// A maximum and a sum of powers of two relative to it; -inf and 0 for nothing.
struct Powers {
  float most, sum;

  __device__ void add(Powers other) {
    const float most_of_both = fmaxf(most, other.most);
    const float base = most_of_both == -INFINITY ? 0.0f : most_of_both;
    sum = sum * exp2_fast(most - base) + other.sum * exp2_fast(other.most - base);
    most = most_of_both;
  }

  __device__ void add(float first, float second) {
    const float most_of_all = fmaxf(most, fmaxf(first, second));
    const float base = most_of_all == -INFINITY ? 0.0f : most_of_all;
    sum = sum * exp2_fast(most - base) + exp2_fast(first - base) + exp2_fast(second - base);
    most = most_of_all;
  }
};

// Goes through the chunk. `each(column, logits)` gets the logits of a lane's rows with columns
// `column` and `column + 1`, in powers of two and not masked; `after(first)` follows a tile.
template <typename T, int D, typename Each, typename After>
__device__ void for_tiles(const Score& work, const Place& place, int first_row, Each each,
                          After after) {
  using Shape = Tile<T, D>;
  unsigned char* tiles = shared_memory();
  QueryRows<T, D> rows;
  rows.load(place.queries, first_row);
  clear_padding<T, D>(tiles);
  clear_padding<T, D>(tiles + Shape::kBytes);
  const float scale = work.scales[place.layer];
  const int lane = threadIdx.x % kWarp;

  load_tile<T, D>(place.keys, place.first, tiles);
  int stage = 0;
  for (int first = place.first; first < place.last; first += Shape::kKeys) {
    if (first + Shape::kKeys < place.last) {
      load_tile<T, D>(place.keys, first + Shape::kKeys, tiles + (stage ^ 1) * Shape::kBytes);
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
        for (int i = 0; i < 4; ++i) {
          float logit = logits[block][i] * scale;
          if (work.softcap > 0) logit = tanhf(logit / work.softcap) * work.softcap;
          logits[block][i] = logit * kLog2E;
        }
      }
      each(first, key + lane % 4 * 2, logits);
    }
    __syncthreads();
    after(first);
    stage ^= 1;
  }
}

// Last column that each row of a lane sees: query i of the window sees its own; -1 for no row.
template <typename T, int D>
__device__ void find_limits(const Place& place, int first_row,
                            int (&limits)[Tile<T, D>::kRowBlocks][2]) {
  const int window = place.queries.window, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int block = 0; block < Tile<T, D>::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + block * 16 + half * 8 + lane / 4;
      limits[block][half] =
          row < place.queries.rows() ? place.keys.head.columns - window + row % window : -1;
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
  const Place place = find_place(work);
  if (place.first >= place.last) return;
  const int first_row = first_row_of_warp<T, D>();
  int limits[Shape::kRowBlocks][2];
  find_limits<T, D>(place, first_row, limits);
  Powers powers[Shape::kRowBlocks][2];
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
    powers[block][0] = powers[block][1] = {-INFINITY, 0.0f};
  }
  for_tiles<T, D>(
      work, place, first_row,
      [&](int first, int key, const float(&logits)[Shape::kRowBlocks][4]) {
#pragma unroll
        for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int left = limits[block][half] - first - key;
            powers[block][half].add(left >= 0 ? logits[block][half * 2] : -INFINITY,
                                    left >= 1 ? logits[block][half * 2 + 1] : -INFINITY);
          }
        }
      },
      [](int) {});
  const int lane = threadIdx.x % kWarp, rows = place.queries.rows();
  float2* partial = work.partial + (place.row * work.chunks + place.chunk) * rows;
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Powers all = powers[block][half];
      for (int step = 1; step < 4; step *= 2) {
        all.add(Powers{__shfl_xor_sync(kAllLanes, all.most, step),
                       __shfl_xor_sync(kAllLanes, all.sum, step)});
      }
      const int row = first_row + block * 16 + half * 8 + lane / 4;
      if (row < rows && lane % 4 == 0) partial[row] = make_float2(all.most, all.sum);
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
    Powers all = {-INFINITY, 0.0f};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const float2 part = work.partial[(row * work.chunks + chunk) * rows + i];
      all.add(Powers{part.x, part.y});
    }
    work.lse[row * rows + i] = (all.most + log2f(all.sum)) / kLog2E;
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(kScoreWarps* kWarp) column_kernel(const __grid_constant__ Score work) {
  using Shape = Tile<T, D>;
  const Place place = find_place(work);
  if (place.first >= place.last) return;
  const int first_row = first_row_of_warp<T, D>(), rows = place.queries.rows();
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  float* sums = reinterpret_cast<float*>(shared_memory() + 2 * Shape::kBytes);
  int limits[Shape::kRowBlocks][2];
  find_limits<T, D>(place, first_row, limits);
  float lse[Shape::kRowBlocks][2];
#pragma unroll
  for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + block * 16 + half * 8 + lane / 4;
      lse[block][half] = row < rows ? work.lse[place.row * rows + row] * kLog2E : 0.0f;
    }
  }
  const int wanted = place.keys.head.columns - work.window;
  float* target = work.sums + blockIdx.y * work.num_sums + place.keys.head.first_sum;
  KVEVICT_ASSERT(place.keys.head.first_sum + wanted <= work.num_sums);
  for_tiles<T, D>(
      work, place, first_row,
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

// The head sizes that score is compiled for. One dtype a file: they compile side by side.
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
      case 64: return run(std::integral_constant<int, 64>{});                                   \
      case 80: return run(std::integral_constant<int, 80>{});                                   \
      case 96: return run(std::integral_constant<int, 96>{});                                   \
      case 128: return run(std::integral_constant<int, 128>{});                                 \
      case 256: return run(std::integral_constant<int, 256>{});                                 \
    }                                                                                           \
  }

}  // namespace kvevict
