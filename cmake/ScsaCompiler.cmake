# SPDX-License-Identifier: Apache-2.0
# Language level, warnings, sanitizers and the compiler cache.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# The public C headers need no more.
set(CMAKE_C_STANDARD 99)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
  endif()
  if(NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
    find_program(SCSA_CCACHE ccache)
    mark_as_advanced(SCSA_CCACHE)
    if(SCSA_CCACHE)
      set(CMAKE_C_COMPILER_LAUNCHER ${SCSA_CCACHE})
      set(CMAKE_CXX_COMPILER_LAUNCHER ${SCSA_CCACHE})
    endif()
  endif()
endif()

# For the project's own targets only; never part of an installed interface.
add_library(scsa_warnings INTERFACE)
target_compile_options(scsa_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
  # GCC 12 warns of overlapping copies inside std::string's operator+ that cannot happen (GCC bug 105651).
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
  $<$<BOOL:${SCSA_WERROR}>:-Werror>)

if(SCSA_SANITIZE)
  set(_scsa_sanitizers address undefined thread address,undefined)
  if(NOT SCSA_SANITIZE IN_LIST _scsa_sanitizers)
    list(JOIN _scsa_sanitizers " | " _scsa_sanitizers)
    message(FATAL_ERROR "SCSA_SANITIZE is \"${SCSA_SANITIZE}\"; it must be empty or one of: ${_scsa_sanitizers}")
  endif()
  unset(_scsa_sanitizers)
  add_compile_options(-fsanitize=${SCSA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -O1 -g1)
  # Each SIMD target takes long to compile and to test. Two differ from another one (SSE4, AVX3_DL) in few instructions;
  # for races two are enough, a portable and a wide one.
  if(SCSA_SANITIZE STREQUAL "thread")
    add_compile_definitions("SCSA_DISABLED_TARGETS=(HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)")
  else()
    add_compile_definitions("SCSA_DISABLED_TARGETS=(HWY_SSSE3 | HWY_AVX3)")
  endif()
  add_link_options(-fsanitize=${SCSA_SANITIZE})
endif()
