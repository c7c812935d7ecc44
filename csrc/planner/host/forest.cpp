#include "planner/host/forest.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "planner/forest.h"

namespace attn {
namespace {

/// The page tables of a batch's requests.
struct Tables {
  const int32_t* indices;
  int32_t entry_step;
  std::vector<int64_t> begin;
  std::vector<int32_t> pages;  // that the request can share

  int32_t entry(int32_t request, int32_t page) const {
    return indices[begin[static_cast<size_t>(request)] + int64_t{page} * entry_step];
  }

  /// Leading pages that two requests share.
  int32_t common(int32_t a, int32_t b) const {
    const int32_t limit = min_of(pages[static_cast<size_t>(a)], pages[static_cast<size_t>(b)]);
    const int32_t* x = indices + begin[static_cast<size_t>(a)];
    const int32_t* y = indices + begin[static_cast<size_t>(b)];
    if (entry_step == 1) return static_cast<int32_t>(std::mismatch(x, x + limit, y).first - x);
    int32_t page = 0;
    while (page < limit && x[int64_t{page} * entry_step] == y[int64_t{page} * entry_step]) ++page;
    return page;
  }
};

/// `same`: the requests before this one with the same first page, in order.
Attachment attach(const Tables& tables, const std::vector<int32_t>& same, int32_t request) {
  const int32_t own = tables.pages[static_cast<size_t>(request)];
  Attachment best{-1, 0};
  std::vector<int32_t> behind;  // pages that all candidates have: each time those behind what was shared
  size_t next = 0;
  const bool all = compares_with_all(static_cast<int32_t>(tables.pages.size()), own);
  for (int32_t comparisons = 0; (all || comparisons < kMaxComparisons) && next < same.size(); ++comparisons) {
    const int32_t common = tables.common(request, same[next++]);
    if (common > best.pages) best = Attachment{same[next - 1], common};
    if (best.pages == own) break;
    if (behind.empty() || behind.back() != best.pages) behind.push_back(best.pages);
    const auto has = [&](int32_t other, int32_t page) {
      return tables.entry(other, page) == tables.entry(request, page);
    };
    const auto is_candidate = [&](int32_t other) {
      return tables.pages[static_cast<size_t>(other)] > best.pages &&
             std::all_of(behind.rbegin(), behind.rend(), [&](int32_t page) { return has(other, page); });
    };
    while (next < same.size() && !is_candidate(same[next])) ++next;
  }
  return best;
}

/// Fills leader and pages. Returns whether anything is shared.
bool find_attachments(const Tables& tables, const Forest& f) {
  std::unordered_map<int32_t, std::vector<int32_t>> by_first_page;
  bool shares = false;
  for (int32_t i = 0; i < f.size; ++i) {
    f[i].leader = -1;
    f[i].pages = 0;
    if (tables.pages[static_cast<size_t>(i)] == 0) continue;
    std::vector<int32_t>& same = by_first_page[tables.entry(i, 0)];
    const Attachment attachment = attach(tables, same, i);
    f[i].leader = attachment.leader;
    f[i].pages = attachment.pages;
    shares |= attachment.leader >= 0;
    same.push_back(i);
  }
  return shares;
}

/// A node on the same path that could be node n's parent: of those the deepest is. `best`: the best so far, -1: none.
int32_t closer_parent(const Forest& f, int32_t n, int32_t other, int32_t best) {
  if (f[other].leader != f[n].leader || f[other].pages >= f[n].pages) return best;
  return best < 0 || f[other].pages > f[best].pages ? other : best;
}

/// Fills what follows from attachments. Returns the nodes in order.
std::vector<int32_t> find_nodes(const PlanParams& p, const Forest& f) {
  std::vector<int32_t> nodes;
  for (int32_t i = 0; i < f.size; ++i) {
    f[i].node = f[i].deepest = f[i].merge_begin = -1;
    if (f[i].leader < 0) continue;
    const auto same = std::find_if(nodes.begin(), nodes.end(),
                                   [&](int32_t n) { return f[n].leader == f[i].leader && f[n].pages == f[i].pages; });
    f[i].node = same == nodes.end() ? i : *same;
    if (f.is_node(i)) nodes.push_back(i);
  }
  for (const int32_t n : nodes) {
    f[n].parent = -1;
    f[n].rows = f[n].direct_rows = f[n].requests = f[n].weight = 0;
    for (const int32_t other : nodes) f[n].parent = closer_parent(f, n, other, f[n].parent);
    if (f[n].parent < 0) f[n].parent = f[f[n].leader].node;
    f[f[n].leader].deepest = max_of(f[f[n].leader].deepest, f.path_key(n));
  }
  for (const int32_t n : nodes) {
    f[n].depth = 0;
    for (int32_t at = n; at >= 0; at = f[at].parent) ++f[n].depth;
  }
  for (int32_t i = 0; i < f.size; ++i) {
    const int32_t innermost = f.innermost(i);
    for (int32_t at = innermost; at >= 0; at = f[at].parent) {
      f[at].rows += f[i].qo_len;
      ++f[at].requests;
    }
    if (innermost < 0) continue;
    f[innermost].direct_rows += f[i].qo_len;
    f[innermost].weight += rows_cost(p.config, f[i].qo_len, false).kv_tile;
  }
  for (const int32_t n : nodes) {
    const RowsCost cost = rows_cost(p.config, f[n].rows, true);
    f[n].tile_cost = cost.kv_tile;
    f[n].pair_cost = cost.pairs;
    if (f[n].parent >= 0) f[f[n].parent].weight += cost.kv_tile;
  }
  return nodes;
}

/// Decides which nodes are taken. Returns whether any is.
bool decide(const PlanParams& p, const Forest& f, const std::vector<int32_t>& nodes) {
  int32_t deepest = 0;
  for (const int32_t n : nodes) deepest = max_of(deepest, f[n].depth);
  int32_t saved = 0;
  int32_t free_states = forest_states(p.config);
  for (int32_t depth = 1; depth <= deepest; ++depth) {
    for (const int32_t n : nodes) {
      if (f[n].depth != depth) continue;
      saved += decide_node(p, f, n, free_states);
      if (f[n].taken == n) free_states -= node_states(f[n].rows, f[n].begin);
    }
  }
  if (!forest_pays(p.config, saved)) {
    for (const int32_t n : nodes) drop_node(p, f, n);
  }
  return std::any_of(nodes.begin(), nodes.end(), [&](int32_t n) { return f[n].taken == n; });
}

}  // namespace

void add_forest_on_host(const PlanParams& p, Planned& planned) {
  const int32_t size = p.levels[0].num_groups;
  const auto count = static_cast<size_t>(size);
  std::vector<ForestEntry> entries(count);
  const Forest f{entries.data(), size};
  Tables tables{p.levels[0].table.indices, p.levels[0].table.entry_step, std::vector<int64_t>(count),
                std::vector<int32_t>(count)};
  for (int32_t i = 0; i < size; ++i) {
    const RowGroup& group = p.schedule.groups[i];
    f[i].qo_begin = group.qo_begin;
    f[i].qo_len = group.qo_len;
    tables.begin[static_cast<size_t>(i)] = group.table_begin;
    tables.pages[static_cast<size_t>(i)] =
        shareable_pages(p, group, read_first_entry(p.levels[0].table, group.table_begin));
  }
  if (!find_attachments(tables, f)) return;
  const std::vector<int32_t> nodes = find_nodes(p, f);
  if (!decide(p, f, nodes)) return;

  int32_t own_states = 0;
  for (int32_t i = 0; i < size; ++i) {
    const int32_t innermost = f.innermost(i);
    if (innermost < 0 || f[innermost].taken < 0) continue;
    f[i].merge_begin = own_states;
    own_states += f[i].qo_len;
    planned.num_links = max_of(planned.num_links, f[f[innermost].taken].taken_depth + 1);
  }
  planned.num_merge_rows = own_states;
  int32_t rows = 0;
  for (const int32_t n : nodes) {
    if (f[n].taken != n) continue;
    f[n].row_begin = rows;
    rows += f[n].rows;
    f[n].group = p.schedule.nodes[n].group = planned.num_groups++;
    RowGroup& group = p.schedule.groups[f[n].group];
    group = node_group(p, f, n, tables.begin[static_cast<size_t>(n)]);
    group.qo_begin = f[n].row_begin;
    group.state_begin = own_states + f[n].row_begin;
    int32_t rank = 0;
    for (int32_t i = 0; i < size; ++i) {
      if (f.taken_at(i, f[n].taken_depth) != n) continue;
      for (int32_t row = 0; row < f[i].qo_len; ++row) link_node_row(p, f, n, i, row, rank++);
    }
  }
  for (int32_t i = 0; i < size; ++i) {
    const int32_t innermost = f.innermost(i);
    const int32_t top = innermost >= 0 ? f[innermost].taken : -1;
    cut_group(p.levels[0].table, top >= 0 ? f[top].covered : 0, p.schedule.groups[i]);
    p.schedule.groups[i].state_begin = f[i].merge_begin;
    for (int32_t row = 0; top >= 0 && row < f[i].qo_len; ++row)
      link_own_row(p, f, i, row, f[top].taken_depth, planned.num_links);
  }
}

}  // namespace attn
