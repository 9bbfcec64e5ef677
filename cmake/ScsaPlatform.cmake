# SPDX-License-Identifier: Apache-2.0
# Refuses platforms whose data layout the library does not support: rows are read as little-endian f16, bf16, f32 and
# q8_0 blocks, and row offsets need 64-bit pointers.
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  message(FATAL_ERROR "scsa needs a 64-bit target; this compiler's pointers have ${CMAKE_SIZEOF_VOID_P} bytes. "
    "Use a 64-bit compiler (without -m32).")
endif()
if(CMAKE_CXX_BYTE_ORDER STREQUAL "BIG_ENDIAN")
  message(FATAL_ERROR "scsa needs a little-endian target; ${CMAKE_SYSTEM_PROCESSOR} is big-endian here.")
endif()
