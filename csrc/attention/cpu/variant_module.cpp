#include "attention/cpu/variant_module.h"

#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <cstring>

namespace attn::cpu {

Kernels load_variant(const char* file) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) TVM_FFI_THROW(RuntimeError) << "loading " << file << ": " << dlerror();
  const auto* const module = static_cast<const VariantModule*>(dlsym(library, "attn_variant_module"));
  if (module == nullptr) TVM_FFI_THROW(RuntimeError) << "loading " << file << ": it holds no kernels of a variant";
  if (std::strcmp(module->headers_digest, ATTN_HEADERS_DIGEST) != 0)
    TVM_FFI_THROW(RuntimeError) << "loading " << file
                                << ": it was compiled from other headers than libattn_backend.so; reinstall "
                                   "attn-backend, whose csrc/ and lib/ do not belong together";
  return module->kernels;
}

}  // namespace attn::cpu
