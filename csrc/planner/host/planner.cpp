#include "planner/host/planner.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "planner/steps.h"

namespace attn {
namespace {

/// The page tables of a batch's requests.
struct Tables {
  const PageTable& table;
  const RowGroup* groups;
  const ForestRequest* requests;

  const int32_t* entry(int32_t request, int32_t page) const {
    return table.indices + groups[request].table_begin + int64_t{page} * table.entry_step;
  }

  /// Leading pages that two requests share.
  int32_t common(int32_t a, int32_t b) const {
    const int32_t limit = min_of(requests[a].shareable, requests[b].shareable);
    const int32_t *x = entry(a, 0), *y = entry(b, 0);
    if (table.entry_step == 1) return static_cast<int32_t>(std::mismatch(x, x + limit, y).first - x);
    int32_t page = 0;
    while (page < limit && x[int64_t{page} * table.entry_step] == y[int64_t{page} * table.entry_step]) ++page;
    return page;
  }
};

/// Where a request attaches. `same`: the requests before this one with the same first page, in order.
Attachment attach(const Tables& tables, const std::vector<int32_t>& same, int32_t request) {
  const int32_t own = tables.requests[request].shareable;
  Attachment best{-1, 0};
  std::vector<int32_t> required;  // pages that all candidates have: each time the next page after the shared ones
  size_t next = 0;
  for (int32_t comparisons = 0; comparisons < kMaxComparisons && next < same.size(); ++comparisons) {
    const int32_t common = tables.common(request, same[next++]);
    if (common > best.pages) best = Attachment{same[next - 1], common};
    if (best.pages == own) break;
    if (required.empty() || required.back() != best.pages) required.push_back(best.pages);
    const auto has = [&](int32_t other, int32_t page) {
      return *tables.entry(other, page) == *tables.entry(request, page);
    };
    const auto is_candidate = [&](int32_t other) {
      return tables.requests[other].shareable > best.pages &&
             std::all_of(required.rbegin(), required.rend(), [&](int32_t page) { return has(other, page); });
    };
    while (next < same.size() && !is_candidate(same[next])) ++next;
  }
  return best;
}

/// One thread that takes the steps of a plan: what CtaThreads (planner/device/threads.cuh) is on a GPU.
struct OneThread {
  static constexpr int32_t kCount = 1, kWarps = 1, kLanes = 1;

  static int32_t thread() { return 0; }
  static int32_t lane() { return 0; }
  static int32_t warp() { return 0; }

  static void sync() {}
  static bool any(bool value) { return value; }
  static bool any_of_warp(bool value) { return value; }

  static void add(int32_t& sum, int32_t value) { sum += value; }
  static void raise(int32_t& largest, int32_t value) { largest = max_of(largest, value); }
  static void report(uint32_t& errors, uint32_t found) { errors |= found; }
  static void raise_by_warp(int32_t& largest, int32_t value) { raise(largest, value); }

  static void add_to_node(ForestNode* nodes, int32_t n, int32_t ForestNode::* field, int32_t value) {
    if (n >= 0) nodes[n].*field += value;
  }

  template <class Int, int32_t kSums>
  static void running_sums(PlanShared&, Int (&values)[kSums], Int (&totals)[kSums]) {
    for (int32_t k = 0; k < kSums; ++k) {
      totals[k] += values[k];
      values[k] = totals[k] - values[k];
    }
  }

  static int32_t running_sum_of_warp(int32_t value, int32_t& total) {
    total += value;
    return total - value;
  }

  /// `before`: the row group of the row tile before it.
  static int32_t find_group(const int32_t* tile_begin, int32_t num_groups, int32_t tile, int32_t before) {
    while (before + 1 < num_groups && tile_begin[before + 1] <= tile) ++before;
    return before;
  }

  static EvenCut best_even_cut(const PlanParams& p, const SharedPairs& pairs) {
    EvenCut best = cut_evenly(p, pairs, 1);
    for (int32_t parts = 2; parts <= kMaxAlignedParts; ++parts) {
      const EvenCut cut = cut_evenly(p, pairs, parts);
      if (cut.cost < best.cost) best = cut;
    }
    return best;
  }

  static void begin_search(PlanContext<OneThread>&) {}

  static bool find_attachments(PlanContext<OneThread>& c, const Forest& f) {
    if (c.shared.errors != 0) return false;
    const PageTable& table = c.p.levels[0].table;
    const Tables tables{table, c.p.schedule.groups, f.requests};
    std::unordered_map<int32_t, std::vector<int32_t>> by_first_page;
    bool attaches = false;
    for (int32_t i = 0; i < f.size; ++i) {
      ForestRequest& request = f.requests[i];
      if (!begins_with_page(table, c.p.schedule.groups[i])) request.shareable = 0;
      Attachment attachment{-1, 0};
      if (request.shareable > 0) {
        std::vector<int32_t>& same = by_first_page[*tables.entry(i, 0)];
        attachment = attach(tables, same, i);
        same.push_back(i);
      }
      request.leader = attachment.leader;
      request.pages = attachment.pages;
      attaches |= attachment.leader >= 0;
    }
    return attaches;
  }
};

}  // namespace

void plan_on_host(const PlanParams& p) {
  thread_local std::vector<char> memory;
  if (p.seeks_forest) {
    memory.resize(plan_forest_shared_bytes(p.levels[0].num_groups));
    make_plan<OneThread, true>(p, memory.data());
  } else {
    memory.resize(plan_shared_bytes(p.config.max_groups, 0));
    make_plan<OneThread, false>(p, memory.data());
  }
}

bool has_negative_page(const PlanParams& p) {
  for (int32_t number = 0; number < p.num_levels; ++number) {
    const PlanLevel& level = p.levels[number];
    const PageTable& table = level.table;
    if (table.indices == nullptr) continue;
    for (int32_t i = 0; i < level.num_groups; ++i) {
      uint32_t errors = 0;
      const RowGroup group = read_row_group(p, GroupPlace{number, i}, errors);
      const int64_t pages = group.qo_len > 0 ? ceil_div<int64_t>(group.kv_len, table.page_size) : 0;
      const int64_t first_token =
          level.visibility.window_left < 0
              ? 0
              : max_of<int64_t>(int64_t{group.kv_len} - group.qo_len - level.visibility.window_left, 0);
      int32_t signs = 0;
      for (int64_t page = first_token / table.page_size; page < pages; ++page)
        signs |= table.indices[group.table_begin + page * table.entry_step];
      if (signs < 0) return true;
    }
  }
  return false;
}

}  // namespace attn
