# SPDX-License-Identifier: Apache-2.0
# Where outputs go, and where tests find models.
include(GNUInstallDirs)

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
  set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
endif()

# The same rule as scripts/lib.sh.
if(NOT "$ENV{SCSA_CACHE_DIR}" STREQUAL "")
  set(_scsa_cache_dir "$ENV{SCSA_CACHE_DIR}")
elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
  set(_scsa_cache_dir "$ENV{XDG_CACHE_HOME}/scsa")
else()
  set(_scsa_cache_dir "$ENV{HOME}/.cache/scsa")
endif()
set(SCSA_MODEL_DIR "${_scsa_cache_dir}/models" CACHE PATH "Folder of the GGUF models that tests use")
unset(_scsa_cache_dir)
