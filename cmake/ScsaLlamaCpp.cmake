# SPDX-License-Identifier: Apache-2.0
# Checks the llama.cpp that plugin and tool are built for, so that a wrong path is one message here and not a compiler
# error later. Either a source tree and the folder in which it was built, or an installed llama.cpp. Sets
#   SCSA_GGML_VERSION, SCSA_GGML_VERSION_NUMBER   the version that the struct layouts belong to; another one is refused
#                                                 when the plugin is loaded. The number is 1,000,000 major + 1,000 minor + patch
#   SCSA_LLAMA_INCLUDE_DIRS, SCSA_LLAMA_LIBRARY_DIR   the latter empty where there are headers alone
if(SCSA_LLAMA_CPP_BUILD_DIR AND NOT SCSA_LLAMA_CPP_DIR)
  message(FATAL_ERROR "SCSA_LLAMA_CPP_BUILD_DIR is set, SCSA_LLAMA_CPP_DIR is not: set it to the llama.cpp source tree, "
    "or set neither to build the core library alone.")
endif()
if(NOT SCSA_LLAMA_CPP_DIR)
  return()
endif()

set(SCSA_LLAMA_INSTALLED OFF)
if(EXISTS "${SCSA_LLAMA_CPP_DIR}/include/ggml-backend.h")
  set(SCSA_LLAMA_INSTALLED ON)
endif()

if(SCSA_LLAMA_INSTALLED)
  if(SCSA_LLAMA_CPP_BUILD_DIR)
    message(FATAL_ERROR "SCSA_LLAMA_CPP_DIR (${SCSA_LLAMA_CPP_DIR}) is an installed llama.cpp, which holds its own "
      "libraries: leave SCSA_LLAMA_CPP_BUILD_DIR empty.")
  endif()
  set(SCSA_LLAMA_INCLUDE_DIRS ${SCSA_LLAMA_CPP_DIR}/include)
  find_file(_scsa_version_file ggml-config-version.cmake ggml-version.cmake NO_CACHE NO_DEFAULT_PATH
    PATHS ${SCSA_LLAMA_CPP_DIR} PATH_SUFFIXES ${CMAKE_INSTALL_LIBDIR}/cmake/ggml lib/cmake/ggml lib64/cmake/ggml)
  find_library(_scsa_libllama llama NO_CACHE NO_DEFAULT_PATH
    PATHS ${SCSA_LLAMA_CPP_DIR} PATH_SUFFIXES ${CMAKE_INSTALL_LIBDIR} lib lib64)
  if(NOT _scsa_version_file OR NOT _scsa_libllama)
    message(FATAL_ERROR "SCSA_LLAMA_CPP_DIR (${SCSA_LLAMA_CPP_DIR}) holds no complete installed llama.cpp: libllama or "
      "ggml's CMake package is missing below it.")
  endif()
  cmake_path(GET _scsa_libllama PARENT_PATH SCSA_LLAMA_LIBRARY_DIR)
  file(STRINGS "${_scsa_version_file}" _scsa_line REGEX "^ *set\\(PACKAGE_VERSION \"" LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" SCSA_GGML_VERSION "${_scsa_line}")
  # The versions whose structs ggml_internal.h declares: those in which ggml-backend-impl.h was compared.
  if(NOT SCSA_GGML_VERSION VERSION_EQUAL 0.9.11 AND
      (SCSA_GGML_VERSION VERSION_LESS 0.13.1 OR SCSA_GGML_VERSION VERSION_GREATER 0.25.3))
    message(FATAL_ERROR "The installed llama.cpp in ${SCSA_LLAMA_CPP_DIR} has ggml ${SCSA_GGML_VERSION}, whose internal "
      "structs this project does not know: 0.9.11 and 0.13.1 to 0.25.3. Give the source tree of that llama.cpp instead.")
  endif()
  unset(_scsa_version_file)
  unset(_scsa_libllama)
  unset(_scsa_line)
else()
  # The Python package has no tool, and the plugin needs the headers alone.
  if(NOT SCSA_LLAMA_CPP_BUILD_DIR AND NOT SCSA_BUILD_PYTHON)
    message(FATAL_ERROR "SCSA_LLAMA_CPP_DIR is set, SCSA_LLAMA_CPP_BUILD_DIR is not: set it to the folder in which that "
      "tree was built (the one with bin/libllama.so), or set neither to build the core library alone.")
  endif()
  foreach(_file include/llama.h ggml/include/ggml.h ggml/include/ggml-backend.h ggml/src/ggml-backend-impl.h)
    if(NOT EXISTS "${SCSA_LLAMA_CPP_DIR}/${_file}")
      message(FATAL_ERROR "SCSA_LLAMA_CPP_DIR (${SCSA_LLAMA_CPP_DIR}) is no complete llama.cpp source tree, and no "
        "installed llama.cpp: ${_file} is missing. scripts/setup gets the version that this project is tested with.")
    endif()
  endforeach()
  set(SCSA_LLAMA_INCLUDE_DIRS
    ${SCSA_LLAMA_CPP_DIR}/include ${SCSA_LLAMA_CPP_DIR}/ggml/include ${SCSA_LLAMA_CPP_DIR}/ggml/src)
  set(SCSA_LLAMA_LIBRARY_DIR "")
  if(SCSA_LLAMA_CPP_BUILD_DIR)
    set(SCSA_LLAMA_LIBRARY_DIR ${SCSA_LLAMA_CPP_BUILD_DIR}/bin)
    foreach(_file llama ggml ggml-base ggml-cpu)
      set(_file ${CMAKE_SHARED_LIBRARY_PREFIX}${_file}${CMAKE_SHARED_LIBRARY_SUFFIX})
      if(NOT EXISTS "${SCSA_LLAMA_LIBRARY_DIR}/${_file}")
        message(FATAL_ERROR "SCSA_LLAMA_CPP_BUILD_DIR (${SCSA_LLAMA_CPP_BUILD_DIR}) holds no finished shared build of "
          "llama.cpp: bin/${_file} is missing. scripts/setup builds it; by hand, use -DBUILD_SHARED_LIBS=ON.")
      endif()
    endforeach()
  endif()
  unset(_file)
  set(SCSA_GGML_VERSION "")
  foreach(_part MAJOR MINOR PATCH)
    file(STRINGS "${SCSA_LLAMA_CPP_DIR}/ggml/CMakeLists.txt" _line REGEX "^set\\(GGML_VERSION_${_part} ")
    if(NOT _line MATCHES "GGML_VERSION_${_part} ([0-9]+)")
      message(FATAL_ERROR "SCSA_LLAMA_CPP_DIR (${SCSA_LLAMA_CPP_DIR}) is too old: its ggml does not tell its version "
        "(ggml/CMakeLists.txt sets no GGML_VERSION_${_part}).")
    endif()
    list(APPEND SCSA_GGML_VERSION ${CMAKE_MATCH_1})
  endforeach()
  list(JOIN SCSA_GGML_VERSION "." SCSA_GGML_VERSION)
  unset(_line)
  unset(_part)
endif()

string(REPLACE "." ";" _scsa_parts ${SCSA_GGML_VERSION})
list(GET _scsa_parts 0 _scsa_major)
list(GET _scsa_parts 1 _scsa_minor)
list(GET _scsa_parts 2 _scsa_patch)
math(EXPR SCSA_GGML_VERSION_NUMBER "${_scsa_major} * 1000000 + ${_scsa_minor} * 1000 + ${_scsa_patch}")
unset(_scsa_parts)
unset(_scsa_major)
unset(_scsa_minor)
unset(_scsa_patch)
