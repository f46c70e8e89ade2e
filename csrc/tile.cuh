// A tile of keys in shared memory, gathered from head pages.
#pragma once

#include "device.h"
#include "fp8.cuh"
#include "head.cuh"
#include "packed.cuh"

namespace kvevict {

// Sizes that follow from the dtype of the queries and the head size.
template <typename T, int D>
struct Tile {
  // Matrix products take 16 of the head's dimensions at a time, and a lane loads 8 of every 32.
  static constexpr int kPadded = (D + 31) / 32 * 32;
  static constexpr int kParts = kPadded / 32;
  static constexpr int kDense = kPadded * static_cast<int>(sizeof(T));
  // Rows of an odd multiple of 64 bytes: eight lanes that read 16 bytes of two rows meet no bank twice.
  // float32 is read by 4 bytes of every other row, four lanes apart: rows of 16 bytes more do it.
  static constexpr int kRowBytes = sizeof(T) == 4 ? kDense + 16 : kDense % 128 ? kDense : kDense + 64;
  static constexpr int kKeys = 64 * row_blocks(D) / static_cast<int>(sizeof(T));
  static constexpr int kBytes = kKeys * kRowBytes;
  // FP8 keys as they are stored: two tiles of them take the place of the second tile.
  static constexpr int kRawBytes = kKeys * D;
  static_assert(2 * kRawBytes <= kBytes);
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
  const Packed* packed;  // how the store's pages hold them, where kernels have kPacked
  int layer;

  template <bool kPacked>
  __device__ const unsigned char* at(int column) const {
    const int64_t slot = kPacked ? head.tail_slot(column - head.store_columns) : head.slot(column);
    return cache + slot * slot_bytes;
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

// Starts to load the keys of columns `first` and following, up to the head's last, as the cache
// stores them, but for those of packed pages. Four lanes share a key, so that its page is looked up once for several pieces of 16
// bytes.
template <typename Shape, int kKeyBytes, int kRowBytes, bool kPacked = false>
__device__ void load_rows(const Keys& keys, int first, unsigned char* rows) {
  for (int i = threadIdx.x; i < Shape::kKeys * 4; i += blockDim.x) {
    const int key = i / 4, lane = i % 4 * 16;
    if (first + key >= keys.head.columns) continue;
    if (kPacked && first + key < keys.head.store_columns) continue;
    const unsigned char* source = keys.at<kPacked>(first + key) + lane;
    unsigned char* target = rows + key * kRowBytes + lane;
#pragma unroll
    for (int at = 0; at < kKeyBytes; at += 64) {
      if (kKeyBytes % 64 == 0 || at + lane < kKeyBytes) copy_async(target + at, source + at);
    }
  }
  commit_copies();
}

// Writes the keys of packed pages among the columns `first` and following. A warp takes a few keys at once.
template <typename T, int D>
__device__ void unpack_rows(const Keys& keys, int first, unsigned char* tile) {
  using Shape = Tile<T, D>;
  constexpr int kGroups = kScaleGroups<D>, kOfGroup = kEach<D> / kGroups, kKeysAtOnce = 2;
  const Packed& format = *keys.packed;
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const int left = keys.head.store_columns - first, count = left < Shape::kKeys ? left : Shape::kKeys;
  const int64_t page_bytes = static_cast<int64_t>(keys.slot_bytes) << keys.head.block_shift;
  const int shift = format.value_plane > 0 ? 0 : format.value_bits;
  const float middle = static_cast<float>((1 << format.key_bits) - 1) / 2;
  for (int key = threadIdx.x / kWarp * kKeysAtOnce; key < count; key += warps * kKeysAtOnce) {
    float x[kKeysAtOnce][kEach<D>], centre[kEach<D>];
#pragma unroll
    for (int i = 0; i < kEach<D>; ++i) {
      const int d = i * kWarp + lane;
      centre[i] = d < D ? centre_of<D>(format, keys.layer, keys.head.num_heads, keys.head.head, d) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kKeysAtOnce; ++j) {
      const int column = first + (key + j < count ? key + j : key);
      const int index = keys.head.page_of(column), at = column - index * keys.head.page_tokens;
      const unsigned char* page = keys.cache + keys.head.page(index) * page_bytes;
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(page + format.scale_plane) + at * 2 * kGroups;
#pragma unroll
      for (int i = 0; i < kEach<D>; ++i) {
        const int d = i * kWarp + lane;
        const float level = d < D ? static_cast<float>(page[at * D + d] >> shift) - middle : 0.0f;
        x[j][i] = level * half_to_float(scales[i / kOfGroup]);
      }
    }
#pragma unroll
    for (int j = 0; j < kKeysAtOnce; ++j) {
      rotate_back<D>(format, x[j]);
      T* row = reinterpret_cast<T*>(tile + (key + j) * Shape::kRowBytes);
#pragma unroll
      for (int i = 0; i < kEach<D>; ++i) {
        const int d = i * kWarp + lane;
        if (d < D && key + j < count) set_rounded(x[j][i] + centre[i], row + d);
      }
    }
  }
}

// Loads a tile of keys into the `stage`-th buffer. FP8 keys use the buffers after the first one.
template <typename T, int D, bool kPacked>
__device__ void load_tile(const Keys& keys, int first, unsigned char* tiles, int stage) {
  using Shape = Tile<T, D>;
  if (keys.stored == Stored::kAsQueries) {
    constexpr int kKeyBytes = D * static_cast<int>(sizeof(T));
    unsigned char* tile = tiles + stage * Shape::kBytes;
    load_rows<Shape, kKeyBytes, Shape::kRowBytes, kPacked>(keys, first, tile);
    if constexpr (kPacked) unpack_rows<T, D>(keys, first, tile);
  } else {
    unsigned char* raw = tiles + Shape::kBytes + stage * Shape::kRawBytes;
    load_rows<Shape, D, D>(keys, first, raw);
  }
}

// Widens the FP8 keys of a buffer into the first tile.
template <typename T, int D, float (*Value)(uint32_t)>
__device__ void widen_rows(const unsigned char* raw, unsigned char* tile) {
  using Shape = Tile<T, D>;
  constexpr int kPieces = D / 16;
  for (int i = threadIdx.x; i < Shape::kKeys * kPieces; i += blockDim.x) {
    const uint4 piece = load16(raw + i * 16);
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    alignas(16) T wide[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) set_exact(Value(words[j / 4] >> 8 * (j % 4) & 0xffu), &wide[j]);
    unsigned char* target = tile + i / kPieces * Shape::kRowBytes + i % kPieces * 16 * sizeof(T);
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof(T)); ++j) {
      store16(target + 16 * j, reinterpret_cast<const uint4*>(wide)[j]);
    }
  }
}

// The `stage`-th tile as the products take it. Called by a whole block that sees what was loaded.
template <typename T, int D>
__device__ const unsigned char* ready_tile(Stored stored, unsigned char* tiles, int stage) {
  using Shape = Tile<T, D>;
  if (stored == Stored::kAsQueries) return tiles + stage * Shape::kBytes;
  const unsigned char* raw = tiles + Shape::kBytes + stage * Shape::kRawBytes;
  if (stored == Stored::kE4M3) {
    widen_rows<T, D, from_e4m3>(raw, tiles);
  } else {
    widen_rows<T, D, from_e5m2>(raw, tiles);
  }
  __syncthreads();
  return tiles;
}

}  // namespace kvevict
