// Window queries of a warp, and their products with keys in shared memory.
//
// Query row r of a KV head is query head r / w of its group, token n - w + r % w. A warp holds
// kRowBlocks blocks of 16 rows; lane 4 g + t has rows g and g + 8 of each, and of eight keys the two
// numbered 2 t and 2 t + 1: the layout of mma.m16n8k16, whose dimensions are taken in an order
// in which a lane's share of 32 lies together, the same for queries and keys.
#pragma once

#include "device.h"
#include "numbers.h"
#include "tile.cuh"

namespace kvevict {

// The rings of one layer, and which queries a block wants.
struct WindowQueries {
  const unsigned char* ring;  // [slots * w, query heads, D]
  int64_t slot;
  int64_t num_tokens;
  int window, group, query_heads, head;

  __device__ int rows() const { return group * window; }

  template <typename T, int D>
  __device__ const T* row(int index) const {
    const int64_t position = num_tokens - window + index % window;
    const int64_t entry = slot * window + position % window;
    const int query_head = head * group + index / window;
    return reinterpret_cast<const T*>(ring) + (entry * query_heads + query_head) * D;
  }
};

__device__ inline void multiply(Half, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_half(c, a, b0, b1);
}

__device__ inline void multiply(BFloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                uint32_t b1) {
  multiply_bfloat16(c, a, b0, b1);
}

// 16-bit queries stay in registers.
template <typename T, int D>
struct QueryRows {
  using Shape = Tile<T, D>;
  uint4 parts[Shape::kRowBlocks][2][Shape::kParts];

  __device__ void load(const WindowQueries& queries, int first) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = first + block * 16 + half * 8 + lane / 4;
        const bool real = index < queries.rows();
        const T* row = queries.row<T, D>(real ? index : 0);
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
          const int dimension = part * 32 + lane % 4 * 8;
          parts[block][half][part] =
              real && dimension < D ? load16(row + dimension) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }

  // Products with the eight keys whose rows begin at `keys`.
  __device__ void times(const unsigned char* keys, float (&products)[Shape::kRowBlocks][4]) const {
    const int lane = threadIdx.x % kWarp;
    const unsigned char* mine = keys + lane / 4 * Shape::kRowBytes + lane % 4 * 16;
#pragma unroll
    for (int block = 0; block < Shape::kRowBlocks; ++block) {
      for (float& product : products[block]) product = 0;
    }
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const uint4 key = load16(mine + part * 64);
#pragma unroll
      for (int block = 0; block < Shape::kRowBlocks; ++block) {
        const uint4 &upper = parts[block][0][part], &lower = parts[block][1][part];
        multiply(T{}, products[block], {upper.x, lower.x, upper.y, lower.y}, key.x, key.y);
        multiply(T{}, products[block], {upper.z, lower.z, upper.w, lower.w}, key.z, key.w);
      }
    }
  }
};

// float32 has no matrix product of its precision: rows are read through the cache.
template <int D>
struct QueryRows<float, D> {
  using Shape = Tile<float, D>;
  const float* rows[Shape::kRowBlocks][2];

  __device__ void load(const WindowQueries& queries, int first) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = first + block * 16 + half * 8 + lane / 4;
        rows[block][half] = queries.row<float, D>(index < queries.rows() ? index : 0);
      }
    }
  }

  __device__ void times(const unsigned char* keys, float (&products)[Shape::kRowBlocks][4]) const {
    const unsigned char* mine = keys + threadIdx.x % 4 * 2 * Shape::kRowBytes;
    const float* key[2] = {reinterpret_cast<const float*>(mine),
                           reinterpret_cast<const float*>(mine + Shape::kRowBytes)};
#pragma unroll
    for (int block = 0; block < Shape::kRowBlocks; ++block) {
      for (float& product : products[block]) product = 0;
    }
    for (int d = 0; d < D; ++d) {
#pragma unroll
      for (int block = 0; block < Shape::kRowBlocks; ++block) {
#pragma unroll
        for (int out = 0; out < 4; ++out) {
          products[block][out] += rows[block][out / 2][d] * key[out % 2][d];
        }
      }
    }
  }
};

}  // namespace kvevict
