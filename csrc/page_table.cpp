#include "page_table.h"

#include "checks.h"
#include "launchers.h"

namespace kvevict {

void head_page_table(const Tensor& table, const Tensor& lengths, const Tensor& head_indptr,
                     const Tensor& store, const Tensor& tail_start, const Tensor& rows,
                     const Tensor& seq_lens, const Tensor& block_table, int64_t block_size) {
  const Launch launch(table);
  check_block_size(block_size);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  const int64_t layers = head_indptr.size(0), state_rows = head_indptr.size(1);
  const int64_t heads = head_indptr.size(2) - 1, requests = rows.numel();
  STD_TORCH_CHECK(heads >= 1, "head_indptr must have H + 1 columns, not ", heads + 1);
  check(table, "table", ScalarType::Int, {layers, requests * heads, kAny}, table);
  check(lengths, "lengths", ScalarType::Int, {layers, requests * heads}, table);
  check(head_indptr, "head_indptr", ScalarType::Int, {layers, state_rows, heads + 1}, table);
  check_rows(store, "store", ScalarType::Int, {state_rows, kAny}, table);
  check(tail_start, "tail_start", ScalarType::Int, {state_rows}, table);
  check(rows, "rows", ScalarType::Int, {requests}, table);
  check(seq_lens, "seq_lens", ScalarType::Int, {requests}, table);
  check_rows(block_table, "block_table", ScalarType::Int, {requests, kAny}, table);

  PageTable work;
  work.table = out<int32_t>(table);
  work.lengths = out<int32_t>(lengths);
  work.head_indptr = in<int32_t>(head_indptr);
  work.store = in<int32_t>(store);
  work.tail_start = in<int32_t>(tail_start);
  work.rows = in<int32_t>(rows);
  work.seq_lens = in<int32_t>(seq_lens);
  work.block_table = in<int32_t>(block_table);
  work.store_stride = store.stride(0);
  work.block_stride = block_table.stride(0);
  work.num_rows = narrow(state_rows, "rows");
  work.num_layers = narrow(layers, "layers");
  work.num_requests = narrow(requests, "requests");
  work.num_heads = narrow(heads, "KV heads");
  work.store_width = narrow(store.size(1), "store blocks");
  work.num_blocks = narrow(block_table.size(1), "blocks of a request");
  work.width = narrow(table.size(2), "width of the table");
  work.block_size = narrow(block_size, "block size");
  launch_page_table(work, launch.stream());
  launch.check();
}

}  // namespace kvevict
