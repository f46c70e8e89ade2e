// The kernel of compact.h.
#pragma once

#include "compact.h"
#include "device.h"
#include "head.cuh"

namespace kvevict {

constexpr int kCompactThreads = 256;
constexpr int kCompactUnroll = 4;

// A block fills one page of one layer: the tokens of a page belong to one head.
template <typename Unit>
__global__ void compact_kernel(const __grid_constant__ Compact work) {
  const int heads = work.candidates.num_heads, bs = work.candidates.block_size;
  const int flats = work.store_width * heads;
  const int flat = blockIdx.x % flats;
  const int layer = blockIdx.x / flats % work.num_layers;
  const int request = blockIdx.x / flats / work.num_layers;
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
  Unit* target = reinterpret_cast<Unit*>(cache + target_page * bs * work.slot_bytes);

  const int units = work.slot_bytes / static_cast<int>(sizeof(Unit));
  const int total = bs * units;
  for (int start = threadIdx.x; start < total; start += blockDim.x * kCompactUnroll) {
    Unit moved[kCompactUnroll];
#pragma unroll
    for (int i = 0; i < kCompactUnroll; ++i) {
      const int at = start + i * blockDim.x;
      if (at < total) {
        const int column = columns[at / units];
        KVEVICT_ASSERT(column >= 0 && column < head.candidates());
        const int64_t slot = head.slot(column), page = slot >> head.block_shift;
        KVEVICT_ASSERT(page >= 0 && page < work.num_pages && page != target_page);
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

void launch_compact(const Compact& work, int num_requests, Stream stream) {
  const int64_t blocks = static_cast<int64_t>(num_requests) * work.num_layers * work.store_width *
                         work.candidates.num_heads;
  const auto run = [&](auto kernel) {
    launch(kernel, blocks, 1, kCompactThreads, 0, stream, work);
  };
  // Slots with inline scales are multiples of 8 or 4 only.
  if (work.slot_bytes % 16 == 0) {
    run(compact_kernel<uint4>);
  } else if (work.slot_bytes % 8 == 0) {
    run(compact_kernel<uint2>);
  } else {
    run(compact_kernel<uint32_t>);
  }
}

}  // namespace kvevict
