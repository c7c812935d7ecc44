// Chain speculative sampling: draft tokens are accepted until the first that is refused; the token after them is drawn
// from the residual of target and draft, or from the target when all were accepted.
#pragma once

#include "sampling/device/filtered.cuh"

namespace attn {

/// Of the draft tokens of a request.
struct DraftCounts {
  int32_t accepted;  // before the first that is refused
  int32_t passed;    // all whose own test passes, after a refused one, too
};

/// Every warp finds out by itself, 32 tokens at a time.
__device__ __forceinline__ DraftCounts count_drafts(const SamplingParams& params, int64_t row, int64_t seed,
                                                    int64_t position) {
  const IndexArray draft_ids{params.draft_token_ids, params.draft_ids_are_int64};
  const float* target = static_cast<const float*>(params.values) + row * (params.num_draft_tokens + 1) * params.vocab;
  const float* draft = params.draft_probs + row * params.num_draft_tokens * params.vocab;
  DraftCounts counts{};
  for (int32_t begin = 0; begin < params.num_draft_tokens; begin += 32) {
    const int32_t i = begin + ptx::lane_id();
    bool passes = false;
    if (i < params.num_draft_tokens) {
      const int64_t token = draft_ids[row * params.num_draft_tokens + i];
      if (token >= 0 && token < params.vocab) {
        const int64_t at = static_cast<int64_t>(i) * params.vocab + token;
        passes = accepts_draft(seed, position + i, __ldg(draft + at), __ldg(target + at));
      }
    }
    const uint32_t passed = __ballot_sync(ptx::kAllLanes, passes);
    if (counts.accepted == begin) counts.accepted += __clz(static_cast<int32_t>(__brev(~passed)));
    counts.passed += __popc(passed);
  }
  return counts;
}

/// Whether the target gives some token more than the draft does, or something that is not a probability.
__device__ __forceinline__ bool has_residual(const ProbSource<true>& source, int32_t vocab) {
  bool has = false;
  const int32_t steps = ceil_div(vocab, kSamplingThreads);
  for (int32_t step = 0; step < steps && !has; ++step) {
    const int32_t token = step * kSamplingThreads + static_cast<int32_t>(threadIdx.x);
    has = __syncthreads_or(token < vocab && !(source.one(token) == kMinusInfinity)) != 0;
  }
  return has;
}

__device__ __forceinline__ void speculate(const SamplingParams& params, SamplingShared& shared) {
  const int32_t row = ptx::cluster_id();
  const int32_t drafts = params.num_draft_tokens;
  const DraftCounts counts = count_drafts(params, row, params.seed[row], params.position[row]);
  const int32_t accepted = counts.accepted;
  const float* target =
      static_cast<const float*>(params.values) + (static_cast<int64_t>(row) * (drafts + 1) + accepted) * params.vocab;
  const float* draft =
      accepted < drafts ? params.draft_probs + (static_cast<int64_t>(row) * drafts + accepted) * params.vocab : nullptr;
  ProbSource<true> source(target, draft, params.vocab);
  if (draft != nullptr && !has_residual(source, params.vocab)) source.draft = nullptr;
  const RowSampler<ProbSource<true>> sampler(params, source, shared);
  const int64_t begin = static_cast<int64_t>(row) * (drafts + 1);
  if (sampler.rank == 0) {
    const IndexArray draft_ids{params.draft_token_ids, params.draft_ids_are_int64};
    for (int32_t i = threadIdx.x; i <= drafts; i += kSamplingThreads) {
      const int64_t id = i < accepted ? draft_ids[static_cast<int64_t>(row) * drafts + i] : -1;
      if (i != accepted) store_token(params, begin + i, static_cast<int32_t>(id));
    }
    if (threadIdx.x == 0) {
      params.num_accepted[row] = accepted;
      params.num_passed[row] = counts.passed;
    }
  }
  sampler.begin(accepted);
  if (sampler.race_all())
    sampler.write_token(begin + accepted);
  else
    sampler.write_invalid(begin + accepted);
}

__device__ __forceinline__ void speculate(const SamplingParams& params) {
  extern __shared__ __align__(16) char dynamic_shared[];
  speculate(params, *reinterpret_cast<SamplingShared*>(dynamic_shared));
}

}  // namespace attn
