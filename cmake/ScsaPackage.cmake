# SPDX-License-Identifier: Apache-2.0
# `cpack -G DEB` in the build folder: one Debian package per component of ScsaInstall.cmake.
#
# The tool is in none of them: it links the libllama of the folder in which llama.cpp was built, for the CPU of that
# machine, and Debian has no package of that version. `cmake --install` installs it, bound to that folder.
if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME scsa)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "SCSA contributors <scsa@localhost>" CACHE STRING
  "Maintainer of the Debian packages; whoever distributes them sets it")

# One row per package: what dpkg needs to know beyond the files.
set(_scsa_runtime libscsa${SCSA_SOVERSION})
set(SCSA_PACKAGES ${_scsa_runtime} libscsa-dev scsa-doc)
set(CPACK_COMPONENTS_ALL runtime development documentation)

set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME ${_scsa_runtime})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "sparse decode attention for CPUs - library
The operator of SCSA, self-calibrating subquadratic attention: exact and sparse
attention of decoded tokens over a cache of keys and values, for C++ and C.")
# What programs that link the library will depend on.
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libscsa-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
# Highway: for the static library.
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "${_scsa_runtime} (= ${PROJECT_VERSION}), libhwy-dev")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS scsa-doc)
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "sparse decode attention for CPUs - development files
Headers for C++20 and C99, the static library, and the files for CMake and
pkg-config.")

set(CPACK_DEBIAN_DOCUMENTATION_PACKAGE_NAME scsa-doc)
set(CPACK_DEBIAN_DOCUMENTATION_PACKAGE_SECTION doc)
set(CPACK_DEBIAN_DOCUMENTATION_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_DOCUMENTATION_DESCRIPTION "sparse decode attention for CPUs - documentation
The mathematics of the operator, measurements, the plugin's options, the tool.")

if(TARGET ggml-scsa)
  list(APPEND SCSA_PACKAGES ggml-scsa)
  list(APPEND CPACK_COMPONENTS_ALL plugin)
  set(CPACK_DEBIAN_PLUGIN_PACKAGE_NAME ggml-scsa)
  set(CPACK_DEBIAN_PLUGIN_PACKAGE_SECTION science)
  set(CPACK_DEBIAN_PLUGIN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PLUGIN_PACKAGE_SUGGESTS scsa-doc)
  # llama.cpp is no dependency: the plugin is loaded by the one that the user has, and refuses another version of ggml.
  set(CPACK_DEBIAN_PLUGIN_DESCRIPTION "sparse decode attention for CPUs - plugin for llama.cpp
libggml-scsa.so takes over attention of decoded tokens in llama.cpp programs that
use ggml ${SCSA_GGML_VERSION} as a shared library. They load it by the environment variable
 GGML_BACKEND_PATH or LD_PRELOAD.")
endif()

# Each package's copyright file. In packages alone: not installed but with its component, by name.
foreach(_component IN LISTS CPACK_COMPONENTS_ALL)
  string(TOUPPER ${_component} _upper)
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/package/copyright
    DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${_upper}_PACKAGE_NAME}
    COMPONENT ${_component} EXCLUDE_FROM_ALL)
endforeach()
unset(_component)
unset(_upper)
unset(_scsa_runtime)

include(CPack)
