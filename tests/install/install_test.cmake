# SPDX-License-Identifier: Apache-2.0
# KIND: static, shared (CMake package) or pkg-config (shared, and static by --static).

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\nfailed (${result}):\n${output}")
  endif()
  set(run_output "${output}" PARENT_SCOPE)
endfunction()

function(expect_output pattern)
  if(NOT run_output MATCHES "${pattern}")
    message(FATAL_ERROR "expected \"${pattern}\" in the output:\n${run_output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/staged)
# An installed tree may be moved: nothing in it may know the prefix it was installed to.
set(prefix ${WORK_DIR}/prefix)
file(RENAME ${WORK_DIR}/staged ${prefix})

if(KIND STREQUAL "pkg-config")
  find_program(PKG_CONFIG NAMES pkg-config pkgconf REQUIRED)
  set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
  run(${PKG_CONFIG} --modversion scsa)
  expect_output("^${VERSION}\n$")
  foreach(mode shared static)
    if(mode STREQUAL "static")
      run(${PKG_CONFIG} --cflags --libs --static scsa)
      string(REPLACE "-lscsa" "-l:libscsa.a" run_output "${run_output}")
    else()
      run(${PKG_CONFIG} --cflags --libs scsa)
    endif()
    separate_arguments(flags UNIX_COMMAND "${run_output}")
    run(${CXX_COMPILER} -std=c++20 ${CONSUMER_DIR}/main.cc -o ${WORK_DIR}/consumer-${mode} ${flags})
    run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${prefix}/${LIBDIR} ${WORK_DIR}/consumer-${mode})
    expect_output("exact and sparse attention agree")
  endforeach()
else()
  set(options)
  if(KIND STREQUAL "shared")
    # Programs that link the shared library need none of the packages that it was built with.
    set(options -DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON -DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON)
  endif()
  run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${CONSUMER_DIR} -B ${WORK_DIR}/build
    -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_PREFIX_PATH=${prefix} -DSCSA_KIND=${KIND} -DSCSA_VERSION=${VERSION}
    ${options})
  run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
  run(${WORK_DIR}/build/consumer)
  expect_output("exact and sparse attention agree")
endif()
