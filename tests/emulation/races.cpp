// Every kernel over small scenes, without torch, for builds with sanitizers.
//
//   races SCENE ORDER              prints a sum over the results, then the sites that it passed
//   races SCENE ORDER FILE LINE    the same without the barrier, atomic or wait that stands there
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <random>
#include <type_traits>

#include "allocate.cuh"
#include "compact.cuh"
#include "defend.cuh"
#include "keep.cuh"
#include "network.cuh"
#include "pool.cuh"
#include "probe.cuh"
#include "reach.cuh"
#include "rows.cuh"
#include "score.cuh"
#include "select.cuh"
#include "sort.cuh"

namespace kvevict {

// One head size of each dtype: compiling is what takes time here.
template <typename T, int D>
void score(const Score& work, Pass pass, int64_t heads) {
  launch_pass<T, D>(work, pass, heads, nullptr);
}

namespace {

std::mt19937 generator(1);
uint64_t digest = 1469598103934665603u;

void add(const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  }
}

template <typename Value>
void add(const std::vector<Value>& values) {
  add(values.data(), values.size() * sizeof(Value));
}

float normal() {
  static std::normal_distribution<float> draw;
  return draw(generator);
}

// 16-byte aligned, as torch's memory is; random numbers of a format.
template <typename T>
std::vector<T> random_numbers(size_t count) {
  std::vector<T> numbers(count);
  for (T& number : numbers) {
    if constexpr (std::is_same_v<T, float>) number = normal();
    if constexpr (std::is_same_v<T, Half>) number.bits = half_bits(std::round(normal() * 64) / 64);
    if constexpr (std::is_same_v<T, BFloat16>) {
      number.bits = static_cast<uint16_t>(__float_as_uint(normal()) >> 16);
    }
    if constexpr (std::is_same_v<T, unsigned char>) {
      number = static_cast<unsigned char>(generator() & 0xb7u);  // E4M3 below 8
    }
  }
  return numbers;
}

// Where each head's scores lie.
struct RowsOf {
  std::vector<int64_t> start, first_kept;
  std::vector<int32_t> length, caps, store_blocks;
};

// Pages per head from scores, then the columns of the best.
void choose(const std::vector<float>& scores, const RowsOf& rows, int heads, int page_tokens,
            std::vector<int32_t>* pages, std::vector<int32_t>* columns) {
  const int count = static_cast<int>(rows.start.size());
  std::vector<uint32_t> keys(scores.size()), other(scores.size());
  std::vector<uint64_t> gains(scores.size() / page_tokens);
  launch_sort({keys.data(), other.data(), scores.data(), rows.start.data(), rows.length.data(),
               static_cast<int64_t>(scores.size()), count}, nullptr);
  pages->resize(count);
  Allocate work{};
  work.pages = pages->data();
  work.gains = gains.data();
  work.start = rows.start.data();
  work.length = rows.length.data();
  work.caps = rows.caps.data();
  work.store_blocks = rows.store_blocks.data();
  work.num_gains = static_cast<int64_t>(gains.size());
  work.num_groups = count / heads;
  work.num_heads = heads;
  work.num_layers = 1;
  work.page_tokens = page_tokens;
  // By fixed shares, some of which are equal.
  std::vector<double> shares(heads, 0.75);
  shares[0] = 1 + (heads - 1) * 0.25;
  work.shares = shares.data();
  launch_allocate(work, nullptr);
  add(*pages);
  work.shares = nullptr;
  work.keys = keys.data();
  work.floor = 0.2;
  launch_allocate(work, nullptr);
  launch_select({columns->data(), scores.data(), rows.start.data(), rows.length.data(), pages->data(),
                 rows.first_kept.data(), static_cast<int64_t>(scores.size()),
                 static_cast<int64_t>(columns->size()), count / heads, heads, page_tokens}, nullptr);
  add(keys);
  add(*pages);
  add(*columns);
}

// Many ties, and more scores than a tile of the sort has.
void choose_scene() {
  const int heads = 2, groups = 2, length = 16 * 520, store = 20;
  std::vector<float> scores(groups * heads * length);
  for (float& score : scores) score = std::floor(normal() * 20);
  // Pages that tie, too.
  std::fill(scores.begin() + heads * length, scores.end(), 1.0f);
  RowsOf rows;
  for (int i = 0; i < groups * heads; ++i) {
    rows.start.push_back(static_cast<int64_t>(i) * length);
    rows.length.push_back(length);
    rows.caps.push_back(length / 16);
  }
  for (int i = 0; i < groups; ++i) {
    rows.store_blocks.push_back(store);
    rows.first_kept.push_back(static_cast<int64_t>(i) * store * heads * 16);
  }
  std::vector<int32_t> pages, columns(groups * store * heads * 16);
  choose(scores, rows, heads, 16, &pages, &columns);
}

// Stores in few bits, with any signs.
Packed random_format(int page_tokens, int head_size, int bits) {
  Packed format = packed_format(page_tokens, head_size, bits, bits);
  for (uint32_t& word : format.signs) word = generator();
  return format;
}

// Gives the stored tokens of a block scales that are numbers, for levels of which every byte is one.
void set_scales(const Packed& format, int heads, int64_t page_bytes, unsigned char* block) {
  const uint16_t scale = half_bits(format.key_bits > 4 ? 0.01f : 0.1f);
  for (int head = 0; head < heads; ++head, block += page_bytes) {
    uint16_t* scales = reinterpret_cast<uint16_t*>(block + format.scale_plane);
    std::fill(scales, scales + (format.used_bytes - format.scale_plane) / 2, scale);
  }
}

// A request after its prefill and one that was evicted before, two layers, from queries to stores.
// With `bits`, stores are packed.
template <typename T, int D, typename Slot>
void eviction_scene(Stored stored, Element element, int heads, int group, int tail_pages, float softcap, bool average,
                    int bits = 0) {
  const int layers = 2, window = 8, bs = 16, old_blocks = 2, store = 2, rows_of_state = 3;
  const int tokens = tail_pages * bs + window + 3;  // behind the old tail start
  const int blocks_each = tail_pages + 2, num_blocks = 2 * (blocks_each + store) + old_blocks;
  const int slot = 2 * D, state_columns = heads + 1;
  // As many as ops/token_format.py says.
  const int pt = bits == 4 ? bs * 60 / 16 : bits == 8 ? bs * 30 / 16 : bs;
  const Packed packed = bits > 0 ? random_format(pt, D, bits) : Packed{};
  std::vector<std::vector<Slot>> caches;
  std::vector<std::vector<T>> rings;
  for (int layer = 0; layer < layers; ++layer) {
    caches.push_back(random_numbers<Slot>(static_cast<size_t>(num_blocks) * heads * bs * slot));
    rings.push_back(random_numbers<T>(static_cast<size_t>(2) * window * heads * group * D));
  }
  int next_block = 0;
  std::vector<int32_t> old_store(rows_of_state * old_blocks), positional, target;
  for (int i = 0; i < old_blocks; ++i) old_store[old_blocks + i] = next_block++;
  for (int i = 0; i < 2 * blocks_each; ++i) positional.push_back(next_block++);
  for (int i = 0; i < 2 * store; ++i) target.push_back(next_block++);
  std::vector<int32_t> indptr(layers * rows_of_state * state_columns);
  for (int layer = 0; layer < layers; ++layer) {
    int32_t* split = &indptr[(layer * rows_of_state + 1) * state_columns];
    for (int head = 0; head < heads; ++head) split[head + 1] = split[head] + 1;
    split[heads] = old_blocks * heads;
  }
  for (auto& cache : caches) {
    const int64_t page_bytes = bs * slot * sizeof(Slot);
    unsigned char* pages = reinterpret_cast<unsigned char*>(cache.data());
    for (int i = 0; bits > 0 && i < old_blocks; ++i) {
      set_scales(packed, heads, page_bytes, pages + old_store[old_blocks + i] * heads * page_bytes);
    }
  }
  const int64_t first_tokens = tokens, later = 8 * bs;
  std::vector<Request> due{
      {2, 0, first_tokens, 0, tail_pages * bs, 0, store, 0, 0, 0, 0},
      {1, 1, later + tokens, later, later + tail_pages * bs, old_blocks, store, 2, 0, 0, 0}};
  int64_t columns = 0, sums = 0, kept = 0, most = 0;
  RowsOf rows;
  for (Request& one : due) {
    one.first_column = columns;
    one.first_sum = sums;
    one.first_kept = kept;
    const int64_t rest = one.num_tokens - window - one.tail_start;
    for (int layer = 0; layer < layers; ++layer) {
      kept += store * heads * pt;
      for (int head = 0; head < heads; ++head) {
        const int32_t* split = &indptr[(layer * rows_of_state + one.row) * state_columns + head];
        const int held = (one.old_store_blocks ? split[1] - split[0] : 0) * pt + tail_pages * bs;
        columns += held;
        sums += held + rest;
        most = std::max<int64_t>(most, held + rest + window);
      }
    }
  }
  const int64_t due_heads = static_cast<int64_t>(due.size()) * layers * heads;
  const int query_rows = group * window;
  Score work{};
  for (int layer = 0; layer < layers; ++layer) {
    work.caches.at[layer] = reinterpret_cast<const unsigned char*>(caches[layer].data());
    work.rings.at[layer] = reinterpret_cast<const unsigned char*>(rings[layer].data());
    work.scales[layer] = 1 / std::sqrt(static_cast<float>(D));
  }
  work.candidates = {due.data(), indptr.data(), old_store.data(), positional.data(), old_blocks,
                     rows_of_state, heads, blocks_each, bs, 4, pt, inverse_of(pt)};
  work.stored = stored;
  work.packed = packed;
  work.softcap = softcap;
  work.num_layers = layers;
  work.group = group;
  work.window = window;
  work.slot_bytes = static_cast<int>(slot * sizeof(Slot));
  work.chunks = static_cast<int>((most + kChunk - 1) / kChunk);
  std::vector<float2> partial(due_heads * work.chunks * query_rows);
  std::vector<float> lse(due_heads * query_rows);
  const int groups = query_groups(query_rows, D);
  std::vector<float> found(groups * sums), scores(columns);
  work.partial = partial.data();
  work.lse_out = lse.data();
  work.lse = lse.data();
  work.sums = found.data();
  work.num_sums = sums;
  score<T, D>(work, Pass::kLse, due_heads);
  score<T, D>(work, Pass::kColumns, due_heads);
  Pool pooling{};
  pooling.scores = scores.data();
  pooling.sums = found.data();
  pooling.candidates = work.candidates;
  pooling.num_scores = columns;
  pooling.num_sums = sums;
  pooling.factor = 1.0f / query_rows;
  pooling.query_groups = groups;
  pooling.num_layers = layers;
  pooling.window = window;
  pooling.kernel = 5;
  pooling.chunks = work.chunks;
  pooling.average = average;
  launch_pool(pooling, due_heads, nullptr);
  add(lse);
  add(scores);

  Norms norming{};
  std::vector<float> norms(columns), totals(due.size() * layers * tail_pages * bs), means(due_heads);
  norming.caches = work.caches;
  norming.candidates = work.candidates;
  norming.norms = norms.data();
  norming.totals = totals.data();
  norming.num_norms = columns;
  norming.element = element;
  norming.num_layers = layers;
  norming.slot_bytes = work.slot_bytes;
  norming.value_offset = norming.value_bytes = work.slot_bytes / 2;
  norming.width = tail_pages * bs;
  launch_norms(norming, static_cast<int>(due.size()), nullptr);
  work.chunks = static_cast<int>((most + kPeakChunk - 1) / kPeakChunk);
  score<T, D>(work, Pass::kPeaks, due_heads);
  const int channels = average ? 1 : 2, stride = 2;
  std::vector<std::vector<float>> beside(layers, std::vector<float>(num_blocks * heads * pt * stride, 0.5f));
  std::vector<float> shares(columns);
  Defend defending{};
  Keep keeping{};
  ProbeScores probing{};
  for (int layer = 0; layer < layers; ++layer) {
    defending.kept.at[layer] = probing.kept.at[layer] = keeping.kept.at[layer] = beside[layer].data();
  }
  defending.reach = {work.candidates, means.data(), found.data(), sums, groups, layers, window};
  defending.scores = scores.data();
  defending.shares = shares.data();
  defending.norms = norms.data();
  defending.totals = totals.data();
  defending.num_scores = columns;
  defending.stride = stride;
  defending.chunks = pooling.chunks;
  defending.width = norming.width;
  launch_defend(defending, due_heads, nullptr);
  add(scores);
  add(shares);

  // The first layer's keys are not rotated; one probe goes without a window.
  ProbeKeys keying{};
  const int pairs = D / 4;
  std::vector<float> angles = random_numbers<float>((later + tail_pages * bs) * 2 * pairs);
  const int probes = average ? channels : 2 * channels;
  std::vector<float> weights = random_numbers<float>(layers * heads * probes * (D + kProbeRest));
  std::vector<float> ages = random_numbers<float>(2 * due.size());
  std::vector<float> parts(channels * columns), of_windows(layers * heads, 0.5f);
  keying.keys.caches = work.caches;
  keying.keys.rotary.at[layers - 1] = reinterpret_cast<const unsigned char*>(angles.data());
  keying.keys.candidates = work.candidates;
  keying.weights = weights.data();
  keying.ages = ages.data();
  keying.prose = probes > channels;
  keying.parts = parts.data();
  keying.norms = norms.data();
  keying.totals = totals.data();
  keying.num_parts = columns;
  keying.keys.num_positions = later + tail_pages * bs;
  keying.keys.element = element;
  keying.keys.angle = Element::kFloat;
  keying.channels = channels;
  keying.keys.head_size = D;
  keying.keys.pairs = pairs;
  keying.keys.num_layers = layers;
  keying.keys.slot_bytes = work.slot_bytes;
  keying.keys.width = norming.width;
  keying.keys.interleaved = average;
  launch_probe_keys(keying, static_cast<int>(due.size()), nullptr);
  // More units than a warp has lanes.
  Networks adding{};
  const int units = 37;
  std::vector<float> of_units = random_numbers<float>(layers * heads * (D + kNetworkRest) * units);
  adding.keys = keying.keys;
  adding.weights = of_units.data();
  adding.shares = of_windows.data();
  adding.parts = parts.data();
  adding.norms = norms.data();
  adding.totals = totals.data();
  adding.num_parts = columns;
  adding.channels = channels;
  adding.units = units;
  launch_networks(adding, static_cast<int>(due.size()), nullptr);
  add(parts);
  probing.reach = defending.reach;
  if (channels == 1) probing.reach.peaks = nullptr;
  probing.scores = scores.data();
  probing.parts = parts.data();
  probing.norms = norms.data();
  probing.totals = totals.data();
  probing.window_weights = of_windows.data();
  probing.num_scores = columns;
  probing.channels = channels;
  probing.stride = stride;
  probing.chunks = pooling.chunks;
  probing.width = norming.width;
  launch_probe_scores(probing, due_heads, nullptr);
  add(scores);
  add(parts);

  rows.start.resize(due_heads);
  rows.length.resize(due_heads);
  rows.caps.resize(due_heads);
  rows.first_kept.resize(due_heads / heads);
  rows.store_blocks.resize(due_heads / heads);
  launch_rows({rows.start.data(), rows.length.data(), rows.caps.data(), rows.first_kept.data(),
               rows.store_blocks.data(), work.candidates, due_heads, layers}, nullptr);
  std::vector<int32_t> pages, survivors(kept);
  choose(scores, rows, heads, pt, &pages, &survivors);
  Compact moving{};
  for (int layer = 0; layer < layers; ++layer) {
    moving.caches.at[layer] = reinterpret_cast<unsigned char*>(caches[layer].data());
  }
  moving.candidates = work.candidates;
  moving.columns = survivors.data();
  moving.pages = pages.data();
  moving.store = target.data();
  moving.num_pages = static_cast<int64_t>(num_blocks) * heads;
  moving.slot_bytes = work.slot_bytes;
  moving.page_bytes = bits > 0 ? packed.used_bytes : bs * work.slot_bytes;
  moving.packed = packed;
  std::fill_n(moving.key_scales, layers, 1.0f);
  std::fill_n(moving.value_scales, layers, 1.0f);
  moving.element = element;
  moving.head_size = D;
  moving.num_layers = layers;
  moving.store_width = store;
  moving.pass_layers = layers;
  // In one scene through a staging buffer, as within a request, one layer at a time.
  std::vector<unsigned char> staging(due.size() * store * heads * bs * work.slot_bytes);
  if (average) {
    moving.staging = staging.data();
    moving.pass_layers = 1;
  }
  launch_compact(moving, static_cast<int>(due.size()), nullptr);
  keeping.candidates = work.candidates;
  keeping.numbers = parts.data();
  keeping.columns = survivors.data();
  keeping.pages = pages.data();
  keeping.store = target.data();
  keeping.num_numbers = columns;
  keeping.num_pages = moving.num_pages;
  keeping.channels = channels;
  keeping.stride = stride;
  keeping.num_layers = layers;
  keeping.store_width = store;
  launch_keep(keeping, static_cast<int>(due.size()), nullptr);
  for (const auto& mine : beside) add(mine);
  for (const auto& cache : caches) add(cache);
}

void run(const std::string& scene) {
  if (scene == "choose") return choose_scene();
  if (scene == "bfloat16") {
    return eviction_scene<BFloat16, 128, BFloat16>(Stored::kAsQueries, Element::kBFloat16, 1, 9, 2, 0, false);
  }
  if (scene == "fp8") return eviction_scene<Half, 80, unsigned char>(Stored::kE4M3, Element::kE4M3, 1, 2, 5, 3, true);
  if (scene == "float32") {
    return eviction_scene<float, 64, float>(Stored::kAsQueries, Element::kFloat, 1, 5, 2, 0, false);
  }
  if (scene == "chunks") {
    return eviction_scene<Half, 80, Half>(Stored::kAsQueries, Element::kHalf, 1, 1, 66, 0, false);
  }
  // Packed stores, of which one is written directly and one through a staging buffer.
  if (scene == "4 bits") {
    return eviction_scene<BFloat16, 128, BFloat16>(Stored::kAsQueries, Element::kBFloat16, 1, 9, 9, 0, false, 4);
  }
  if (scene == "8 bits") {
    return eviction_scene<Half, 80, Half>(Stored::kAsQueries, Element::kHalf, 1, 2, 5, 3, true, 8);
  }
  throw std::runtime_error("no scene " + scene);
}

}  // namespace
}  // namespace kvevict

int main(int argc, char** argv) {
  if (argc != 3 && argc != 5) return 2;
  emulate::order = std::atoi(argv[2]);
  if (argc == 5) {
    emulate::removed_file = argv[3];
    emulate::removed_line = static_cast<unsigned>(std::atoi(argv[4]));
  }
  try {
    kvevict::run(argv[1]);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  std::printf("%016" PRIx64 "\n", kvevict::digest);
  for (int i = 0; i < emulate::num_passed; ++i) {
    std::printf("%s %u\n", emulate::passed[i].file, emulate::passed[i].line);
  }
}
