// What every library of device_attention.cpp has in common: compiled once for all of them (`precompiled` of
// compilation.compile_object()).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <vector>

#include "attention/merge/merge.cuh"
#include "attention/merge/shape.h"
#include "attention/sm80/attention.cuh"
#include "attention/sm80/design.h"
#include "attention/sm90/attention.cuh"
#include "attention/sm90/design.h"
#include "common/kernel_code.cuh"
#include "common/ptx/copy.cuh"
#include "cuda_emulation.h"
#include "planner/params.h"
