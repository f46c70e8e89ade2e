// One KV head of a due eviction: its pages, and where its columns lie in the flat buffers.
#pragma once

#include "candidates.h"
#include "device.h"

namespace kvevict {

struct Head {
  const int32_t* store;
  const int32_t* positional;
  int num_heads, head, store_pages, tail_pages, block_size, block_shift;
  int page_tokens, store_columns;  // of a page of the store; of all its pages
  uint32_t page_inverse;
  int first_page;  // flat store page
  int columns;     // cached tokens
  int64_t first_column, first_sum;

  // Physical page of the index-th page of the head.
  __device__ int64_t page(int index) const {
    if (index >= store_pages) {
      return static_cast<int64_t>(positional[index - store_pages]) * num_heads + head;
    }
    const int flat = first_page + index;
    return static_cast<int64_t>(store[flat / num_heads]) * num_heads + flat % num_heads;
  }

  // Where a column lies, in slots of the cache, if the store's pages hold block_size tokens as well.
  __device__ int64_t slot(int column) const {
    return page(column >> block_shift) << block_shift | (column & (block_size - 1));
  }

  // Where a token of the tail lies, in slots of the cache.
  __device__ int64_t tail_slot(int token) const {
    const int64_t block = positional[token >> block_shift];
    return (block * num_heads + head) << block_shift | (token & (block_size - 1));
  }

  // Page of the store in which one of its columns lies. Exact below 2^32 / kMaxPageTokens columns.
  __device__ int page_of(int column) const {
    return static_cast<int>(static_cast<uint64_t>(column) * page_inverse >> 32);
  }

  // Where a column of the store lies, in slots of page_tokens a page.
  __device__ int64_t stored_slot(int column) const {
    const int index = page_of(column);
    return page(index) * page_tokens + column - index * page_tokens;
  }

  __device__ int candidates() const { return store_columns + (tail_pages << block_shift); }

  // Columns with a sum over the window's queries: those before the window, and all candidates.
  __device__ int summed(int window) const {
    return columns - window > candidates() ? columns - window : candidates();
  }
};

// `window` is 0 where column sums play no part.
__device__ inline Head find_head(const Candidates& tables, int request, int layer, int head,
                                 int window = 0) {
  const Request& due = tables.requests[request];
  KVEVICT_ASSERT(due.row >= 0 && due.row < tables.num_rows);
  Head found;
  found.num_heads = tables.num_heads;
  found.head = head;
  found.block_size = tables.block_size;
  found.block_shift = tables.block_shift;
  found.page_tokens = tables.page_tokens;
  found.page_inverse = tables.page_inverse;
  found.store = tables.store + due.row * tables.store_stride;
  found.positional = tables.positional + static_cast<int64_t>(request) * tables.positional_width;
  found.first_page = found.store_pages = 0;
  if (due.old_store_blocks > 0) {
    const int32_t* split =
        tables.head_indptr +
        (static_cast<int64_t>(layer) * tables.num_rows + due.row) * (tables.num_heads + 1);
    KVEVICT_ASSERT(split[tables.num_heads] == due.old_store_blocks * tables.num_heads);
    found.first_page = split[head];
    found.store_pages = split[head + 1] - split[head];
  }
  const int heads = tables.num_heads, size = tables.page_tokens;
  const int64_t tail = due.tail_start - due.old_tail_start;
  found.tail_pages = static_cast<int>(tail >> tables.block_shift);
  found.store_columns = found.store_pages * size;
  found.columns = static_cast<int>(found.store_columns + due.num_tokens - due.old_tail_start);
  const int64_t layer_columns = (due.old_store_blocks * size + tail) * heads;
  const int64_t columns_before =
      layer * layer_columns + static_cast<int64_t>(found.first_page) * size + head * tail;
  const int64_t before_window = due.num_tokens - window - due.tail_start;
  const int64_t rest = before_window > 0 ? before_window : 0;
  found.first_column = due.first_column + columns_before;
  found.first_sum = due.first_sum + columns_before + (layer * static_cast<int64_t>(heads) + head) * rest;
  return found;
}

}  // namespace kvevict
