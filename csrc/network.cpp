#include "network.h"

#include "launchers.h"
#include "tail_keys_check.h"

namespace kvevict {

void probe_networks(const Tensor& parts, const Tensor& norms, const Tensor& totals,
                    std::vector<Tensor> caches, const Tensor& weights, const Tensor& shares,
                    std::vector<Tensor> rotary, bool interleaved, const Tensor& requests,
                    const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                    int64_t page_tokens) {
  const Launch launch(parts);
  check_sizes(totals, "totals", {kAny, kAny, kAny});
  Networks work{};
  work.keys = check_tail_keys(caches, interleaved, totals.size(2), requests, head_indptr, old_store,
                              positional, page_tokens, parts);
  const int64_t layers = work.keys.num_layers, heads = work.keys.candidates.num_heads;
  check(parts, "parts", ScalarType::Float, {kAny, kAny}, parts);
  check_among(parts.size(0), "parts", {1, 2});
  check(norms, "norms", ScalarType::Float, {parts.size(1)}, parts);
  check(totals, "totals", ScalarType::Float, {requests.size(0), layers, kAny}, parts);
  check(weights, "networks", ScalarType::Float,
        {layers, heads, work.keys.head_size + kNetworkRest, kAny}, parts);
  STD_TORCH_CHECK(weights.size(3) >= 1, "networks must have at least 1 unit");
  check(shares, "weights of shares", ScalarType::Float, {layers, heads}, parts);
  work.weights = in<float>(weights);
  work.shares = in<float>(shares);
  work.parts = out<float>(parts);
  work.norms = in<float>(norms);
  work.totals = in<float>(totals);
  work.num_parts = parts.size(1);
  work.channels = narrow(parts.size(0), "parts");
  work.units = narrow(weights.size(3), "units");
  check_rotary(rotary, &work.keys, parts);
  launch_networks(work, narrow(requests.size(0), "requests"), launch.stream());
  launch.check();
}

}  // namespace kvevict
