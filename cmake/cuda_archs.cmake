# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#
# The CUDA architectures that the extension has machine code for, and the choice of some
# of them by VLLM_GLM_DSA_CUDA_ARCHS. `f` is a family: 10.0f also runs on 10.3, 12.0f on
# 12.1. As a script it prints the choice:
#
#   VLLM_GLM_DSA_CUDA_ARCHS="9.0;12.0" cmake -P cmake/cuda_archs.cmake
cmake_minimum_required(VERSION 3.24)
set(GLM_DSA_CUDA_ARCHS 8.0 8.6 8.9 9.0 10.0f 12.0f)
set(GLM_DSA_FAMILY_MEMBERS 10.0 10.3 12.0 12.1)

# The members of GLM_DSA_CUDA_ARCHS that serve a request such as "9.0;12.1", in their own
# order; all of them for an empty one. Whatever suffix a request has, `a` or `f`, the
# architecture of that number serves it.
function(glm_dsa_choose_archs request out)
  string(REGEX MATCHALL "[^;, \t]+" names "${request}")
  set(wanted "")
  foreach(name IN LISTS names)
    if(NOT name MATCHES "^([0-9]+)\\.([0-9])[af]?$")
      message(FATAL_ERROR
        "VLLM_GLM_DSA_CUDA_ARCHS has \"${name}\", which is no architecture; "
        "expected some of: ${GLM_DSA_CUDA_ARCHS}")
    endif()
    set(number "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
    set(family "${CMAKE_MATCH_1}.0f")
    if(number IN_LIST GLM_DSA_CUDA_ARCHS)
      list(APPEND wanted ${number})
    elseif(number IN_LIST GLM_DSA_FAMILY_MEMBERS)
      list(APPEND wanted ${family})
    else()
      message(STATUS "CUDA architecture ${name} is left out: there is no code for it")
    endif()
  endforeach()
  set(chosen "")
  foreach(arch IN LISTS GLM_DSA_CUDA_ARCHS)
    if(NOT names OR arch IN_LIST wanted)
      list(APPEND chosen ${arch})
    endif()
  endforeach()
  if(NOT chosen)
    message(FATAL_ERROR
      "VLLM_GLM_DSA_CUDA_ARCHS is \"${request}\", which leaves no architecture; "
      "expected some of: ${GLM_DSA_CUDA_ARCHS}")
  endif()
  list(JOIN chosen " " text)
  message(STATUS "CUDA architectures: ${text}")
  set(${out} ${chosen} PARENT_SCOPE)
endfunction()

# nvcc's options for the machine code of `archs`, without PTX.
function(glm_dsa_gencode archs out)
  set(options "")
  foreach(arch IN LISTS archs)
    string(REPLACE "." "" code ${arch})
    list(APPEND options "SHELL:-gencode arch=compute_${code},code=sm_${code}")
  endforeach()
  set(${out} ${options} PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  glm_dsa_choose_archs("$ENV{VLLM_GLM_DSA_CUDA_ARCHS}" chosen)
endif()
