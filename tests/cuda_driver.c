/* A CUDA driver without a device, for tests: its memory is the host's. It has the functions of virtual memory management
 * that pagewire calls, compiled against NVIDIA's cuda.h, so that the compiler checks their signatures and the layout of
 * their structs. Allocations are memfds. There is one device, number 3. The environment variable REFUSE names a function
 * that fails. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)

static int refuses(const char *name) {
  const char *refused = getenv("REFUSE");
  return refused && !strcmp(refused, name);
}
#define MAY_REFUSE \
  if (refuses(__func__)) return CUDA_ERROR_NOT_PERMITTED

static int is_initialized;

CUresult CUDAAPI cuInit(unsigned int flags) {
  MAY_REFUSE;
  is_initialized = flags == 0;
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
  if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (ordinal != 3) return CUDA_ERROR_INVALID_DEVICE;
  *device = 3;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (device != 3) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
           attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
  if (refuses("an attribute") && attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    *value = 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_NOT_PERMITTED   ? "operation not permitted"
          : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
                                              : 0;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int is_ours(const CUmemAllocationProp *prop) {
  static const CUmemAllocationProp none;
  return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
         prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id == 3 &&
         prop->win32HandleMetaData == 0 && !memcmp(&prop->allocFlags, &none.allocFlags, sizeof none.allocFlags);
}

CUresult CUDAAPI cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
  if (!is_ours(prop) || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM) return CUDA_ERROR_INVALID_VALUE;
  *granularity = GRANULARITY;
  return CUDA_SUCCESS;
}

/* A handle is a descriptor of its own, plus one. */
CUresult CUDAAPI cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
  MAY_REFUSE;
  if (!is_ours(prop) || size == 0 || size % GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
  if (size > (size_t)1 << 40) return CUDA_ERROR_OUT_OF_MEMORY;
  int fd = memfd_create("cuda-memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle)fd + 1;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  return handle && !close((int)handle - 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuMemExportToShareableHandle(
    void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
  MAY_REFUSE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_INVALID_VALUE;
  int fd = dup((int)handle - 1);
  memcpy(shareable, &fd, sizeof fd);
  return fd < 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type) {
  MAY_REFUSE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  int fd = dup((int)(size_t)shareable);
  *handle = (CUmemGenericAllocationHandle)fd + 1;
  return fd < 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(
    CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
  if (size % GRANULARITY || alignment || at || flags) return CUDA_ERROR_INVALID_VALUE;
  void *found = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = (CUdeviceptr)(size_t)found;
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
  return munmap((void *)(size_t)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Mapped memory has no access until cuMemSetAccess. */
CUresult CUDAAPI cuMemMap(
    CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  MAY_REFUSE;
  struct stat status;
  if (offset || flags || fstat((int)handle - 1, &status)) return CUDA_ERROR_INVALID_VALUE;
  if ((size_t)status.st_size != size) return CUDA_ERROR_INVALID_VALUE;
  void *at = (void *)(size_t)address;
  void *found = mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1, 0);
  return found == at ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
  void *at = (void *)(size_t)address;
  void *found = mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return found == at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
  MAY_REFUSE;
  if (count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->location.id != 3)
    return CUDA_ERROR_INVALID_VALUE;
  if (access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
  return mprotect((void *)(size_t)address, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
