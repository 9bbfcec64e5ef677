# SPDX-License-Identifier: Apache-2.0
# Installs the core library (headers, both libraries, CMake package, pkg-config file) and the documentation. The plugin
# and the tool install themselves in their own folders. Components: runtime, development, documentation, plugin, tool.
include(CMakePackageConfigHelpers)

set(_scsa_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/scsa)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/scsa TYPE INCLUDE COMPONENT development FILES_MATCHING PATTERN "*.h")
install(TARGETS scsa EXPORT scsa-static-targets ARCHIVE COMPONENT development)
install(TARGETS scsa_shared EXPORT scsa-shared-targets LIBRARY COMPONENT runtime NAMELINK_COMPONENT development)
# Two export sets, so that a program that links the shared library needs neither Highway's nor OpenMP's package.
install(EXPORT scsa-static-targets NAMESPACE scsa:: DESTINATION ${_scsa_package_dir} COMPONENT development)
install(EXPORT scsa-shared-targets NAMESPACE scsa:: DESTINATION ${_scsa_package_dir} COMPONENT development)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/scsa-config.cmake.in
  ${PROJECT_BINARY_DIR}/package/scsa-config.cmake
  INSTALL_DESTINATION ${_scsa_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/scsa-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/package/scsa-config.cmake
  ${PROJECT_BINARY_DIR}/package/scsa-config-version.cmake
  DESTINATION ${_scsa_package_dir} COMPONENT development)

# What links a static C++ library into a program that is linked by a C compiler.
set(_scsa_pc_cxx_libraries "")
foreach(_library stdc++ c++)
  if(_library IN_LIST CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
    set(_scsa_pc_cxx_libraries "-l${_library}")
  endif()
endforeach()
# Relative to the file, so that an installed tree can be moved.
file(RELATIVE_PATH _scsa_pc_prefix
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/scsa.pc.in ${PROJECT_BINARY_DIR}/package/scsa.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/scsa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)

# As they lie in the source, so that their links hold.
install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md ${PROJECT_SOURCE_DIR}/LICENSE
  DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT documentation)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT documentation
  FILES_MATCHING PATTERN "*.md")

unset(_scsa_package_dir)
unset(_scsa_pc_prefix)
unset(_scsa_pc_cxx_libraries)
