#include "planner/host/forest.h"

#include <algorithm>
#include <iterator>
#include <map>
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
  const ForestRequest* requests;

  int32_t entry(int32_t request, int32_t page) const {
    return indices[begin[static_cast<size_t>(request)] + int64_t{page} * entry_step];
  }

  /// Leading pages that two requests share.
  int32_t common(int32_t a, int32_t b) const {
    const int32_t limit = min_of(requests[a].shareable, requests[b].shareable);
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
      return tables.entry(other, page) == tables.entry(request, page);
    };
    const auto is_candidate = [&](int32_t other) {
      return tables.requests[other].shareable > best.pages &&
             std::all_of(required.rbegin(), required.rend(), [&](int32_t page) { return has(other, page); });
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
    ForestRequest& request = f.requests[i];
    request.leader = -1;
    request.pages = 0;
    if (request.shareable == 0) continue;
    std::vector<int32_t>& same = by_first_page[tables.entry(i, 0)];
    const Attachment attachment = attach(tables, same, i);
    request.leader = attachment.leader;
    request.pages = attachment.pages;
    shares |= attachment.leader >= 0;
    same.push_back(i);
  }
  return shares;
}

/// Fills what follows from attachments. Returns the nodes in order.
std::vector<int32_t> find_nodes(const PlanParams& p, const Forest& f) {
  // The nodes on each request's own path, by their pages.
  std::vector<std::map<int32_t, int32_t>> paths(static_cast<size_t>(f.size));
  const auto path = [&](int32_t leader) -> std::map<int32_t, int32_t>& { return paths[static_cast<size_t>(leader)]; };
  std::vector<int32_t> nodes;
  for (int32_t i = 0; i < f.size; ++i) {
    ForestRequest& request = f.requests[i];
    request.node = -1;
    if (request.leader < 0) continue;
    request.node = path(request.leader).emplace(request.pages, i).first->second;
    if (f.is_node(i)) nodes.push_back(i);
  }
  for (const int32_t n : nodes) {
    const ForestRequest& request = f.requests[n];
    const auto place = path(request.leader).find(request.pages);
    f.nodes[n] = ForestNode{};
    f.nodes[n].pages = request.pages;
    f.nodes[n].parent =
        place == path(request.leader).begin() ? f.requests[request.leader].node : std::prev(place)->second;
  }
  for (int32_t i = 0; i < f.size; ++i) {
    ForestRequest& request = f.requests[i];
    request.innermost = path(i).empty() ? request.node : path(i).rbegin()->second;
    for (int32_t n = request.innermost; n >= 0; n = f.nodes[n].parent) {
      f.nodes[n].rows += request.qo_len;
      ++f.nodes[n].num_requests;
    }
    if (request.innermost < 0) continue;
    f.nodes[request.innermost].direct_rows += request.qo_len;
    f.nodes[request.innermost].weight += rows_cost(p.config, request.qo_len, false).kv_tile;
  }
  for (const int32_t n : nodes) {
    for (int32_t at = n; at >= 0; at = f.nodes[at].parent) ++f.nodes[n].depth;
    const int32_t parent = f.nodes[n].parent;
    if (parent >= 0) f.nodes[parent].weight += rows_cost(p.config, f.nodes[n].rows, true).kv_tile;
  }
  return nodes;
}

/// Decides which nodes are taken, those at the roots first.
void decide(const PlanParams& p, const Forest& f, std::vector<int32_t> nodes) {
  std::stable_sort(nodes.begin(), nodes.end(),
                   [&](int32_t a, int32_t b) { return f.nodes[a].depth < f.nodes[b].depth; });
  int32_t saved = 0;
  int32_t free_states = forest_states(p.config);
  for (const int32_t n : nodes) {
    saved += decide_node(p, f, n, free_states);
    if (f.nodes[n].taken == n) free_states -= node_states(f.nodes[n].rows, f.nodes[n].begin);
  }
  if (forest_pays(p.config, saved)) return;
  for (const int32_t n : nodes) drop_node(p, f, n);
}

}  // namespace

void add_forest_on_host(const PlanParams& p, Planned& planned) {
  const int32_t size = p.levels[0].num_groups;
  const auto count = static_cast<size_t>(size);
  std::vector<ForestRequest> requests(count);
  std::vector<ForestNode> node_storage(count);
  const Forest f{requests.data(), node_storage.data(), size};
  Tables tables{p.levels[0].table.indices, p.levels[0].table.entry_step, std::vector<int64_t>(count), f.requests};
  for (int32_t i = 0; i < size; ++i) {
    const RowGroup& group = p.schedule.groups[i];
    f.requests[i].qo_begin = group.qo_begin;
    f.requests[i].qo_len = group.qo_len;
    f.requests[i].shareable = begins_with_page(p.levels[0].table, group) ? shareable_pages(p, group) : 0;
    tables.begin[static_cast<size_t>(i)] = group.table_begin;
  }
  if (!find_attachments(tables, f)) return;
  const std::vector<int32_t> nodes = find_nodes(p, f);
  decide(p, f, nodes);

  for (int32_t i = 0; i < size; ++i) {
    ForestRequest& request = f.requests[i];
    request.top = request.innermost >= 0 ? f.nodes[request.innermost].taken : -1;
    request.merge_begin = request.top >= 0 ? planned.num_merge_rows : -1;
    if (request.top < 0) continue;
    planned.num_merge_rows += request.qo_len;
    planned.num_links = max_of(planned.num_links, f.nodes[request.top].taken_depth + 1);
  }
  int32_t num_node_rows = 0;
  for (const int32_t n : nodes) {
    if (f.nodes[n].taken != n) continue;
    f.nodes[n].row_begin = num_node_rows;
    num_node_rows += f.nodes[n].rows;
    f.nodes[n].group = p.schedule.nodes[n].group = planned.num_groups++;
  }
  for (int32_t i = 0; i < size; ++i) {
    make_groups(p, f, i, planned.num_merge_rows);
    link_own_rows(p, f, i, planned.num_links);
  }
  for (const int32_t n : nodes) {
    if (f.nodes[n].taken != n) continue;
    int32_t rank = 0;
    for (int32_t i = 0; i < size; ++i) {
      if (f.taken_at(i, f.nodes[n].taken_depth) != n) continue;
      for (int32_t row = 0; row < f.requests[i].qo_len; ++row) link_node_row(p, f, n, i, row, rank++);
    }
  }
}

}  // namespace attn
