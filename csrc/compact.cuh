// The kernel of compact.h.
#pragma once

#include "compact.h"
#include "device.h"
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
  const int total = bs * units;
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
