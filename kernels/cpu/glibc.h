/* Included before every source. glibc 2.34 gave functions of libpthread a new version when it moved them to libc; a
 * library linked with the old version, which is the same function, is loaded by older systems as well. `make dist`
 * fails on a function that needs a line here. */
#ifdef __linux__
#include <features.h>
#ifdef __GLIBC__
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#endif
#ifdef OLDEST
__asm__(".symver pthread_create, pthread_create@" OLDEST);
__asm__(".symver pthread_detach, pthread_detach@" OLDEST);
__asm__(".symver pthread_key_create, pthread_key_create@" OLDEST);
__asm__(".symver pthread_setspecific, pthread_setspecific@" OLDEST);
#endif
#endif
#endif
