// The tables that say where the candidates of due evictions lie, checked.
#pragma once

#include <type_traits>
#include <vector>

#include "candidates.h"
#include "checks.h"
#include "layers.h"
#include "numbers.h"

namespace kvevict {

// Without the blocks: how many candidates there are, not where.
inline Candidates check_split(const Tensor& requests, const Tensor& head_indptr, int64_t layers,
                              int64_t heads, int64_t block_size, int64_t page_tokens,
                              const Tensor& first) {
  check_block_size(block_size);
  STD_TORCH_CHECK(page_tokens >= block_size && page_tokens <= kMaxPageTokens,
                  "a page of a store must hold ", block_size, " to ", kMaxPageTokens,
                  " tokens, not ", page_tokens);
  STD_TORCH_CHECK(heads >= 1, "head_indptr must have H + 1 columns, not ", heads + 1);
  check(requests, "requests", ScalarType::Long, {kAny, kRequestFields}, first);
  check(head_indptr, "head_indptr", ScalarType::Int, {layers, kAny, heads + 1}, first);
  Candidates tables{};
  tables.requests = in<Request>(requests);
  tables.head_indptr = in<int32_t>(head_indptr);
  tables.num_rows = narrow(head_indptr.size(1), "rows");
  tables.num_heads = narrow(heads, "KV heads");
  tables.block_size = narrow(block_size, "block size");
  tables.page_tokens = static_cast<int>(page_tokens);
  tables.page_inverse = inverse_of(tables.page_tokens);
  while (1 << tables.block_shift < tables.block_size) ++tables.block_shift;
  return tables;
}

inline Candidates check_candidates(const Tensor& requests, const Tensor& head_indptr,
                                   const Tensor& old_store, const Tensor& positional,
                                   int64_t layers, int64_t heads, int64_t block_size,
                                   int64_t page_tokens, const Tensor& first) {
  Candidates tables =
      check_split(requests, head_indptr, layers, heads, block_size, page_tokens, first);
  check_rows(old_store, "old_store", ScalarType::Int, {head_indptr.size(1), kAny}, first);
  check(positional, "positional", ScalarType::Int, {requests.size(0), kAny}, first);
  tables.store = in<int32_t>(old_store);
  tables.positional = in<int32_t>(positional);
  tables.store_stride = old_store.stride(0);
  tables.positional_width = narrow(positional.size(1), "positional blocks");
  return tables;
}

// Caches [blocks, H, block_size, slot] of equal shape and dtype, in the layout LBHNC.
// `Byte` is const where they are only read.
template <typename Byte>
Layers<Byte> check_caches(const std::vector<Tensor>& caches, const Tensor& first) {
  check_layers(caches.size());
  Layers<Byte> layers{};
  const Tensor& like = caches[0];
  check_sizes(like, "caches", {kAny, kAny, kAny, kAny});
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& cache = caches[i];
    check(cache, "caches", like.scalar_type(),
          {like.size(0), like.size(1), like.size(2), like.size(3)}, first);
    check_aligned(cache, "caches", 16);
    if constexpr (std::is_const_v<Byte>) {
      layers.at[i] = in<std::remove_const_t<Byte>>(cache);
    } else {
      layers.at[i] = out<Byte>(cache);
    }
  }
  return layers;
}

inline Element element_of(const Tensor& cache) {
  switch (cache.scalar_type()) {
    case ScalarType::Float: return Element::kFloat;
    case ScalarType::Half: return Element::kHalf;
    case ScalarType::BFloat16: return Element::kBFloat16;
    case ScalarType::Float8_e4m3fn: return Element::kE4M3;
    case ScalarType::Float8_e5m2: return Element::kE5M2;
    default:
      STD_TORCH_CHECK(false, "caches must be float32, float16, bfloat16, float8_e4m3fn or "
                      "float8_e5m2, not ", torch::headeronly::toString(cache.scalar_type()));
  }
}

}  // namespace kvevict
