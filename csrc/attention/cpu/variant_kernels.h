// Included after the source of a variant, which defines attn::UserVariant. ATTN_VARIANT_ENGINE is the engine,
// ATTN_VARIANT the variant, with scales or without, ATTN_HEADERS_DIGEST a string.
#pragma once

#include "attention/cpu/attention_kernel.h"
#include "attention/cpu/row_ranges.h"
#include "attention/cpu/variant_module.h"

extern "C" {
extern __attribute__((visibility("default"))) const attn::cpu::VariantModule attn_variant_module;
const attn::cpu::VariantModule attn_variant_module = {
    ATTN_HEADERS_DIGEST,
    attn::cpu::AttentionKernel<ATTN_VARIANT_ENGINE, ATTN_VARIANT>::kernels(attn::cpu::find_row_ranges<ATTN_VARIANT>)};
}
