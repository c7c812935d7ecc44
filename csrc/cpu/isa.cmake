# The executor is compiled once for each instruction set; which one runs is chosen at run time (isa.cpp).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mfma -mf16c)
  # g++ 12 warns about its own intrinsics (GCC bug 105593).
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -Wno-maybe-uninitialized -Wno-uninitialized)
  set_source_files_properties(csrc/cpu/attention_avx2.cpp csrc/cpu/sampling_avx2.cpp PROPERTIES COMPILE_OPTIONS "${avx2}")
  set_source_files_properties(csrc/cpu/attention_avx512.cpp csrc/cpu/sampling_avx512.cpp PROPERTIES COMPILE_OPTIONS "${avx512}")
  set_source_files_properties(csrc/cpu/attention_amx.cpp PROPERTIES COMPILE_OPTIONS "${avx512};-mavx512bf16;-mamx-tile;-mamx-bf16")
else()
  list(REMOVE_ITEM host_sources ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cpu/attention_avx2.cpp ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cpu/attention_avx512.cpp
       ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cpu/attention_amx.cpp ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cpu/sampling_avx2.cpp ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cpu/sampling_avx512.cpp)
endif()
