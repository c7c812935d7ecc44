// What Python tells the library's functions of sampling beside tensors and parameters.
#pragma once

#include "sampling/sampling.h"

namespace attn {

struct SamplingOptions {
  RowTask task;
  int32_t max_ctas;  // of a cluster; 1 where there are none
  int32_t row_ctas;  // that share a row; 0: as many as suit the batch
  bool of_probs;
  bool joint;
  bool tempered_logprobs;
};

}  // namespace attn
