// compact: survivors of every layer and request to the new store. Bytes are copied, so any KV dtype
// moves as it is, with whatever scales lie inside a slot. To packed stores, tokens of packed stores move
// as they are, and all others are rotated and quantised.
//
// ops/torch/pages.py, compact_index, and the copy. Without staging, sources and targets share no block.
// With it they may: as many layers as it holds are gathered there, then scattered, pass after pass.
#pragma once

#include "candidates.h"
#include "cuda_types.h"
#include "layers.h"
#include "numbers.h"
#include "packed.h"

namespace kvevict {

struct Compact {
  Layers<unsigned char> caches;  // [blocks, H, block_size, slot] each
  Candidates candidates;
  const int32_t* columns;      // kept columns of each head, ascending; the heads of a layer in order
  const int32_t* pages;        // [E, L, H] pages each head keeps
  const int32_t* store;        // [E, store_width] blocks to fill
  int64_t num_pages;           // of a cache
  unsigned char* staging;      // [E, pass layers, store_width * H] pages, or null
  int slot_bytes, num_layers, store_width;
  int first_layer, pass_layers;
  int page_bytes;              // that an eviction writes of a page of a store
  Packed packed;               // the rest is for packed stores
  float key_scales[kMaxLayers], value_scales[kMaxLayers];  // of FP8 caches, else 1
  Element element;             // of the caches
  int head_size;
};

void launch_compact(const Compact& work, int num_requests, Stream stream);

}  // namespace kvevict
