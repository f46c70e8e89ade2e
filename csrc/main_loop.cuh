// What every pass of score over the keys shares: tile coordinates, online softmax, main loop.
#pragma once

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

// The block's chunk has `size` columns, and reads `halo` more on either side.
__device__ inline ChunkTile chunk_tile(const Score& work, int size, int halo = 0) {
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
                work.slot_bytes, work.stored, &work.packed, tile.layer};
  tile.queries = {work.rings.at[tile.layer],
                   due.ring, due.num_tokens, work.window, work.group, work.group * heads, head};
  const int columns = tile.keys.head.columns;
  KVEVICT_ASSERT(columns <= work.chunks * size);
  const int first = tile.chunk * size, last = first + size < columns ? first + size : columns;
  tile.first = first > halo ? first - halo : 0;
  tile.last = last + halo;
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
template <typename T, int D, bool kPacked, typename OnLogits, typename Epilogue>
__device__ void main_loop(const Score& work, const ChunkTile& tile, int first_row,
                          OnLogits on_logits, Epilogue epilogue) {
  using Shape = Tile<T, D>;
  unsigned char* tiles = shared_memory();
  QueryRows<T, D> rows;
  rows.load(tile.queries, first_row);
  clear_padding<T, D>(tiles);
  if (tile.keys.stored == Stored::kAsQueries) clear_padding<T, D>(tiles + Shape::kBytes);
  const float scale = work.scales[tile.layer], softcap = work.softcap;
  // Logits in powers of two: one multiplication where they are not capped.
  const float inner = softcap > 0 ? scale / softcap : scale * kLog2E;
  const int lane = threadIdx.x % kWarp;
  // A warp without rows only helps to load.
  const int keys_taken = first_row < tile.queries.rows() ? Shape::kKeys : 0;

  load_tile<T, D, kPacked>(tile.keys, tile.first, tiles, 0);
  int stage = 0;
  for (int first = tile.first; first < tile.last; first += Shape::kKeys) {
    if (first + Shape::kKeys < tile.last) {
      load_tile<T, D, kPacked>(tile.keys, first + Shape::kKeys, tiles, stage ^ 1);
    } else {
      commit_copies();
    }
    wait_copies<1>();
    __syncthreads();
    const unsigned char* ready = ready_tile<T, D>(tile.keys.stored, tiles, stage);
    for (int key = 0; key < keys_taken; key += 8) {
      float logits[Shape::kRowBlocks][4];
      rows.times(ready + key * Shape::kRowBytes, logits);
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

// Warps of the block that have rows: the first ones.
template <typename T, int D>
__device__ int warps_with_rows(int rows) {
  constexpr int kRows = Tile<T, D>::kRowsPerWarp;
  const int warps = blockDim.x / kWarp, before = static_cast<int>(blockIdx.y) * warps;
  const int left = (rows + kRows - 1) / kRows - before;
  return left < warps ? left : warps;
}

}  // namespace kvevict
