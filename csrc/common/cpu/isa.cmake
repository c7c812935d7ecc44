# Sources named *_avx2.cpp, *_avx512.cpp and *_amx.cpp are compiled for that instruction set; which one runs is chosen at run time (isa.cpp).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mfma -mf16c)
  # g++ 12 warns about its own intrinsics (GCC bug 105593).
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -Wno-maybe-uninitialized -Wno-uninitialized)
  set(amx ${avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
  foreach(isa avx2 avx512 amx)
    set(sources ${host_sources})
    list(FILTER sources INCLUDE REGEX "_${isa}\\.cpp$")
    set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${${isa}}")
  endforeach()
else()
  list(FILTER host_sources EXCLUDE REGEX "_(avx2|avx512|amx)\\.cpp$")
endif()
