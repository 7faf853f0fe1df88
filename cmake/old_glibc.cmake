# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#
# Links for glibc 2.28, whatever glibc the compiler has. glibc 2.34 moved the functions
# below, which the static CUDA runtime calls, into libc.so.6 under a new version. Linked
# before libc, libraries that hold nothing but their old names and versions make the
# linker write those down, which every glibc from 2.28 on serves.
set(_version GLIBC_2.2.5)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
  set(_version GLIBC_2.17)
endif()

function(glm_dsa_old_library name soname)
  list(JOIN ARGN "; " symbols)
  list(TRANSFORM ARGN REPLACE "(.+)" "void \\1(void) {}\n" OUTPUT_VARIABLE functions)
  list(JOIN functions "" functions)
  set(map "${_version} { global: ${symbols}; };\n")
  if("dlmopen" IN_LIST ARGN AND _version STREQUAL "GLIBC_2.2.5")
    string(REPLACE "dlmopen; " "" map "${map}")
    string(APPEND map "GLIBC_2.3.4 { global: dlmopen; } ${_version};\n")
  endif()
  set(base "${CMAKE_CURRENT_BINARY_DIR}/old_glibc/${soname}")
  file(CONFIGURE OUTPUT "${base}.c" CONTENT "${functions}" @ONLY)
  file(CONFIGURE OUTPUT "${base}.map" CONTENT "${map}" @ONLY)
  add_library(${name} SHARED "${base}.c")
  # The linker looks at the names alone; these take the place of the compiler's built-ins.
  target_compile_options(${name} PRIVATE -fno-builtin)
  target_link_options(${name} PRIVATE
    -nostdlib "-Wl,-soname,${soname}" "-Wl,--version-script,${base}.map")
  set_target_properties(${name} PROPERTIES NO_SONAME ON C_VISIBILITY_PRESET default)
endfunction()

glm_dsa_old_library(old_dl libdl.so.2 dlmopen dlclose dlerror dlopen dlsym dlvsym)
glm_dsa_old_library(old_rt librt.so.1 shm_open shm_unlink)
glm_dsa_old_library(old_pthread libpthread.so.0
  pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific
  pthread_join pthread_key_create pthread_key_delete pthread_kill
  pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
  pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once
  pthread_rwlock_destroy pthread_rwlock_init pthread_rwlock_rdlock
  pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
  pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock
  pthread_rwlockattr_destroy pthread_rwlockattr_init pthread_rwlockattr_setpshared
  pthread_setspecific pthread_spin_destroy pthread_spin_init pthread_spin_lock
  pthread_spin_trylock pthread_spin_unlock
  sem_destroy sem_init sem_post sem_timedwait sem_trywait sem_wait)

# `target` may use the functions above. Link it to everything else before.
function(glm_dsa_link_old_glibc target)
  target_sources(${target} PRIVATE "${PROJECT_SOURCE_DIR}/cmake/old_libraries.cpp")
  target_link_libraries(${target} PRIVATE old_dl old_rt old_pthread)
endfunction()
