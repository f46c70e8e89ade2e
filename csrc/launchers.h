// Every operation, as it is bound. A launcher checks shapes, dtypes, devices and strides, and throws;
// what only the device knows is asserted there. Contracts: docs/dev/kernels.md.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace kvevict {

using torch::stable::Tensor;

// CUDA versions as 1000 * major + 10 * minor: of the runtime that is linked in, and the newest that the
// driver serves, 0 without one.
int64_t cuda_built();
int64_t cuda_driver();

// Whether the kernels were compiled for the current device, or for an older one with PTX: 1 or 0.
int64_t cuda_serves();

void compact(std::vector<Tensor> caches, const Tensor& columns, const Tensor& pages,
             const Tensor& store, const Tensor& requests, const Tensor& head_indptr,
             const Tensor& old_store, const Tensor& positional, const Tensor& staging,
             int64_t page_tokens, int64_t key_bits, int64_t value_bits,
                std::vector<int64_t> signs, const Tensor& centres,
             std::vector<double> key_scales, std::vector<double> value_scales);

void select(const Tensor& columns, const Tensor& scores, const Tensor& start, const Tensor& length,
            const Tensor& pages, const Tensor& first_kept, int64_t page_tokens);

void allocate(const Tensor& pages, const Tensor& keys, const Tensor& other, const Tensor& gains,
              const Tensor& scores, const Tensor& start, const Tensor& length, const Tensor& caps,
              const Tensor& store_blocks, int64_t page_tokens, double floor);

void allocate_shares(const Tensor& pages, const Tensor& gains, const Tensor& shares,
                     const Tensor& start, const Tensor& caps, const Tensor& store_blocks,
                     int64_t page_tokens);

void rows(const Tensor& start, const Tensor& length, const Tensor& caps, const Tensor& first_kept,
          const Tensor& store_blocks, const Tensor& requests, const Tensor& head_indptr,
          int64_t block_size, int64_t page_tokens);

void window_lse(const Tensor& lse, const Tensor& partial, std::vector<Tensor> caches,
                std::vector<Tensor> rings, std::vector<double> scales, double softcap,
                int64_t window, int64_t max_columns, const Tensor& requests,
                const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens, int64_t key_bits, int64_t value_bits,
                std::vector<int64_t> signs, const Tensor& centres);

void column_sums(const Tensor& sums, const Tensor& lse, std::vector<Tensor> caches,
                 std::vector<Tensor> rings, std::vector<double> scales, double softcap,
                 int64_t window, int64_t max_columns, const Tensor& requests,
                 const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens, int64_t key_bits, int64_t value_bits,
                std::vector<int64_t> signs, const Tensor& centres);

void window_peaks(const Tensor& sums, const Tensor& lse, std::vector<Tensor> caches,
                  std::vector<Tensor> rings, std::vector<double> scales, double softcap,
                  int64_t window, int64_t max_columns, const Tensor& requests,
                  const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens, int64_t key_bits, int64_t value_bits,
                std::vector<int64_t> signs, const Tensor& centres);

void pool(const Tensor& scores, const Tensor& sums, const Tensor& requests,
          const Tensor& head_indptr, int64_t block_size, int64_t page_tokens, int64_t window,
          int64_t max_columns, double factor, int64_t kernel, bool average);

void value_norms(const Tensor& norms, const Tensor& totals, std::vector<Tensor> caches,
                 const Tensor& requests, const Tensor& head_indptr, const Tensor& old_store,
                 const Tensor& positional,
                int64_t page_tokens);

void defend(const Tensor& scores, const Tensor& shares, const Tensor& means, const Tensor& peaks,
            const Tensor& norms, const Tensor& totals, std::vector<Tensor> kept, int64_t window,
            int64_t max_columns, const Tensor& requests, const Tensor& head_indptr,
            const Tensor& old_store, const Tensor& positional,
                int64_t block_size);

void keep_page_values(std::vector<Tensor> kept, const Tensor& numbers, const Tensor& columns,
                      const Tensor& pages, const Tensor& store, const Tensor& requests,
                      const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t block_size);

void probe_keys(const Tensor& parts, const Tensor& norms, const Tensor& totals,
                std::vector<Tensor> caches, const Tensor& weights, const Tensor& ages,
                std::vector<Tensor> rotary, bool interleaved, int64_t width, const Tensor& requests,
                const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens);

void probe_networks(const Tensor& parts, const Tensor& norms, const Tensor& totals,
                    std::vector<Tensor> caches, const Tensor& weights, const Tensor& shares,
                    std::vector<Tensor> rotary, bool interleaved, const Tensor& requests,
                    const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens);

void probe_scores(const Tensor& scores, const Tensor& parts, const Tensor& means,
                  const Tensor& peaks, const Tensor& norms, const Tensor& totals,
                  const Tensor& window_weights, std::vector<Tensor> kept, int64_t window,
                  int64_t max_columns, const Tensor& requests, const Tensor& head_indptr,
                  const Tensor& old_store, const Tensor& positional,
                int64_t block_size);

}  // namespace kvevict
