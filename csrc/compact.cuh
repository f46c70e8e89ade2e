// The kernel of compact.h.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "compact.h"
#include "device.h"
#include "fp8.cuh"
#include "packed.cuh"
#include "store_page.cuh"

namespace kvevict {

constexpr int kCompactThreads = 256;
constexpr int kCompactUnroll = 4;

enum class Move { kDirect, kGather, kScatter };

// A block fills one page of one layer: the tokens of a page belong to one head.
template <typename Unit, Move kMove>
__global__ void compact_kernel(const __grid_constant__ Compact work) {
  StorePage page;
  if (!find_store_page(work, work.first_layer, work.pass_layers, &page)) return;
  const int bs = work.candidates.block_size;
  const Head& head = page.head;
  unsigned char* cache = work.caches.at[page.layer];
  const int64_t page_bytes = static_cast<int64_t>(bs) * work.slot_bytes;
  Unit* const page_in_cache = reinterpret_cast<Unit*>(cache + page.target * page_bytes);
  Unit* const page_in_staging = reinterpret_cast<Unit*>(work.staging + blockIdx.x * page_bytes);
  Unit* const target = kMove == Move::kGather ? page_in_staging : page_in_cache;

  const int units = work.slot_bytes / static_cast<int>(sizeof(Unit));
  const int total = work.page_bytes / static_cast<int>(sizeof(Unit));
  for (int start = threadIdx.x; start < total; start += blockDim.x * kCompactUnroll) {
    Unit moved[kCompactUnroll];
#pragma unroll
    for (int i = 0; i < kCompactUnroll; ++i) {
      const int at = start + i * blockDim.x;
      if (kMove == Move::kScatter) {
        if (at < total) moved[i] = page_in_staging[at];
      } else if (at < total) {
        const int column = page.columns[at / units];
        KVEVICT_ASSERT(column >= 0 && column < head.candidates());
        const int64_t slot = head.slot(column), source = slot >> head.block_shift;
        KVEVICT_ASSERT(source >= 0 && source < work.num_pages);
        KVEVICT_ASSERT(kMove == Move::kGather || source != page.target);
        moved[i] = reinterpret_cast<const Unit*>(cache + slot * work.slot_bytes)[at % units];
      }
    }
#pragma unroll
    for (int i = 0; i < kCompactUnroll; ++i) {
      const int at = start + i * blockDim.x;
      if (at < total) target[at] = moved[i];
    }
  }
}

// An element of a cache, widened.
__device__ inline float element_at(const unsigned char* elements, Element element, int index) {
  switch (element) {
    case Element::kFloat: return reinterpret_cast<const float*>(elements)[index];
    case Element::kHalf: return half_to_float(reinterpret_cast<const uint16_t*>(elements)[index]);
    case Element::kBFloat16: {
      const uint32_t bits = reinterpret_cast<const uint16_t*>(elements)[index];
      return __uint_as_float(bits << 16);
    }
    case Element::kE4M3: return from_e4m3(elements[index]);
    default: return from_e5m2(elements[index]);
  }
}

// What a warp writes of a token of a page of a packed store.
template <int D>
__device__ void pack_token(const Compact& work, int layer, const Head& head, const unsigned char* slot,
                           int token, unsigned char* page) {
  constexpr int kGroups = kScaleGroups<D>;
  const Packed& format = work.packed;
  const int lane = threadIdx.x % kWarp;
  float x[kEach<D>];
  uint32_t keys[kEach<D>], values[kEach<D>];
  uint16_t scales[2][kGroups];
#pragma unroll
  for (int i = 0; i < kEach<D>; ++i) {
    const int d = i * kWarp + lane;
    if (d >= D) {
      x[i] = 0.0f;
      continue;
    }
    const float centre = centre_of<D>(format, layer, head.num_heads, head.head, d);
    x[i] = element_at(slot, work.element, d) * work.key_scales[layer] - centre;
  }
  rotate<D>(format, x);
  quantise<D, false>(x, format.key_bits, format.factors[0], keys, scales[0]);
#pragma unroll
  for (int i = 0; i < kEach<D>; ++i) {
    const int d = i * kWarp + lane;
    x[i] = d < D ? element_at(slot, work.element, D + d) * work.value_scales[layer] : 0.0f;
  }
  rotate<D>(format, x);
  quantise<D, true>(x, format.value_bits, format.factors[1], values, scales[1]);
#pragma unroll
  for (int i = 0; i < kEach<D>; ++i) {
    const int d = i * kWarp + lane;
    if (d >= D) continue;
    unsigned char* codes = page + token * D + d;
    if (format.value_plane == 0) {
      *codes = static_cast<unsigned char>(keys[i] << format.value_bits | values[i]);
    } else {
      *codes = static_cast<unsigned char>(keys[i]);
      codes[format.value_plane] = static_cast<unsigned char>(values[i]);
    }
  }
  uint16_t* target = reinterpret_cast<uint16_t*>(page + format.scale_plane) + token * 2 * kGroups;
#pragma unroll
  for (int i = 0; i < 2 * kGroups; ++i) {
    if (lane == i) target[i] = scales[i / kGroups][i % kGroups];
  }
}

// Copies a token of one page of a packed store to another.
template <int D>
__device__ void move_token(const Packed& format, const unsigned char* from, int source,
                           unsigned char* page, int token) {
  constexpr int kGroups = kScaleGroups<D>;
  const int lane = threadIdx.x % kWarp;
  const auto copy = [&](int plane, int bytes) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(from + plane + source * bytes);
    uint32_t* target = reinterpret_cast<uint32_t*>(page + plane + token * bytes);
    for (int i = lane; i < bytes / 4; i += kWarp) target[i] = words[i];
  };
  copy(0, D);
  if (format.value_plane > 0) copy(format.value_plane, D);
  copy(format.scale_plane, 4 * kGroups);
}

