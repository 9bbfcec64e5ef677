# SPDX-License-Identifier: Apache-2.0
# Checks the llama.cpp source tree and its build, so that a wrong path is one message here and not a compiler error
# later. The plugin needs ggml's internal backend header, hence the source tree and not an installed package.
# The Python package has no tool, and the plugin needs the headers alone.
if(SCSA_LLAMA_CPP_DIR AND NOT SCSA_LLAMA_CPP_BUILD_DIR AND NOT SCSA_BUILD_PYTHON)
  message(FATAL_ERROR "SCSA_LLAMA_CPP_DIR is set, SCSA_LLAMA_CPP_BUILD_DIR is not: set it to the folder in which that "
    "tree was built (the one with bin/libllama.so), or set neither to build the core library alone.")
endif()
if(SCSA_LLAMA_CPP_BUILD_DIR AND NOT SCSA_LLAMA_CPP_DIR)
  message(FATAL_ERROR "SCSA_LLAMA_CPP_BUILD_DIR is set, SCSA_LLAMA_CPP_DIR is not: set it to the llama.cpp source tree, "
    "or set neither to build the core library alone.")
endif()

if(SCSA_LLAMA_CPP_DIR)
  foreach(_file include/llama.h ggml/include/ggml.h ggml/include/ggml-backend.h ggml/src/ggml-backend-impl.h)
    if(NOT EXISTS "${SCSA_LLAMA_CPP_DIR}/${_file}")
      message(FATAL_ERROR "SCSA_LLAMA_CPP_DIR (${SCSA_LLAMA_CPP_DIR}) is no complete llama.cpp source tree: "
        "${_file} is missing. scripts/setup gets the version that this project is tested with.")
    endif()
  endforeach()
endif()
if(SCSA_LLAMA_CPP_BUILD_DIR)
  foreach(_file llama ggml ggml-base ggml-cpu)
    set(_file ${CMAKE_SHARED_LIBRARY_PREFIX}${_file}${CMAKE_SHARED_LIBRARY_SUFFIX})
    if(NOT EXISTS "${SCSA_LLAMA_CPP_BUILD_DIR}/bin/${_file}")
      message(FATAL_ERROR "SCSA_LLAMA_CPP_BUILD_DIR (${SCSA_LLAMA_CPP_BUILD_DIR}) holds no finished shared build of "
        "llama.cpp: bin/${_file} is missing. scripts/setup builds it; by hand, use -DBUILD_SHARED_LIBS=ON.")
    endif()
  endforeach()
  unset(_file)
endif()
