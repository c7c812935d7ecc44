// An Attention object: one shape of heads, one workspace, the last plan.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "attention/cpu/kernels.h"
#include "attention/kernel_design.h"
#include "attention/params.h"
#include "cache/kv_cache.h"
#include "common/data_type.h"
#include "planner/params.h"
#include "runtime/driver.h"
#include "runtime/selection.h"

namespace attn {

/// Fixed when the object is made. Filled by Python.
struct AttentionConfig {
  int64_t dequantized_bytes;  // most that DequantizedKv may take, where the design can use it
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;    // of Q and K
  int32_t head_dim_v;  // of V and O
  DataType dtype;      // of O, unless it is of 8 bits
  DataType q_dtype;    // of Q: dtype, or kv_dtype of 8 bits
  DataType kv_dtype;   // of the cache: dtype, the other 16-bit type, or one of is_in_bytes()
  int32_t max_rows;
  int32_t max_batch;   // requests (row groups) of a level
  int32_t max_levels;  // of a composition
  int32_t num_ctas;    // 0: as many as the device holds at once
  CascadeMode cascade;
  int32_t design;  // in kDesigns: the schedule is made for it; a CPU runs the schedules of all
  int32_t device;
  bool batch_invariant;
  bool on_cuda;
  bool has_variant;        // It is not the standard one.
  bool uses_softmax;       // The variant does.
  bool has_mask;           // The variant has one.
  bool skips_kv_tiles;     // The variant's mask may have holes (VariantBase::kSkipsTiles).
  bool has_sinks;          // Runs may be given sinks.
  bool float8_out;         // Runs may be given a scale of O. O is then e4m3.
  bool multiplies_float8;  // KvForm::multiplies_float8
  bool token_scales;       // The cache has TokenScales.
  bool rotation;           // The cache's rows are rotated (common/rotation.h).

  HeadDims dims() const { return HeadDims(head_dim, head_dim_v); }
  KvForm kv_form() const {
    return KvForm(bytes_of(kv_dtype), multiplies_float8, token_scales, kv_dtype, dtype == DataType::kBFloat16);
  }
  DLDevice dl_device() const { return DLDevice{on_cuda ? kDLCUDA : kDLCPU, device}; }
};

/// Cubin files of the kernels "plan" and "merge", and of those of the design (KernelDesign::kernels), by these names;
/// kFloat8Out precedes the names of kernels with 8-bit outputs. With a variant only the design's first kernel must be
/// there. Also "dequantize" if schedules have room for dequantized tokens (ScheduleConfig), and "row_ranges" if the
/// variant has a mask. On a CPU "variant", a shared library, if there is one.
using KernelFiles = std::map<std::string, std::string>;
constexpr const char* kFloat8Out = "float8_out_";

/// What `plan` gets about a level of a composition, besides its tensors. Filled by Python.
struct LevelOptions {
  int32_t index;
  int32_t num_levels;  // of the composition
  int64_t page_size;
  int64_t window_left;
  const int32_t* kv_offsets;  // see PlanLevel; nullptr: none
  const int32_t* prompts;     // see PlanLevel; nullptr: none
  RowPositions positions;
  int32_t entry_step;  // see PageTable
  bool causal;
  bool finds_row_ranges;  // from the variant's mask, of all levels
  bool pages_change;      // the table's page ids may be others in later runs: no prefix is sought in them
  bool has_slots;         // runs pack the table's page ids, and count them
};

/// Sizes in bytes of the buffers that the caller allocates once.
struct WorkspaceSize {
  int64_t schedule;
  int64_t partial_o;
  int64_t partial_lse;
  int64_t row_ranges;   // and the KvTileLists after them
  int64_t dequantized;  // DequantizedKv
};

/// Most query heads: counts for each head and row fit into 64 bits.
constexpr int32_t kMaxHeads = 1 << 16;

class Attention {
 public:
  Attention(const AttentionConfig& config, const KernelFiles& files);

  /// The object that Python knows by this handle.
  static Attention& of(int64_t handle) { return *reinterpret_cast<Attention*>(handle); }

  /// The calling thread uses the object until it calls unlock(); it may lock the object again before that. Throws
  /// RuntimeError if another thread uses it.
  void lock();
  void unlock() { user_.store(0, std::memory_order_release); }

  /// Begins a new plan: locks, and drops the previous plan. plan() unlocks.
  void begin_plan();

  /// If this thread began a plan: unlocks. Drops the previous plan, unless another thread uses the object.
  void abandon_plan();

  const AttentionConfig& config() const { return config_; }
  const ScheduleConfig& schedule_config() const { return schedule_config_; }
  const ScheduleLayout& layout() const { return layout_; }
  WorkspaceSize workspace_size() const;
  void set_workspace(void* schedule, void* partial_o, void* partial_lse, void* row_ranges, void* dequantized);

