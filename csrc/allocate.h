// allocate: the S * H pages of each layer with the highest sums of scores, whichever head they are in.
//
// ops/reference/allocate.py, adaptive_pages (Ada-KV Theorem 3.3 in whole pages), on sorted scores.
// Every head's first max(1, floor * S) pages are taken; ties go to the lower head, then the lower page.
#pragma once

#include "cuda_types.h"
#include "sizes.h"

namespace kvevict {

struct Allocate {
  int32_t* pages;               // [groups, H]
  uint64_t* gains;              // flat, one a page of scores: ordered sums
  const uint32_t* keys;         // flat: sorted scores (sort.cuh)
  const int64_t* start;         // [groups, H] first score, whole pages
  const int32_t* length;        // [groups, H] scores, whole pages
  const int32_t* caps;          // [groups, H] pages that a head may keep
  const int32_t* store_blocks;  // [groups] S
  double floor;
  int num_groups, num_heads, block_size;
};

void launch_allocate(const Allocate& work, Stream stream);

}  // namespace kvevict
