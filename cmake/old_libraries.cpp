// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
//
// What headers of a new compiler take from the C and C++ libraries, and the libraries of
// a system with glibc 2.28 and GCC 8 do not have. Hidden, so that only this extension
// sees them.
#include <new>
#include <sstream>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// glibc 2.32: whether reference counts may do without atomic instructions. They may not.
HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// GCC 9: the constructors of string streams without arguments.
HIDDEN void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  new (self) std::ostringstream(std::ios_base::out);
}

HIDDEN void _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  new (self) std::stringstream(std::ios_base::in | std::ios_base::out);
}