  /// A level of the next plan, to be filled in by the caller.
  PlanLevel& level(int32_t index) { return plan_params_.levels[index]; }

  /// Plans the first `num_levels` levels on `stream`, or on the host; finds what the variant's mask lets each row see
  /// first, if that is wanted. `seeks_prefixes`: not where page ids may change until a run. Returns the ScheduleError
  /// bits on a CPU, 0 on CUDA.
  uint32_t plan(int32_t num_levels, bool finds_row_ranges, bool seeks_prefixes, driver::Stream stream);

  /// Runs the last plan; the fields of `params` that belong to the object are filled in here. `scales`: of an 8-bit
  /// cache and of Q. `token_scales`: of a cache with such, whose other scales are 1. Returns the ScheduleError bits on
  /// a CPU, 0 on CUDA.
  uint32_t run(LatentAttentionParams params, const AttentionScales& scales, const AttentionTokenScales& token_scales,
               driver::Stream stream);

  /// Says of a level of the next plan whether its page ids are slots that each run packs and counts.
  void set_has_slots(int32_t level, bool has_slots) { has_slots_[level] = has_slots; }
  /// Whether the plan has such a level.
  bool has_slots() const;

  /// Packs the slots of each level that has some; comes before a run. `selection`: the tokens whose slots the plan's
  /// only level gets; without indices the slots are packed as they are. `num_rows`: of Q.
  void select(const Selection& selection, int32_t num_rows, driver::Stream stream);

  /// The variant's Params, of the runs that follow.
  void set_variant_params(const void* params, size_t bytes);

  /// Loads the design's kernel of this name, which was not among the files.
  void load_kernel(const std::string& kernel, const std::string& file);

  bool has_variant_params() const { return has_variant_params_; }
  const VariantParams& variant_params() const { return variant_params_; }

  bool planned() const { return planned_page_size_ > 0; }
  int32_t planned_page_size() const { return planned_page_size_; }
  /// Requests of the plan. A level that does not name the requests of its rows takes row group i for request i.
  /// 0: all levels name them. -1: the levels that do not name them differ in their number of row groups, so a row group
  /// does not stand for one request.
  int32_t planned_batch() const {
    int32_t batch = 0;
    for (int32_t i = 0; i < plan_params_.num_levels; ++i) {
      const PlanLevel& level = plan_params_.levels[i];
      if (level.positions.requests != nullptr) continue;
      if (batch != 0 && batch != level.num_groups) return -1;
      batch = level.num_groups;
    }
    return batch;
  }

 private:
  /// The kernels of runs whose outputs are of one type.
  struct OutputKernels {
    driver::Kernel merge;
    driver::Kernel attention[kMaxDesignKernels];  // of the design
    KernelCode codes[kMaxDesignKernels] = {};
    KernelCode merge_code{};
  };

  /// lock() without the error: returns whether this thread uses the object.
  bool try_lock();
  void find_row_ranges(int32_t level, driver::Stream stream);
  /// Whether the plan may have row groups whose tokens are worth dequantizing before attention. `num_rows`: of Q.
  bool may_have_long_groups(int32_t num_rows) const;
  /// Dequantizes their tokens.
  void dequantize(const AttentionParams& params, const AttentionTokenScales& scales, driver::Stream stream) const;
  PlannedSelection planned_selection(int32_t level) const;
  int64_t row_ranges_bytes() const;
  int32_t num_kv_tile_lists() const;
  void load_kernels(const KernelFiles& files, int32_t forest_requests);
  /// `prefix`: kFloat8Out, or none.
  void load_output_kernels(const KernelFiles& files, const std::string& prefix, OutputKernels& kernels);
  void load_attention_kernel(OutputKernels& kernels, int32_t kernel, const std::string& file);

  AttentionConfig config_;
  const KernelDesign& design_;
  const bool is_interpreted_;  // a variant for a CPU without a file
  ScheduleConfig schedule_config_;
  ScheduleLayout layout_;
  driver::Kernel plan_kernel_, plan_forest_kernel_, row_ranges_kernel_, dequantize_kernel_;
  OutputKernels kernels_, float8_kernels_;
  cpu::Kernels cpu_kernels_{};  // of the variant
  VariantParams variant_params_{};
  bool has_variant_params_ = false;
  Schedule schedule_;
  PlanParams plan_params_{};
  bool has_slots_[kMaxLevels] = {};
  float* partial_o_ = nullptr;
  float* partial_lse_ = nullptr;
  RowRange* row_ranges_ = nullptr;
  DequantizedKv dequantized_{};
  int32_t planned_page_size_ = 0;   // 0: there is no plan
  std::atomic<uintptr_t> user_{0};  // the thread that uses the object; 0: none
};

}  // namespace attn
