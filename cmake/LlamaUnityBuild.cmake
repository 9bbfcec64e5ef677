# SPDX-License-Identifier: Apache-2.0
# Not part of this project's build: scripts/setup hands it to llama.cpp's own (CMAKE_PROJECT_TOP_LEVEL_INCLUDES) when it
# builds other versions of libllama. Its 180 files, one for each model family, include the same headers; united into a few
# they compile in a tenth of the time.
function(scsa_unite_llama)
  set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  # They define static functions that other files define by the same name.
  file(GLOB apart ${CMAKE_SOURCE_DIR}/src/llama-kv-cache*.cpp ${CMAKE_SOURCE_DIR}/src/models/gemma4.cpp)
  set_source_files_properties(${apart} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
cmake_language(DEFER CALL scsa_unite_llama)
