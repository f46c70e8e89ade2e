// The operations' names and schemas in torch, on the libtorch stable ABI.
#include <torch/csrc/stable/library.h>

#include "launchers.h"

#ifdef KVEVICT_EMULATE
#define KVEVICT_LIBRARY vllm_kvevict_emulated
#define KVEVICT_DEVICE CPU
#else
#define KVEVICT_LIBRARY vllm_kvevict
#define KVEVICT_DEVICE CUDA
#endif
// Names are pasted by torch's macros: expand ours first.
#define KVEVICT_DEFINE(library, module) STABLE_TORCH_LIBRARY(library, module)
#define KVEVICT_IMPLEMENT(library, device, module) STABLE_TORCH_LIBRARY_IMPL(library, device, module)

KVEVICT_DEFINE(KVEVICT_LIBRARY, module) {
  module.def(
      "compact(Tensor(a!)[] caches, Tensor columns, Tensor pages, Tensor store, Tensor requests, "
      "Tensor head_indptr, Tensor old_store, Tensor positional, Tensor(b!) staging, int page_tokens, "
      "int key_bits, int value_bits, int[] signs, Tensor centres, float[] key_scales, "
      "float[] value_scales) -> ()");
  module.def(
      "select(Tensor(a!) columns, Tensor scores, Tensor start, Tensor length, Tensor pages, "
      "Tensor first_kept, int page_tokens) -> ()");
  module.def(
      "allocate(Tensor(a!) pages, Tensor(b!) keys, Tensor(c!) other, Tensor(d!) gains, "
      "Tensor scores, Tensor start, Tensor length, Tensor caps, Tensor store_blocks, "
      "int page_tokens, float floor) -> ()");
  module.def(
      "allocate_shares(Tensor(a!) pages, Tensor(b!) gains, Tensor shares, Tensor start, Tensor caps, "
      "Tensor store_blocks, int page_tokens) -> ()");
  module.def(
      "rows(Tensor(a!) start, Tensor(b!) length, Tensor(c!) caps, Tensor(d!) first_kept, "
      "Tensor(e!) store_blocks, Tensor requests, Tensor head_indptr, int block_size, "
      "int page_tokens) -> ()");
  module.def(
      "window_lse(Tensor(a!) lse, Tensor(b!) partial, Tensor[] caches, Tensor[] rings, "
      "float[] scales, float softcap, int window, int max_columns, Tensor requests, "
      "Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int page_tokens, int key_bits, int value_bits, int[] signs, Tensor centres) -> ()");
  module.def(
      "column_sums(Tensor(a!) sums, Tensor lse, Tensor[] caches, Tensor[] rings, "
      "float[] scales, float softcap, int window, int max_columns, Tensor requests, "
      "Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int page_tokens, int key_bits, int value_bits, int[] signs, Tensor centres) -> ()");
  module.def(
      "pool(Tensor(a!) scores, Tensor sums, Tensor requests, Tensor head_indptr, int block_size, "
      "int page_tokens, int window, int max_columns, float factor, int kernel, bool average) -> ()");
  module.def(
      "window_peaks(Tensor(a!) peaks, Tensor lse, Tensor[] caches, Tensor[] rings, "
      "float[] scales, float softcap, int window, int max_columns, Tensor requests, "
      "Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int page_tokens, int key_bits, int value_bits, int[] signs, Tensor centres) -> ()");
  module.def(
      "value_norms(Tensor(a!) norms, Tensor(b!) totals, Tensor[] caches, Tensor requests, "
      "Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int page_tokens) -> ()");
  module.def(
      "defend(Tensor(a!) scores, Tensor(b!) shares, Tensor(c!) means, Tensor peaks, Tensor norms, "
      "Tensor totals, Tensor[] kept, int window, int max_columns, Tensor requests, "
      "Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int block_size) -> ()");
  module.def(
      "keep_page_values(Tensor(a!)[] kept, Tensor numbers, Tensor columns, Tensor pages, "
      "Tensor store, Tensor requests, Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int block_size) -> ()");
  module.def(
      "probe_keys(Tensor(a!) parts, Tensor(b!) norms, Tensor(c!) totals, Tensor[] caches, "
      "Tensor weights, Tensor ages, Tensor[] rotary, bool interleaved, int width, Tensor requests, "
      "Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int page_tokens) -> ()");
  module.def(
      "probe_networks(Tensor(a!) parts, Tensor norms, Tensor totals, Tensor[] caches, Tensor weights, "
      "Tensor shares, Tensor[] rotary, bool interleaved, Tensor requests, Tensor head_indptr, "
      "Tensor old_store, Tensor positional, "
      "int page_tokens) -> ()");
  module.def(
      "probe_scores(Tensor(a!) scores, Tensor(b!) parts, Tensor(c!) means, Tensor peaks, Tensor norms, "
      "Tensor totals, Tensor window_weights, Tensor[] kept, int window, int max_columns, "
      "Tensor requests, Tensor head_indptr, Tensor old_store, Tensor positional, "
      "int block_size) -> ()");
  module.def("cuda_built() -> int");
  module.def("cuda_driver() -> int");
  module.def("cuda_serves() -> int");
}

KVEVICT_IMPLEMENT(KVEVICT_LIBRARY, CompositeExplicitAutograd, module) {
  module.impl("cuda_built", TORCH_BOX(&kvevict::cuda_built));
  module.impl("cuda_driver", TORCH_BOX(&kvevict::cuda_driver));
  module.impl("cuda_serves", TORCH_BOX(&kvevict::cuda_serves));
}

KVEVICT_IMPLEMENT(KVEVICT_LIBRARY, KVEVICT_DEVICE, module) {
  module.impl("compact", TORCH_BOX(&kvevict::compact));
  module.impl("select", TORCH_BOX(&kvevict::select));
  module.impl("allocate", TORCH_BOX(&kvevict::allocate));
  module.impl("allocate_shares", TORCH_BOX(&kvevict::allocate_shares));
  module.impl("rows", TORCH_BOX(&kvevict::rows));
  module.impl("window_lse", TORCH_BOX(&kvevict::window_lse));
  module.impl("column_sums", TORCH_BOX(&kvevict::column_sums));
  module.impl("pool", TORCH_BOX(&kvevict::pool));
  module.impl("window_peaks", TORCH_BOX(&kvevict::window_peaks));
  module.impl("value_norms", TORCH_BOX(&kvevict::value_norms));
  module.impl("defend", TORCH_BOX(&kvevict::defend));
  module.impl("keep_page_values", TORCH_BOX(&kvevict::keep_page_values));
  module.impl("probe_keys", TORCH_BOX(&kvevict::probe_keys));
  module.impl("probe_networks", TORCH_BOX(&kvevict::probe_networks));
  module.impl("probe_scores", TORCH_BOX(&kvevict::probe_scores));
}
