#include "candidates_check.h"
#include "launchers.h"
#include "packed_check.h"
#include "score.h"

namespace kvevict {

namespace {

Stored stored_as(const Tensor& cache, const Tensor& ring) {
  const ScalarType dtype = cache.scalar_type();
  if (dtype == ScalarType::Float8_e4m3fn) return Stored::kE4M3;
  if (dtype == ScalarType::Float8_e5m2) return Stored::kE5M2;
  STD_TORCH_CHECK(dtype == ring.scalar_type(), "caches must have the dtype of the rings (",
                  torch::headeronly::toString(ring.scalar_type()),
                  "), float8_e4m3fn or float8_e5m2, not ", torch::headeronly::toString(dtype));
  return Stored::kAsQueries;
}

// What stores are, as the operations take it.
struct Format {
  int64_t page_tokens, key_bits, value_bits;
  const std::vector<int64_t>& signs;
  const Tensor& centres;
};

// What all passes share.
Score check_score(Pass pass, const std::vector<Tensor>& caches, const std::vector<Tensor>& rings,
                  const std::vector<double>& scales, double softcap, int64_t window,
                  int64_t max_columns, const Tensor& requests, const Tensor& head_indptr,
                  const Tensor& old_store, const Tensor& positional, const Format& format) {
  Score work{};
  work.caches = check_caches<const unsigned char>(caches, requests);
  const int64_t layers = caches.size(), heads = caches[0].size(1), block_size = caches[0].size(2);
  STD_TORCH_CHECK(rings.size() == caches.size() && scales.size() == caches.size(),
                  "caches, rings and scales must be of as many layers, not ", caches.size(), ", ",
                  rings.size(), " and ", scales.size());
  STD_TORCH_CHECK(window >= 1, "window must be at least 1, not ", window);
  const Tensor& ring = rings[0];
  check_sizes(ring, "rings", {kAny, kAny, kAny});
  const int64_t head_size = ring.size(2);
  check_among(head_size, "head size", {KVEVICT_HEAD_SIZES(KVEVICT_COMMA)});
  STD_TORCH_CHECK(ring.size(1) % heads == 0 && ring.size(1) >= heads, "query heads (", ring.size(1),
                  ") must be a multiple of KV heads (", heads, ")");
  STD_TORCH_CHECK(ring.size(0) % window == 0, "rings must hold whole slots of ", window, " queries");
  for (size_t i = 0; i < rings.size(); ++i) {
    check(rings[i], "rings", ring.scalar_type(), {ring.size(0), ring.size(1), head_size}, requests);
    check_aligned(rings[i], "rings", 16);
    work.rings.at[i] = in<unsigned char>(rings[i]);
    work.scales[i] = static_cast<float>(scales[i]);
  }
  const int64_t slot = caches[0].size(3) * caches[0].element_size();
  STD_TORCH_CHECK(caches[0].size(3) >= head_size && slot % 16 == 0,
                  "a slot of a head must be a multiple of 16 bytes and hold a key, not ", slot,
                  " bytes");
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     block_size, format.page_tokens, requests);
  work.stored = stored_as(caches[0], ring);
  work.packed = check_packed(format.page_tokens, head_size, format.key_bits, format.value_bits,
                             format.signs, format.centres, layers, heads, block_size * slot,
                             requests);
  STD_TORCH_CHECK(format.key_bits == 0 || work.stored == Stored::kAsQueries,
                  "scores of packed stores need a cache of the dtype of the rings");
  STD_TORCH_CHECK(format.key_bits > 0 || format.page_tokens == block_size,
                  "pages of a store that is not packed hold ", block_size, " tokens, not ",
                  format.page_tokens);
  work.softcap = static_cast<float>(softcap);
  work.num_layers = narrow(layers, "layers");
  work.group = narrow(ring.size(1) / heads, "query heads of a KV head");
  work.window = narrow(window, "window");
  work.slot_bytes = narrow(slot, "bytes of a slot");
  const int columns = narrow(max_columns, "columns"), size = pass == Pass::kPeaks ? kPeakChunk : kChunk;
  work.chunks = static_cast<int>((static_cast<int64_t>(columns) + size - 1) / size);
  return work;
}

void run(const Score& work, Pass pass, const Tensor& ring, int64_t heads, Stream stream) {
  const int head_size = narrow(ring.size(2), "head size");
  switch (ring.scalar_type()) {
    case ScalarType::Half: return launch_score<Half>(work, pass, head_size, heads, stream);
    case ScalarType::BFloat16: return launch_score<BFloat16>(work, pass, head_size, heads, stream);
    case ScalarType::Float: return launch_score<float>(work, pass, head_size, heads, stream);
    default:
      STD_TORCH_CHECK(false, "rings must be float16, bfloat16 or float32, not ",
                      torch::headeronly::toString(ring.scalar_type()));
  }
}

// The passes over the keys that know the log-sum-exp of every row.
void second_pass(Pass pass, const Tensor& sums, const Tensor& lse, const std::vector<Tensor>& caches,
                 const std::vector<Tensor>& rings, const std::vector<double>& scales, double softcap,
                 int64_t window, int64_t max_columns, const Tensor& requests,
                 const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                 const Format& format) {
  const Launch launch(sums);
  Score work = check_score(pass, caches, rings, scales, softcap, window, max_columns, requests,
                           head_indptr, old_store, positional, format);
  const int64_t due = requests.size(0), layers = work.num_layers, heads = work.candidates.num_heads;
  const int64_t rows = static_cast<int64_t>(work.group) * work.window;
  const int groups = query_groups(narrow(rows, "rows"), narrow(rings[0].size(2), "head size"));
  check(lse, "lse", ScalarType::Float, {due, layers, heads, rows}, requests);
  check(sums, "sums", ScalarType::Float, {groups, kAny}, requests);
  work.lse = in<float>(lse);
  work.sums = out<float>(sums);
  work.num_sums = sums.size(1);
  run(work, pass, rings[0], due * layers * heads, launch.stream());
  launch.check();
}

}  // namespace

