/* Let a Linux 6.1 that runs as a process boot on processors with AMX.

It sets the floating-point registers of its processes with a buffer that is shorter than theirs, which the kernel of this
machine refuses. This library, which is loaded before libc, adds the registers that the buffer leaves out, unchanged. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

long ptrace(enum __ptrace_request request, ...) {
    static long (*call)(int, pid_t, void *, void *);
    static __thread char registers[1 << 16];
    va_list rest;
    va_start(rest, request);
    pid_t pid = va_arg(rest, pid_t);
    void *address = va_arg(rest, void *);
    void *data = va_arg(rest, void *);
    va_end(rest);
    if (!call)
        call = dlsym(RTLD_NEXT, "ptrace");
    if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE) {
        struct iovec *given = data, whole = {registers, sizeof registers};
        if (!call(PTRACE_GETREGSET, pid, address, &whole) && whole.iov_len > given->iov_len) {
            memcpy(registers, given->iov_base, given->iov_len);
            return call(PTRACE_SETREGSET, pid, address, &whole);
        }
    }
    return call(request, pid, address, data);
}
