# SPDX-License-Identifier: Apache-2.0
# Installs the core library: headers, both libraries, CMake package and pkg-config file. The plugin and the tool install
# themselves in their own folders.
include(CMakePackageConfigHelpers)

set(_scsa_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/scsa)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/scsa TYPE INCLUDE FILES_MATCHING PATTERN "*.h")
install(TARGETS scsa EXPORT scsa-static-targets)
install(TARGETS scsa_shared EXPORT scsa-shared-targets)
# Two export sets, so that a program that links the shared library needs neither Highway's nor OpenMP's package.
install(EXPORT scsa-static-targets NAMESPACE scsa:: DESTINATION ${_scsa_package_dir})
install(EXPORT scsa-shared-targets NAMESPACE scsa:: DESTINATION ${_scsa_package_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/scsa-config.cmake.in
  ${PROJECT_BINARY_DIR}/package/scsa-config.cmake
  INSTALL_DESTINATION ${_scsa_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/scsa-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/package/scsa-config.cmake
  ${PROJECT_BINARY_DIR}/package/scsa-config-version.cmake
  DESTINATION ${_scsa_package_dir})

# Relative to the file, so that an installed tree can be moved.
file(RELATIVE_PATH _scsa_pc_prefix
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/scsa.pc.in ${PROJECT_BINARY_DIR}/package/scsa.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/scsa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

unset(_scsa_package_dir)
unset(_scsa_pc_prefix)