void window_lse(const Tensor& lse, const Tensor& partial, std::vector<Tensor> caches,
                std::vector<Tensor> rings, std::vector<double> scales, double softcap,
                int64_t window, int64_t max_columns, const Tensor& requests,
                const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens, int64_t key_bits, int64_t value_bits,
                std::vector<int64_t> signs, const Tensor& centres) {
  const Launch launch(lse);
  Score work = check_score(Pass::kLse, caches, rings, scales, softcap, window, max_columns, requests,
                           head_indptr, old_store, positional,
                           {page_tokens, key_bits, value_bits, signs, centres});
  const int64_t due = requests.size(0), layers = work.num_layers, heads = work.candidates.num_heads;
  const int64_t rows = static_cast<int64_t>(work.group) * work.window;
  check(lse, "lse", ScalarType::Float, {due, layers, heads, rows}, requests);
  check(partial, "partial", ScalarType::Float, {due * layers * heads, work.chunks, rows, 2},
        requests);
  work.lse_out = out<float>(lse);
  work.partial = out<float2>(partial);
  run(work, Pass::kLse, rings[0], due * layers * heads, launch.stream());
  launch.check();
}

void column_sums(const Tensor& sums, const Tensor& lse, std::vector<Tensor> caches,
                 std::vector<Tensor> rings, std::vector<double> scales, double softcap,
                 int64_t window, int64_t max_columns, const Tensor& requests,
                 const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens, int64_t key_bits, int64_t value_bits,
                std::vector<int64_t> signs, const Tensor& centres) {
  second_pass(Pass::kColumns, sums, lse, caches, rings, scales, softcap, window, max_columns, requests,
              head_indptr, old_store, positional, {page_tokens, key_bits, value_bits, signs, centres});
}

void window_peaks(const Tensor& sums, const Tensor& lse, std::vector<Tensor> caches,
                  std::vector<Tensor> rings, std::vector<double> scales, double softcap,
                  int64_t window, int64_t max_columns, const Tensor& requests,
                  const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens, int64_t key_bits, int64_t value_bits,
                std::vector<int64_t> signs, const Tensor& centres) {
  second_pass(Pass::kPeaks, sums, lse, caches, rings, scales, softcap, window, max_columns, requests,
              head_indptr, old_store, positional, {page_tokens, key_bits, value_bits, signs, centres});
}

}  // namespace kvevict
