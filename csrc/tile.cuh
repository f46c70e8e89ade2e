// A tile of keys in shared memory, gathered from head pages.
#pragma once

#include "device.h"
#include "fp8.cuh"
#include "head.cuh"

namespace kvevict {

// Sizes that follow from the dtype of the queries and the head size.
template <typename T, int D>
struct Tile {
  // Matrix products take 16 of the head's dimensions at a time, and a lane loads 8 of every 32.
  static constexpr int kPadded = (D + 31) / 32 * 32;
  static constexpr int kParts = kPadded / 32;
  static constexpr int kDense = kPadded * static_cast<int>(sizeof(T));
  // Rows of an odd multiple of 64 bytes: eight lanes that read two rows meet no bank twice.
  static constexpr int kRowBytes = kDense % 128 ? kDense : kDense + 64;
  static constexpr int kKeys = 64 * row_blocks(D) / static_cast<int>(sizeof(T));
  static constexpr int kBytes = kKeys * kRowBytes;
  // Blocks of 16 query rows that a warp holds in registers.
  static constexpr int kRowBlocks = row_blocks(D);
  static constexpr int kRowsPerWarp = 16 * kRowBlocks;
};

// Where the keys of a head come from.
struct Keys {
  const unsigned char* cache;
  Head head;
  int slot_bytes;
  Stored stored;

  __device__ const unsigned char* at(int column) const {
    return cache + head.slot(column) * slot_bytes;
  }
};

// The dimensions beyond the head size, which no copy writes: they meet zeros of the queries, but
// zero times whatever is in shared memory is not always zero.
template <typename T, int D>
__device__ void clear_padding(unsigned char* tile) {
  using Shape = Tile<T, D>;
  constexpr int kWords = (Shape::kPadded - D) * static_cast<int>(sizeof(T)) / 16;
  if constexpr (kWords > 0) {
    for (int i = threadIdx.x; i < Shape::kKeys * kWords; i += blockDim.x) {
      unsigned char* row = tile + i / kWords * Shape::kRowBytes;
      store16(row + D * sizeof(T) + i % kWords * 16, make_uint4(0, 0, 0, 0));
    }
  }
}

// Starts to load the keys of columns `first` and following, up to the head's last.
template <typename T, int D>
__device__ void load_tile(const Keys& keys, int first, unsigned char* tile) {
  using Shape = Tile<T, D>;
  if (keys.stored == Stored::kAsQueries) {
    constexpr int kPieces = D * static_cast<int>(sizeof(T)) / 16;
    for (int i = threadIdx.x; i < Shape::kKeys * kPieces; i += blockDim.x) {
      const int key = i / kPieces, piece = i % kPieces;
      if (first + key < keys.head.columns) {
        copy_async(tile + key * Shape::kRowBytes + piece * 16, keys.at(first + key) + piece * 16);
      }
    }
  } else {
    constexpr int kPieces = D / 16;
    for (int i = threadIdx.x; i < Shape::kKeys * kPieces; i += blockDim.x) {
      const int key = i / kPieces, piece = i % kPieces;
      if (first + key >= keys.head.columns) continue;
      const uint4 raw = load16(keys.at(first + key) + piece * 16);
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      alignas(16) T wide[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint32_t byte = words[j / 4] >> 8 * (j % 4) & 0xffu;
        set_exact(keys.stored == Stored::kE4M3 ? from_e4m3(byte) : from_e5m2(byte), &wide[j]);
      }
      unsigned char* target = tile + key * Shape::kRowBytes + piece * 16 * sizeof(T);
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof(T)); ++j) {
        store16(target + 16 * j, reinterpret_cast<const uint4*>(wide)[j]);
      }
    }
  }
  commit_copies();
}

}  // namespace kvevict
