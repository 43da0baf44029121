// Linked with the kernels of a wheel, so that they load on systems older than the one that compiled them: glibc 2.28, and the
// libstdc++ of GCC 8. Code from GCC 12 with glibc 2.36 calls newer functions. Here they are, made of older ones. setup.py has the
// linker turn calls of `log` and its kind to `__wrap_log`. Another symbol that is too new fails `make wheel`, which names it.

// Weak: a compiler for older systems, as in the images of manylinux, brings its own. Hidden: no other library sees them.
#define OLDER __attribute__((weak, visibility("hidden"), used))

#ifdef __x86_64__
#define FIRST_GLIBC "GLIBC_2.2.5"
#else
#define FIRST_GLIBC "GLIBC_2.17"
#endif

// glibc 2.29 gave these a version without the error handling of System V, which no kernel reads.
#define WRAP(name, parameters, arguments)                 \
  extern "C" double burnish_older_##name parameters;      \
  __asm__(".symver burnish_older_" #name "," #name "@" FIRST_GLIBC); \
  extern "C" OLDER double __wrap_##name parameters { return burnish_older_##name arguments; }

WRAP(exp, (double x), (x))
WRAP(exp2, (double x), (x))
WRAP(log, (double x), (x))
WRAP(log2, (double x), (x))
WRAP(pow, (double x, double y), (x, y))

extern "C" {

// glibc 2.32. Says that reference counts need no atomic operations; kernels run on several threads.
OLDER char __libc_single_threaded = 0;

// GCC 11. An exception of a base class of the newer one.
[[noreturn]] void throw_bad_alloc() __asm__("_ZSt17__throw_bad_allocv");
[[noreturn]] OLDER void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
[[noreturn]] void throw_bad_array_new_length() { throw_bad_alloc(); }

// GCC 12 compiles the copies of std::exception_ptr into the caller, around these two steps. Older ones call the constructor for a
// copy, which also takes a reference, and the destructor, which also drops one.
void copy_exception(void*, const void*) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception(void*) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
OLDER void add_reference(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
OLDER void release_reference(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void add_reference(void* self) {
  void* copy;
  copy_exception(&copy, self);
}
void release_reference(void* self) { destroy_exception(self); }

}
