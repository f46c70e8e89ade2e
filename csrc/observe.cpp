#include "observe.h"

#include "checks.h"
#include "launchers.h"

namespace kvevict {

void observe(const Tensor& rings, const Tensor& query, const Tensor& query_start_loc,
             const Tensor& seq_lens, const Tensor& ring, int64_t window, int64_t queries) {
  const Launch launch(rings);
  STD_TORCH_CHECK(window >= 1, "window must be at least 1, not ", window);
  STD_TORCH_CHECK(queries >= 1 && queries <= window,
                  "queries must be between 1 and the window, not ", queries);
  check_sizes(query, "query", {kAny, kAny, kAny});
  check(rings, "rings", query.scalar_type(), {kAny, query.size(1), query.size(2)}, rings);
  check_device(query, "query", rings);
  STD_TORCH_CHECK(rings.size(0) % window == 0, "rings must hold whole slots of ", window, " queries");
  STD_TORCH_CHECK(query.stride(2) == 1 && query.stride(1) == query.size(2),
                  "the heads of a query must be contiguous");
  const int64_t bytes = query.size(1) * query.size(2) * query.element_size();
  const int64_t token_bytes = query.stride(0) * query.element_size();
  STD_TORCH_CHECK(bytes % 16 == 0 && token_bytes % 16 == 0,
                  "a token's queries must be a multiple of 16 bytes, not ", bytes);
  check_aligned(rings, "rings", 16);
  check_aligned(query, "query", 16);
  const int64_t requests = ring.numel();
  check(ring, "ring", ScalarType::Int, {requests}, rings);
  check(seq_lens, "seq_lens", ScalarType::Int, {requests}, rings);
  check(query_start_loc, "query_start_loc", ScalarType::Int, {requests + 1}, rings);

  Observe work;
  work.rings = out<unsigned char>(rings);
  work.query = in<unsigned char>(query);
  work.query_start_loc = in<int32_t>(query_start_loc);
  work.seq_lens = in<int32_t>(seq_lens);
  work.ring = in<int32_t>(ring);
  work.token_bytes = token_bytes;
  work.num_tokens = query.size(0);
  work.slots = rings.size(0) / window;
  work.bytes = narrow(bytes, "bytes of a query");
  work.window = narrow(window, "window");
  work.num_requests = narrow(requests, "requests");
  work.queries = narrow(queries, "queries");
  launch_observe(work, launch.stream());
  launch.check();
}

}  // namespace kvevict
