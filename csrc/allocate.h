// allocate: the S * H pages of each layer that gain most, whichever head they are in.
//
// ops/torch/allocate.py. A page gains the sum of its scores, which are sorted (adaptive_pages, Ada-KV
// Theorem 3.3 in whole pages), and every head's first max(1, floor * S) pages are taken; or page k gains
// its head's share over k + 1/2 (shared_pages, Webster's method), and every head's first page is taken.
// Ties go to the lower head, then the lower page.
#pragma once

#include "cuda_types.h"
#include "sizes.h"

namespace kvevict {

struct Allocate {
  int32_t* pages;               // [groups, H]
  uint64_t* gains;              // flat: ordered gains, those of a head from start / page_tokens on
  const uint32_t* keys;         // flat: sorted scores (sort.cuh); unused where shares are fixed
  const double* shares;         // [layers, H] fixed shares; null where scores decide
  const int64_t* start;         // [groups, H] first score
  const int32_t* length;        // [groups, H] scores; those that fill no page are in none
  const int32_t* caps;          // [groups, H] pages that a head may keep
  const int32_t* store_blocks;  // [groups] S
  double floor;
  int64_t num_gains;
  int num_groups, num_heads, num_layers, page_tokens;
};

// With shares, or with sorted keys.
void launch_allocate(const Allocate& work, Stream stream);

}  // namespace kvevict
