// The kernel of compact.h.
#pragma once

#include "compact.h"
#include "device.h"
#include "head.cuh"

namespace kvevict {

constexpr int kCompactThreads = 256;
constexpr int kCompactUnroll = 4;

enum class Move { kDirect, kGather, kScatter };

// A block fills one page of one layer: the tokens of a page belong to one head.
template <typename Unit, Move kMove>
__global__ void compact_kernel(const __grid_constant__ Compact work) {
  const int heads = work.candidates.num_heads, bs = work.candidates.block_size;
  const int flats = work.store_width * heads;
  const int flat = blockIdx.x % flats;
  const int layer = work.first_layer + blockIdx.x / flats % work.pass_layers;
  const int request = blockIdx.x / flats / work.pass_layers;
  const Request& due = work.candidates.requests[request];
  if (flat >= due.store_blocks * heads) return;

  const int32_t* pages = work.pages + (static_cast<int64_t>(request) * work.num_layers + layer) * heads;
  int owner = 0, before = 0;
  while (owner < heads - 1 && before + pages[owner] <= flat) before += pages[owner++];
  KVEVICT_ASSERT(flat < before + pages[owner]);
  const Head head = find_head(work.candidates, request, layer, owner);

  const int64_t target_page =
      static_cast<int64_t>(work.store[static_cast<int64_t>(request) * work.store_width + flat / heads]) *
          heads + flat % heads;
  KVEVICT_ASSERT(target_page >= 0 && target_page < work.num_pages);
  const int32_t* columns =
      work.columns + due.first_kept + (layer * due.store_blocks * heads + flat) * bs;
  unsigned char* cache = work.caches.at[layer];
  const int64_t page_bytes = static_cast<int64_t>(bs) * work.slot_bytes;
  Unit* const page_in_cache = reinterpret_cast<Unit*>(cache + target_page * page_bytes);
  Unit* const page_in_staging = reinterpret_cast<Unit*>(work.staging + blockIdx.x * page_bytes);
  Unit* const target = kMove == Move::kGather ? page_in_staging : page_in_cache;

  const int units = work.slot_bytes / static_cast<int>(sizeof(Unit));
  const int total = bs * units;
  for (int start = threadIdx.x; start < total; start += blockDim.x * kCompactUnroll) {
    Unit moved[kCompactUnroll];
#pragma unroll
    for (int i = 0; i < kCompactUnroll; ++i) {
      const int at = start + i * blockDim.x;
      if (kMove == Move::kScatter) {
        if (at < total) moved[i] = page_in_staging[at];
      } else if (at < total) {
        const int column = columns[at / units];
        KVEVICT_ASSERT(column >= 0 && column < head.candidates());
        const int64_t slot = head.slot(column), page = slot >> head.block_shift;
        KVEVICT_ASSERT(page >= 0 && page < work.num_pages);
        KVEVICT_ASSERT(kMove == Move::kGather || page != target_page);
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

template <typename Unit>
void launch_moves(Compact work, int num_requests, Stream stream) {
  const int64_t pages = static_cast<int64_t>(num_requests) * work.store_width * work.candidates.num_heads;
  const int most = work.pass_layers;
  for (; work.first_layer < work.num_layers; work.first_layer += most) {
    const int left = work.num_layers - work.first_layer;
    work.pass_layers = left < most ? left : most;
    const auto run = [&](auto kernel) {
      launch(kernel, pages * work.pass_layers, 1, kCompactThreads, 0, stream, work);
    };
    if (work.staging == nullptr) {
      run(compact_kernel<Unit, Move::kDirect>);
    } else {
      run(compact_kernel<Unit, Move::kGather>);
      run(compact_kernel<Unit, Move::kScatter>);
    }
  }
}

void launch_compact(const Compact& work, int num_requests, Stream stream) {
  // Slots with inline scales are multiples of 8 or 4 only.
  if (work.slot_bytes % 16 == 0) {
    launch_moves<uint4>(work, num_requests, stream);
  } else if (work.slot_bytes % 8 == 0) {
    launch_moves<uint2>(work, num_requests, stream);
  } else {
    launch_moves<uint32_t>(work, num_requests, stream);
  }
}

}  // namespace kvevict