// A block fills one page of one layer, in place or in the staging buffer; a warp takes a token at a time.
template <int D>
__global__ void __launch_bounds__(kCompactThreads) pack_kernel(const __grid_constant__ Compact work) {
  StorePage page;
  if (!find_store_page(work, work.first_layer, work.pass_layers, &page)) return;
  const Head& head = page.head;
  unsigned char* cache = work.caches.at[page.layer];
  const int64_t page_bytes = static_cast<int64_t>(head.block_size) * work.slot_bytes;
  const bool staged = work.staging != nullptr;
  unsigned char* target =
      staged ? work.staging + blockIdx.x * page_bytes : cache + page.target * page_bytes;
  for (int token = threadIdx.x / kWarp; token < head.page_tokens; token += kCompactThreads / kWarp) {
    const int column = page.columns[token];
    KVEVICT_ASSERT(column >= 0 && column < head.candidates());
    const bool stored = column < head.store_columns;
    const int index = stored ? head.page_of(column) : 0;
    const int64_t slot = stored ? 0 : head.tail_slot(column - head.store_columns);
    const int64_t source = stored ? head.page(index) : slot >> head.block_shift;
    KVEVICT_ASSERT(source >= 0 && source < work.num_pages);
    KVEVICT_ASSERT(staged || source != page.target);
    if (stored) {
      const int at = column - index * head.page_tokens;
      move_token<D>(work.packed, cache + source * page_bytes, at, target, token);
    } else {
      pack_token<D>(work, page.layer, head, cache + slot * work.slot_bytes, token, target);
    }
  }
}

// Runs the passes of a launch: `fill` fills pages or the staging buffer, and `scatter` empties it.
template <typename Fill, typename Scatter>
void launch_passes(Compact work, int num_requests, Stream stream, Fill fill, Scatter scatter) {
  const int64_t pages = static_cast<int64_t>(num_requests) * work.store_width * work.candidates.num_heads;
  const int most = work.pass_layers;
  for (; work.first_layer < work.num_layers; work.first_layer += most) {
    const int left = work.num_layers - work.first_layer;
    work.pass_layers = left < most ? left : most;
    const auto run = [&](auto kernel) {
      launch(kernel, pages * work.pass_layers, 1, kCompactThreads, 0, stream, work);
    };
    run(fill);
    if (work.staging != nullptr) run(scatter);
  }
}

template <typename Unit>
void launch_moves(const Compact& work, int num_requests, Stream stream) {
  const auto fill = work.staging == nullptr ? compact_kernel<Unit, Move::kDirect> : compact_kernel<Unit, Move::kGather>;
  launch_passes(work, num_requests, stream, fill, compact_kernel<Unit, Move::kScatter>);
}

#define KVEVICT_PACK(D) \
  case D:               \
    return launch_passes(work, num_requests, stream, pack_kernel<D>, compact_kernel<uint32_t, Move::kScatter>);

void launch_compact(const Compact& work, int num_requests, Stream stream) {
  if (work.packed.key_bits > 0) {
    switch (work.head_size) {
      KVEVICT_HEAD_SIZES(KVEVICT_PACK)
      default: throw std::runtime_error("stores are not packed for this head size");
    }
  }
  // Slots with inline scales are multiples of 8 or 4 only.
  if (work.slot_bytes % 16 == 0) {
    launch_moves<uint4>(work, num_requests, stream);
  } else if (work.slot_bytes % 8 == 0) {
    launch_moves<uint2>(work, num_requests, stream);
  } else {
    launch_moves<uint32_t>(work, num_requests, stream);
  }
}
#undef KVEVICT_PACK

}  // namespace kvevict
